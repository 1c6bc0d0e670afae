"""One case with one backend: lower it, load what it made, run it with a delegate that is watched, compare."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering._upstream.compiler import CompileSpec, Partitioner
from exir_lowering._upstream.delegates import LoweredBackendModule, changed, named_data_contents
from exir_lowering.errors import (
    BackendContractError,
    BackendFailure,
    BackendUnavailableWarning,
    InvariantError,
    LoweringError,
    PartitionerContractError,
    exception_text,
    explained,
    ignoring_errors,
)
from exir_lowering.graphs import checksums, measures, sources
from exir_lowering.lowered import LoweredMethods
from exir_lowering.lowered_module.bundled import tolerance
from exir_lowering.options import LoweringOptions
from exir_lowering.pipeline import lower, to_backend
from exir_lowering.plugins import registry
from exir_lowering.plugins.delegate import Delegate, DelegateContext
from exir_lowering.runtime import Limits, LoadedProgram, load
from exir_lowering.runtime.isolated.engine import open_isolated
from exir_lowering.runtime.isolated.process import Process
from exir_lowering.runtime.source import read_file
from exir_lowering.testing.samples import Call, Case, Sample

Change = Callable[[bytes], bytes]

_starter = cache(lambda process: Process())  # what all processes with libraries are copies of, which start at once
_STRICT = LoweringOptions(on_backend_error="raise")  # a check of the partitioner that raises is an error then


class WatchedDelegate(Delegate):
    """Hands everything on to another delegate, with payloads changed by `change` before they are compiled."""

    def __init__(self, inner: Delegate, change: Change | None = None, *, probe: bool = False) -> None:
        """With `probe`, the second execution of each payload is first tried with a wrong number of inputs."""
        self.inner, self.change, self.probe = inner, change, probe
        self.written: list[str] = []  # inputs that `execute` wrote to, in words
        self.accepted: list[str] = []  # wrong numbers of inputs that `execute` took without raising
        self.raised: list[str] = []  # what `destroy` raised
        self.compiled = self.destroyed = 0

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> Any:
        """Let the delegate compile a payload, changed or not; no handle is none here too."""
        payload = processed if self.change is None else self.change(processed)
        content = self.inner.compile(payload, compile_specs, context)
        self.compiled += 1
        return None if content is None else [content, 0]  # with how often it was executed

    def execute(self, handle: list[Any], inputs: list[Any]) -> Sequence[Any]:
        """Let the delegate execute a payload, and compare its inputs before and after."""
        content, executed = handle
        for wrong in (inputs[:-1], [*inputs, *inputs[-1:]]) if self.probe and executed == 1 and inputs else ():
            with ignoring_errors():  # whatever it raises, nothing was computed
                self.inner.execute(content, [value.clone() for value in wrong])
                self.accepted.append(f"{len(wrong)} inputs instead of {len(inputs)}")
        before = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
        # The same memory, without torch's count of writes: they are found here, and by what is in the memory.
        outputs = self.inner.execute(content, [v.data if isinstance(v, torch.Tensor) else v for v in inputs])
        handle[1] += 1
        for number, (old, new) in enumerate(zip(before, inputs, strict=True)):
            if isinstance(new, torch.Tensor) and not ((old == new) | ((old != old) & (new != new))).all():
                self.written.append(f"input {number} of {len(inputs)}")
        return outputs

    def destroy(self, handle: list[Any]) -> None:
        """Let the delegate destroy a handle."""
        self.destroyed += 1
        try:
            self.inner.destroy(handle[0])
        except MemoryError:
            raise
        except Exception as error:
            self.raised.append(locate(error))


def locate(error: Exception) -> str:
    """Return what an error says, and the line of the plug-in that raised, if it does not say that."""
    text = str(error) if isinstance(error, LoweringError) else exception_text(error)
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    at = "" if isinstance(cause, LoweringError) else sources.raised_at(cause, object, "")
    return text if at in text else f"{text}\n  raised at {at}"


class Broken(Exception):
    """A demand is not met."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(text)
        self.check = check


class Unsupported(Exception):
    """The backend does not take the case; or it does, and the suite cannot run it: then `check` is "unwatched"."""

    def __init__(self, text: str, check: str = "") -> None:
        super().__init__(text)
        self.check = check


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tried."""

    backend_id: str
    backend: Any  # None for the one that is found by its id
    delegate: Delegate | type[Delegate] | None  # None for one that the runtime has itself
    libraries: tuple[str, ...]  # that execute the payloads instead, if there are any
    partitioner: Callable[[Case], Partitioner]
    may_refuse: Callable[[Case], bool]  # not where the backend's own partitioner takes the operators
    atol: float | None  # None for `tolerance`'s
    rtol: float | None


@dataclass(frozen=True, slots=True)
class Trial:
    """A case that is lowered."""

    subject: Subject
    case: Case
    sample: Sample
    lowered: LoweredMethods
    content: bytes  # the `.pte` file, or b"" when nothing executes it

    def watch(self, change: Change | None = None, *, probe: bool = False) -> WatchedDelegate | None:
        """Make a delegate that is watched; None for one of the runtime's own, or of a library."""
        if self.subject.delegate is None or self.subject.libraries:
            return None
        inner = registry.as_delegate(self.subject.backend_id, self.subject.delegate)
        kind = type(inner)  # whose names and lines messages have
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        watched: type[WatchedDelegate] = type(kind.__name__, (WatchedDelegate,), names)
        return watched(inner, change, probe=probe)

    def open(self, delegate: WatchedDelegate | None, change: Change | None = None) -> LoadedProgram:
        """Load the file, where libraries execute it in a process and changed by `change`; let every error through."""
        if not self.subject.libraries:
            return load(self.content, delegates={} if delegate is None else {self.subject.backend_id: delegate})
        file = read_file(self.content if change is None else self._damage(change), None, True)
        start = partial(Process, forked_from=_starter(os.getpid()))
        return LoadedProgram(file, open_isolated(file, {}, "error", Limits(seconds=60), start, self.subject.libraries))

    def _damage(self, change: Change) -> bytes:
        copied = replace(self.lowered, programs={m: graphs.copy_program(one) for m, one in self.lowered.items()})
        for program in copied.values():
            for _, module, name in graphs.delegates(program.graph_module):
                made = getattr(module, name)
                setattr(module, name, changed(made, processed_bytes=change(made.processed_bytes)))
        return copied.emit().buffer

    def load(self, delegate: WatchedDelegate | None) -> LoadedProgram:
        """Load the file; Broken if it cannot be loaded."""
        with explained(lambda error: Broken("compile", f"the file cannot be loaded: {locate(error)}")):
            return self.open(delegate)

    def run(self, program: LoadedProgram, call: Call, when: str, *, reset: bool = False) -> None:
        """Make a call, after a reset or not, and compare what it gives; Broken if it fails, or gives something else."""
        where = f"{when} of method {call.method!r}"
        checks = {BackendContractError: "outputs", BackendFailure: "execute"}
        with explained(lambda error: Broken(checks.get(type(error), "runtime"), f"{where}: {locate(error)}")):
            if reset:
                program.reset()
            outputs = program.run(call.method, *call.inputs)
        problem = self.describe_difference(outputs, call)
        if problem:
            raise Broken("numbers", f"{where}: {problem}")

    def describe_difference(self, outputs: Sequence[Any], call: Call) -> str:
        """Say how outputs differ from those of eager PyTorch; "" when they do not."""
        if len(outputs) != len(call.expected):
            return f"got {len(outputs)} outputs, expected {len(call.expected)}."
        for number, (got, expected) in enumerate(zip(outputs, call.expected, strict=True)):
            floating = isinstance(expected, torch.Tensor) and expected.dtype.is_floating_point
            atol, rtol = (
                0.0 if not floating else tolerance(expected.dtype) if given is None else given
                for given in (self.subject.atol, self.subject.rtol)
            )
            try:
                torch.testing.assert_close(got, expected, atol=atol, rtol=rtol, equal_nan=True)
            except AssertionError as error:
                what, one, other = (" ".join(str(each).split()) for each in (error, got, expected))
                return f"output {number} is not that of eager PyTorch: {what} Got {one:.160}, expected {other:.160}."
        return ""


def lower_case(subject: Subject, case: Case, sample: Sample) -> LoweredMethods:
    """Lower a case; Unsupported if the backend does not take it, Broken if it or its partitioner is at fault."""
    before = take_fingerprint(sample.edge)
    backends = None if subject.backend is None else {subject.backend_id: subject.backend}
    try:
        partitioner = subject.partitioner(case)
        # The programs from `torch.export` when the partitioner wants one of their operators whole.
        programs = sample.aten if any(_is_kept_whole(partitioner, one) for one in sample.aten.values()) else sample.edge
        make = to_backend if programs is sample.edge else lower
        with warnings.catch_warnings(action="ignore", category=BackendUnavailableWarning):  # the report says it
            warnings.filterwarnings("ignore", message="The rule deny")  # a method may have nothing for the host
            lowered = make(programs, partitioner, backends=backends, options=_STRICT)
    except BackendFailure as error:
        # Of another error, such as a KeyError, nobody can tell whether it is a gap or a defect, nor what to leave out.
        cause, refusal = error.__cause__, ""
        if isinstance(cause, (NotImplementedError, LoweringError)) and not isinstance(cause, InvariantError):
            names = {re.escape(name) for program in sample.edge.values() for name in _list_names(program) if name}
            refusal = str(cause) if re.search(rf"(?<!\w)({'|'.join(names)})(?!\w)", str(cause)) else ""
        if refusal and subject.may_refuse(case):
            raise Unsupported(f"refused: {refusal}") from error
        advice = "The partitioner gave it what it refuses: let it, or `supports=`, leave that on the host."
        if not refusal:
            advice = (
                "If it is to say that something is not supported, raise a NotImplementedError or an "
                "exir_lowering.InputError that names the operator, so that users know what to leave on the host."
            )
        raise Broken("preprocess", f"{locate(error)}\n{advice}") from error
    except BackendContractError as error:
        raise Broken("contract", str(error)) from error
    except MemoryError:
        raise
    except PartitionerContractError as error:
        raise Broken("partitioner", locate(error)) from error
    except Exception as error:
        raise Broken("lower", locate(error)) from error
    changed = sorted(name for name, value in take_fingerprint(sample.edge).items() if before.get(name) != value)
    if changed:
        raise Broken("purity", f"lowering changed {', '.join(changed)}: work on copies of what `preprocess` is given.")
    return lowered


def _is_kept_whole(partitioner: Partitioner, program: ExportedProgram) -> bool:
    whole = set(partitioner.ops_to_not_decompose(graphs.copy_program(program))[0])
    return any(node.target in whole for node in program.graph.nodes if node.op == "call_function")


def _list_names(program: ExportedProgram) -> Iterator[str]:
    signature = program.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        yield from (str(spec.target or ""), spec.kind.name)
    for _, node in graphs.every_node(program.graph_module):
        yield node.name
        if node.op == "call_function":
            operator = graphs.operator_name(node)
            yield from (operator, operator.rpartition(".")[0], operator.split(".")[min(1, operator.count("."))])
            for held in measures.tensors(node.meta.get("val")):
                yield str(held.dtype).removeprefix("torch.")
                if not all(isinstance(size, int) for size in held.shape):
                    yield from ("dynamic shape", "dynamic shapes")


def list_payloads(lowered: LoweredMethods) -> list[tuple[bytes, dict[str, bytes]]]:
    """Return what the backend made: for each delegate, in order, its payload and its named data."""
    return [(bytes(module.processed_bytes), named_data_contents(module)) for module in list_modules(lowered)]


def list_modules(lowered: LoweredMethods) -> list[LoweredBackendModule]:
    """Return the delegates, in order."""
    return [
        graphs.attribute(module, target)
        for program in lowered.values()
        for _, module, target in graphs.delegates(program.graph_module)
    ]


def take_fingerprint(programs: Mapping[str, ExportedProgram]) -> dict[str, Any]:
    """Return, by name, what identifies each part of some programs."""
    found: dict[str, Any] = {}
    for method, program in programs.items():
        found[f"the signature of {method!r}"] = str(program.graph_signature)
        for path, module in graphs.walk(program.graph_module):
            where = ".".join((method, *path))
            found[f"the graph of {where!r}"] = str(module.graph)
            for node in module.graph.nodes:
                found[f"the meta of {where}.{node.name}"] = (sorted(node.meta), repr(node.meta.get("val")))
        tensors = {**program.state_dict, **program.constants}
        for name, digest in checksums.digest_weights(tensors).items():
            found[f"{name} of {method!r}"] = digest
    return found
