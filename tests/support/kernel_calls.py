"""Calls of single operators, in every type, and what the runtime and `load` make of their files."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import itertools
import json
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir import to_edge
from torch import nn
from torch.export import ExportedProgram, export
from torch.utils import _pytree as pytree

from exir_lowering import LoweringError, LoweringOptions, load, lower
from exir_lowering._upstream import installed
from exir_lowering._upstream.runtime import open_program
from exir_lowering.pte.code import read_methods

DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_LARGEST = 20_000
_RANDOM = frozenset(
    {
        *("bernoulli", "empty", "empty_like", "empty_permuted", "empty_strided", "multinomial", "new_empty"),
        *("new_empty_strided", "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d"),
        *("nn.functional.dropout3d", "nn.functional.feature_alpha_dropout.with_train", "nn.functional.rrelu"),
        *("normal", "normal.in_place", "normal.number_mean", "rand_like", "randint", "randint_like", "randn"),
        *(
            "randn_like",
            "uniform",
            "exponential",
            "geometric",
            "cauchy",
            "log_normal",
            "nn.functional.fractional_max_pool2d",
        ),
        "nn.functional.fractional_max_pool3d",
    }
)
_CHUNK = 60
_SECONDS = 60


class Calls(nn.Module):
    """Calls a function; tensors among its arguments are inputs."""

    def __init__(self, function: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> None:
        super().__init__()
        self.function, self.spec = function, spec
        self.others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.others)
        for index, tensor in zip(self.places, tensors, strict=False):
            leaves[index] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        # Not torch's named tuples, which torch.export does not serialize.
        return tuple(pytree.tree_leaves(self.function(*args, **kwargs)))


@dataclass(frozen=True)
class Call:
    """A call of an operator: what it is, and what calls it, with its tensors."""

    name: str
    module: nn.Module | None
    inputs: tuple[torch.Tensor, ...]
    content: bytes | None = None  # the file, if it is not made from the module
    expected: Any = None  # of the file; None if nothing is known


def make_call(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """Make the call of a function."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    leaves = [leaf.detach().contiguous() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    module = Calls(function, leaves, spec)
    inputs = tuple(leaves[index] for index in module.places)
    shown = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs)
    others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    return Call(f"{name}({shown}; {str(others)[1:-1]})", module, inputs)


@functools.cache
def operators() -> Sequence[Any]:
    """Return torch's own tests of operators, each operator once."""
    from torch.testing._internal.common_methods_invocations import op_db

    return sorted((op for op in op_db if op.full_name not in _RANDOM), key=lambda op: op.full_name)


def sample_calls(op: Any, each: int, mixed: int, empty: int) -> Iterator[Call]:
    """Return calls of an operator with torch's own samples: of each type, of mixed types, and without elements."""
    chosen = random.Random(op.full_name)
    kept: list[tuple[list[Any], Any]] = []
    for dtype in (dtype for dtype in DTYPES if dtype in op.dtypes):
        torch.manual_seed(0)
        found: dict[Any, tuple[list[Any], Any]] = {}
        try:
            samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 80))
        except Exception:  # torch's samples do not cover each type that it supports
            continue
        for sample in chosen.sample(samples, len(samples)):
            leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if sum(tensor.numel() for tensor in tensors) <= _LARGEST:
                shapes = [min(tensor.dim(), 1) - 2 * (tensor.numel() == 0) for tensor in tensors]
                found.setdefault((str(shapes), str(spec)), (leaves, spec))
        for leaves, spec in itertools.islice(found.values(), each):
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            yield make_call(op.full_name, op.op, *args, **kwargs)
        kept += list(found.values())[: each + 2]
    for _ in range(mixed if kept else 0):
        leaves, spec = chosen.choice(kept)
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if len(places) > 1:
            other = list(leaves)
            place = chosen.choice(places)
            other[place] = leaves[place].detach().to(chosen.choice(DTYPES))
            args, kwargs = pytree.tree_unflatten(other, spec)
            yield make_call(op.full_name, op.op, *args, **kwargs)
    for _ in range(empty if kept else 0):
        leaves, spec = chosen.choice(kept)
        sizes = sorted({size for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape})
        if sizes:
            gone = chosen.choice(sizes)
            args, kwargs = pytree.tree_unflatten([_without(leaf, gone) for leaf in leaves], spec)
            yield make_call(op.full_name, op.op, *args, **kwargs)


def _without(leaf: Any, gone: int) -> Any:
    """Return a tensor whose dimensions of a size are empty."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().new_empty([0 if size == gone else size for size in leaf.shape])


@dataclass
class Outcome:
    """What became of a call; each is "right", or says what went wrong.

    Attributes:
        name: The call.
        kernels: What its file calls.
        lowering: Of the package's own compiler.
        runtime: Of ExecuTorch's runtime, without checks.
        load: Of `load`.
        upstream: Of ExecuTorch's compiler with the runtime, if the others are not all right.
    """

    name: str
    kernels: tuple[str, ...] = ()
    lowering: str = ""
    runtime: str = ""
    load: str = ""
    upstream: str = ""

    @property
    def defect(self) -> bool:
        """Whether it is a defect of this package."""
        return self.kind.split()[0].isupper()

    @property
    def kind(self) -> str:
        """The class that it belongs to; those that start in capitals are defects of this package."""
        if self.runtime == "ran":  # there is nothing to compare with
            return f"runtime ran, load {_first(self.load)}"
        ran = self.runtime == "right"
        died = any(each.startswith("died") for each in (self.lowering, self.load))
        if died or (self.runtime.startswith("died") and self.load in ("right", "ran")):
            return "FALSE ACCEPTANCE"
        if self.lowering != "right":
            if self.lowering.startswith("eager"):
                return "not a program"
            return "NOT LOWERED" if self.upstream == "right" else "not lowered by ExecuTorch either"
        if ran and self.load != "right":
            return "FALSE REFUSAL" if self.load.startswith("refused") else "LOAD DIFFERS"
        if not ran and self.upstream == "right":
            return "LOWERED WRONG"
        if self.runtime.startswith("wrong"):
            return "kernel wrong"
        return "right" if ran else f"runtime {self.runtime.partition(':')[0]}, load {self.load.partition(':')[0]}"


def _first(outcome: str) -> str:
    return outcome.partition(":")[0]


def compare(calls: Sequence[Call]) -> Iterator[Outcome]:
    """Compare calls, in children: what ends one is an outcome."""
    _warm()
    left = list(calls)
    while left:
        chunk, left = left[:_CHUNK], left[_CHUNK:]
        while chunk:
            done = yield from _in_child(chunk)
            chunk = chunk[done:]


@functools.cache
def _warm() -> None:
    """Lower once here, so that children find the caches of torch and ExecuTorch filled."""
    x = torch.ones(2)
    _compare(make_call("add", torch.add, x, x), lambda **fields: None)


def _in_child(calls: Sequence[Call]) -> Any:
    """Compare calls in a child until one ends it; return how many were compared."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        faulthandler.disable()
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        with os.fdopen(writes, "w", buffering=1) as pipe:
            for call in calls:
                signal.alarm(_SECONDS)
                _compare(call, lambda **fields: print(json.dumps(fields), file=pipe, flush=True))
        os._exit(0)
    os.close(writes)
    done = 0
    outcome = Outcome(calls[0].name)
    with os.fdopen(reads) as pipe:
        for line in pipe:
            for key, value in json.loads(line).items():
                setattr(outcome, key, value)
            if line == "{}\n":
                yield outcome
                done += 1
                outcome = Outcome(calls[done].name) if done < len(calls) else outcome
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if done < len(calls):
        for stage in ("lowering", "runtime", "load", "upstream"):
            if getattr(outcome, stage) == "running":
                setattr(outcome, stage, f"died: {code}")
        yield outcome
        done += 1
    return done


def _compare(call: Call, tell: Callable[..., None]) -> None:
    """Tell what becomes of a call, before each step that may end the process too; nothing is the end."""
    tell(lowering="running")
    if call.content is None:
        program, expected = _program(call, tell)
        if program is None:
            return tell()
        content = _lowered(program, tell)
    else:
        program, expected, content = None, call.expected, call.content
        tell(lowering="right")
    found = {"runtime": "", "load": ""}

    def result(run: Callable[[], Any]) -> str:
        made = _result(run, expected)
        return "ran" if made == "right" and expected is None else made

    if content is not None:
        codes, _ = read_methods(memoryview(content), lambda code, data: code)
        kernels = {".".join(filter(None, name)) for name in codes["forward"].operators}
        tell(kernels=sorted(kernels))
        tell(load="running")
        accepted = _result(lambda: load(content), None)
        tell(load=accepted, runtime="running")
        found["runtime"] = result(lambda: _bare(content, call.inputs))
        tell(runtime=found["runtime"])
        found["load"] = accepted
        if accepted == "right":
            tell(load="running")
            found["load"] = result(lambda: load(content).run("forward", *call.inputs))
            tell(load=found["load"])
    if program is not None and set(found.values()) != {"right"}:
        tell(upstream="running")
        tell(upstream=_result(lambda: _bare(to_edge(program).to_executorch().buffer, call.inputs), expected))
    tell()
    return None


def _program(call: Call, tell: Callable[..., None]) -> tuple[ExportedProgram | None, Any]:
    try:
        with torch.no_grad():
            expected = call.module(*(tensor.clone() for tensor in call.inputs))
            program = export(call.module, call.inputs, strict=False)
    except Exception as error:
        tell(lowering=f"eager: {str(error)[:100]}")
        return None, None
    return program, expected


def _lowered(program: ExportedProgram, tell: Callable[..., None]) -> bytes | None:
    try:
        content = (
            lower(program, options=LoweringOptions(rewrites=os.environ.get("HUNT_REWRITES", "none"))).emit().buffer
        )
    except Exception as error:
        tell(lowering=f"refused: {type(error).__name__}: {str(error)[:300]}")
        return None
    tell(lowering="right")
    return content


def _bare(content: bytes, inputs: Sequence[torch.Tensor]) -> Any:
    program = open_program(content, None)
    return program.load_method("forward")(tuple(tensor.contiguous() for tensor in inputs), clone_outputs=True)


def _result(run: Callable[[], Any], expected: Any) -> str:
    try:
        made = run()
    except LoweringError as error:
        return f"refused: {str(error)[:700]}"
    except Exception as error:
        return f"refused: {type(error).__name__}: {str(error)[:300]}"
    return "right" if expected is None else _difference(made, expected)


def _difference(made: Any, expected: Any) -> str:
    given, wanted = pytree.tree_leaves(made), pytree.tree_leaves(expected)
    given, wanted = ([one for one in each if isinstance(one, torch.Tensor)] for each in (given, wanted))
    for one, other in zip(given, wanted, strict=False):
        relative, absolute = (2e-2, 2e-2) if other.dtype in (torch.float16, torch.bfloat16) else (1e-3, 1e-4)
        with contextlib.suppress(RuntimeError):
            other = other.resolve_conj()
        try:
            torch.testing.assert_close(one, other.detach(), equal_nan=True, rtol=relative, atol=absolute)
        except AssertionError as error:
            return f"wrong: {' '.join(str(error).split())[:200]}"
    return "right" if len(given) == len(wanted) else f"wrong: {len(given)} tensors, not {len(wanted)}"


def kernels_of_the_runtime() -> frozenset[str]:
    """Return the names of the kernels that the runtime has."""
    return installed.kernels() or frozenset()
