"""A drop-in for `executorch.exir.backend.backend_api.to_backend`: its overloads, its exception types and messages."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, overload

from executorch.exir.backend import backend_api
from executorch.exir.backend.backend_api import MethodProgramsPartitionerSpec
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import Partitioner
from executorch.exir.lowered_backend_module import get_lowered_submodules
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from exir_lowering import pipeline
from exir_lowering._upstream import locks
from exir_lowering._upstream.delegates import LoweredBackendModule
from exir_lowering._upstream.hooks import conversions_by, conversions_in
from exir_lowering._upstream.passes import mending_passes
from exir_lowering._upstream.repairs import verifying_sizes
from exir_lowering.errors import BackendFailure, InputError, LoweringError, PartitionerContractError, UnknownPluginError
from exir_lowering.fast import accelerated, convert
from exir_lowering.graphs.copies import has_symbols, private_copy
from exir_lowering.lowered import LoweredMethods
from exir_lowering.options import LoweringOptions
from exir_lowering.partitioners.drop_in import convex_proposals as proposals
from exir_lowering.plans.report import Report
from exir_lowering.plugins import registry
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.runtime.engine import serving
from exir_lowering.steps import arguments
from exir_lowering.steps.conversion_context import converting
from exir_lowering.steps.edge import as_convertible
from exir_lowering.steps.finishing import keep_first_value


@overload
def to_backend(
    first: str, edge_program: ExportedProgram, compile_specs: list[CompileSpec], /
) -> LoweredBackendModule: ...
@overload
def to_backend(first: ExportedProgram, partitioner_instance: Partitioner, /) -> ExportedProgram: ...
@overload
def to_backend(first: MethodProgramsPartitionerSpec, /) -> dict[str, ExportedProgram]: ...


def to_backend(first: Any, *rest: Any, **named: Any) -> Any:
    """Lower as ExecuTorch's `to_backend` does, with this package's engine.

    Args:
        first: What selects the overload: a backend id (then the Edge program and its compile specs follow), an Edge
            program (a partitioner follows), or a `MethodProgramsPartitionerSpec`.
        rest: The other arguments, by position.
        named: The other arguments, by ExecuTorch's names.

    Returns:
        A LoweredBackendModule, an ExportedProgram, or a dict of ExportedPrograms by method.

    Raises:
        NotImplementedError: The backend was not found.
        AssertionError, RuntimeError: As ExecuTorch's; the `LoweringError` with the details is its `__cause__` or
            `__context__`.
        TypeError: No overload takes the first argument.
    """
    for kind, overloaded in _OVERLOADS.items():
        if isinstance(first, kind):
            return overloaded(first, *rest, **named)
    names = ", ".join(kind.__name__ for kind in _OVERLOADS)
    raise TypeError(f"to_backend: the first argument is a {type(first).__name__}, expected one of {names}.")


@dataclass(frozen=True, slots=True)
class PatchedLowering:
    """A lowering that ExecuTorch's code did with this package's engine.

    Attributes:
        methods: The names of the methods; "forward" where ExecuTorch does not pass the name.
        report: What was delegated, what was not, and why; None for a whole program that was lowered to one backend.
        elapsed: How long it took, in seconds.
    """

    methods: tuple[str, ...]
    report: Report | None
    elapsed: float

    def __str__(self) -> str:
        what = "a whole program, without a partitioner" if self.report is None else str(self.report)
        return f"{', '.join(self.methods)} in {self.elapsed:.2f} s: {what}"


class PatchedLowerings(list[PatchedLowering]):
    """The lowerings done inside `patch_executorch`, in order; it grows until the context ends."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "Nothing was lowered."

    def __repr__(self) -> str:
        return f"PatchedLowerings({', '.join('/'.join(one.methods) for one in self)})"


@contextmanager
def patch_executorch(
    *,
    convex_proposals: bool = False,
    fast: bool = True,
    rewrites: Literal["safe", "none"] | Sequence[Any] | None = None,
) -> Iterator[PatchedLowerings]:
    """Make ExecuTorch's `to_backend` use this package's engine while the context lasts.

    `EdgeProgramManager.to_backend` and `to_edge_transform_and_lower` go through it, and so does every module that
    imported the function earlier: its overloads are replaced, not its name. Meanwhile, ExecuTorch's own conversions
    wait for each other and for those of this package, in all threads. The arguments apply to the thread that enters the
    context, and only its lowerings are yielded: other threads lower with the defaults, unrecorded.

    Args:
        convex_proposals: Whether partitioners that are based on torch.fx's `CapabilityBasedPartitioner`, XNNPACK's
            included, use this package's proposal algorithm too, which makes no more partitions and takes linear time.
            A node that could be in either of two partitions may be in a different one than with torch.fx's algorithm.
        fast: Whether ExecuTorch's conversions, this package's engine and its emitter reuse results instead of
            computing them again, as with `LoweringOptions(fast=True)`; ExecuTorch's results are the same bytes.
        rewrites: The rewrites that turn the Edge programs into equivalent, faster ones, as in `LoweringOptions`; None
            for none, so that files are those that ExecuTorch makes.

    Yields:
        The lowerings, each with its report, including those in nested contexts.

    Raises:
        InputError: `rewrites` is not a list of rewrites, or `fast` is not a bool.
        UnknownPluginError, PluginLoadError: A rewrite cannot be found or loaded.
    """
    options = LoweringOptions(fast=fast, rewrites=rewrites, unsupported="allow")  # as ExecuTorch does
    arguments.choose_rewrites(options, default="none")
    done = PatchedLowerings()
    with ExitStack() as stack:
        stack.enter_context(locks.during(_patched, _Patch(options, (*_patched.get().notes, done)), _PATCHED))
        for context in (_WAITING, _CONVERTED, _MENDED, *[_ACCELERATED] * fast):
            stack.enter_context(context)
        if convex_proposals:
            stack.enter_context(proposals())
        yield done


@dataclass(frozen=True, slots=True)
class _Patch:
    """How ExecuTorch's code lowers in this thread, and where that is noted."""

    options: LoweringOptions = field(default_factory=lambda: LoweringOptions(unsupported="allow"))
    notes: tuple[PatchedLowerings, ...] = ()

    def note(self, methods: Iterable[str], report: Report | None, begun: float) -> None:
        """Note a lowering that is done."""
        one = PatchedLowering(tuple(methods), report, time.perf_counter() - begun)
        for note in self.notes:
            note.append(one)


_patched: ContextVar[_Patch] = ContextVar("exir_lowering_patch", default=_Patch())  # noqa: B039  # frozen


def _convert(name: str, program: ExportedProgram, partitioners: Sequence[Partitioner], config: Any) -> Any:
    """Convert a program to Edge dialect as ExecuTorch does; None if ExecuTorch has to, as where it may narrow sizes."""
    if has_symbols(program) or not _patched.get().options.fast:
        return None
    with converting([program], gradients=True):
        return convert(name, private_copy(program), partitioners, copy.deepcopy(config))[0]


def _replace_overloads() -> tuple[locks.Change, locks.Change]:
    dispatcher = backend_api.to_backend

    def register(overloads: Mapping[type, Any]) -> None:
        for kind, overloaded in overloads.items():
            dispatcher.register(kind, overloaded)

    return partial(register, _OVERLOADS), partial(register, {kind: dispatcher.dispatch(kind) for kind in _OVERLOADS})


_PATCHED = locks.Shared(_replace_overloads)
_WAITING = locks.replacing(lambda: conversions_in(locks.conversion))
# These three are entered in this order, inside the one above.
_CONVERTED = locks.replacing(lambda: conversions_by(_convert))
_MENDED = locks.replacing(
    lambda: [*conversions_in(lambda: mending_passes(numbers=False), as_convertible), *verifying_sizes()]
)
_ACCELERATED = locks.replacing(lambda: conversions_in(accelerated))


@contextmanager
def serve_delegates(
    delegates: Mapping[str, Delegate | type[Delegate]] | Sequence[Delegate | type[Delegate]],
) -> Iterator[None]:
    """Let programs that ExecuTorch's own loaders open, in `executorch.runtime` or pybindings, use Python delegates.

    `load` does not need this context; it also checks more, keeps threads apart, and raises what a delegate raised.
    ExecuTorch does not tell a backend where its inputs end: the first call of a payload gets as many inputs as possible
    and is repeated with fewer until the number of outputs matches what is left. What a delegate raises is printed
    to standard error, and ExecuTorch raises its own error. Programs that were set up in the context may be executed
    after it.

    Args:
        delegates: Delegates by id, or a sequence of delegates.

    Yields:
        Nothing.

    Raises:
        InputError: The delegates are invalid, or the runtime has its own backend with that id.
        BackendUnavailableError: Python delegates cannot be used here.
        PluginLoadError: A delegate could not be made.
    """
    given = registry.check_delegates(delegates)
    with serving({delegate_id: registry.as_delegate(delegate_id, found) for delegate_id, found in given.items()}):
        yield


def _whole_program(
    backend_id: str, edge_program: ExportedProgram, compile_specs: list[CompileSpec]
) -> LoweredBackendModule:
    begun = time.perf_counter()
    with _executorch_errors():
        lowered = pipeline.lower_whole_program(edge_program, backend_id, compile_specs)
    _patched.get().note(["forward"], None, begun)
    return lowered


def _one_method(edge_program: ExportedProgram, partitioner_instance: Partitioner) -> ExportedProgram:
    return _lower({"forward": edge_program}, {"forward": partitioner_instance})["forward"]


def _all_methods(
    method_edge_program_partitioners: MethodProgramsPartitionerSpec,
) -> dict[str, ExportedProgram]:
    programs = dict(method_edge_program_partitioners.method_to_edge_program)
    partitioners = dict(method_edge_program_partitioners.method_to_partitioner)
    for name in partitioners:
        if name not in programs:
            raise AssertionError(f"Partitioner for method {name} is not provided")
    lowered = _lower(programs, partitioners)
    return {name: lowered[name] if name in partitioners else program for name, program in programs.items()}


_OVERLOADS: Mapping[type, Callable[..., Any]] = {
    str: _whole_program,
    ExportedProgram: _one_method,
    MethodProgramsPartitionerSpec: _all_methods,
}
"""By the type of the first argument, on which ExecuTorch's to_backend dispatches."""


def _lower(programs: Mapping[str, ExportedProgram], partitioners: Mapping[str, Any]) -> LoweredMethods:
    patch, begun = _patched.get(), time.perf_counter()
    with _executorch_errors():
        lowered = pipeline.to_backend(programs, partitioners, options=patch.options)
    for program in lowered.values():
        _refuse_returned_state(program)
        keep_first_value(program)
    patch.note(lowered, lowered.report, begun)
    return lowered


def _refuse_returned_state(program: ExportedProgram) -> None:
    """Refuse as ExecuTorch does, which this package need not, a delegate that returns what it writes to a buffer."""
    for _, lowered, _ in get_lowered_submodules(program.graph_module):
        specs = lowered.original_module.graph_signature.output_specs
        written = {spec.arg.name: spec.target for spec in specs if spec.kind is OutputKind.BUFFER_MUTATION}
        for spec in specs:
            if spec.kind is OutputKind.USER_OUTPUT and spec.arg.name in written:
                raise AssertionError(
                    f"Constant {written[spec.arg.name]} was tagged to be consumed by the buffer, and was found to also "
                    "contain a buffer mutation. However this buffer mutation node was found to also be used as other "
                    "types of outputs which is currently not supported."
                )


@contextmanager
def _executorch_errors() -> Iterator[None]:
    """Raise what ExecuTorch raises in the same case, where a plug-in's own exception passes through unwrapped."""
    try:
        yield
    except UnknownPluginError as error:
        raise NotImplementedError(f"Backend {error.plugin_id} was not found.") from error
    except InputError as error:
        raise AssertionError(str(error)) from error
    except LoweringError as error:
        cause = error.__cause__
        if isinstance(error, BackendFailure) and cause is not None:
            raise cause  # noqa: B904  # the context says more
        if isinstance(error, PartitionerContractError):
            if error.violation == "raised" and cause is not None:
                while isinstance(cause, LoweringError) and cause.__cause__ is not None:  # of a partitioner in another
                    cause = cause.__cause__
                raise cause  # noqa: B904
            if error.violation in _MESSAGES:
                kind, message = _MESSAGES[error.violation]
                raise kind(message.format_map(error.details)) from error
        raise RuntimeError(str(error)) from error


_MESSAGES: Mapping[str, tuple[type[Exception], str]] = {
    "graph_modified": (AssertionError, "The partitioner {partitioner} should not modify the graph module"),
    "destinations": (
        AssertionError,
        "Partitioner {partitioner} needs a `partition_tags` field containing a mapping of tags to delegate spec",
    ),
    "output_tagged": (RuntimeError, "output node {node} should not be tagged"),
    "input_tagged": (
        RuntimeError,
        "placeholder node for non-params, non-buffer, and non-tensor constants should not be tagged: {node} ",
    ),
    "no_copy": (
        RuntimeError,
        "constant data node ({node}) is tagged with ({tag}) but has user ({user}) which has tag ({user_tag})",
    ),
    "not_convex": (AssertionError, "Invalid partition, found dependency cycles"),
}
