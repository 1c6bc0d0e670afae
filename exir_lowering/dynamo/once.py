"""What is done once per process: lowering a partition, and compiling its payload.

Partitions are equal if they compute the same: names, and the lines of the model that operators come from, do not
count, so a recompilation, a layer that is repeated, and a function that is compiled anew take what is there. Nothing is
kept longer than the compiled graphs that use it, and nothing is found again after `torch._dynamo.reset()`.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from executorch.exir.backend.backend_details import PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering.errors import BackendContractError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.graphs import debug_handles
from exir_lowering.plugins import registry
from exir_lowering.plugins.backend import PROVENANCE, Backend, BackendContext, ExecutorchBackend, context_argument
from exir_lowering.steps.cache.canonical import describe_program
from exir_lowering.steps.cache.forms import Storages
from exir_lowering.steps.cache.handles import number_handles, renumber, with_handles
from exir_lowering.steps.cache.keys import NoKeyError, make_key


@dataclass(eq=False)
class Kept:
    """Something that is kept while it is in use."""

    value: Any
    with_it: tuple[Any, ...] = ()  # what must live as long, such as the object whose identity is in its key


class Pool:
    """Values by key, each made once while the one before is in use."""

    def __init__(self) -> None:
        self._kept: weakref.WeakValueDictionary[Hashable, Kept] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()

    def find(self, key: Hashable) -> Kept | None:
        """Return what is kept for a key, None if nothing is."""
        return self._kept.get(key)

    def keep(self, key: Hashable, kept: Kept) -> Kept:
        """Keep a value for a key; return the one that is kept, which another thread may have made."""
        with self._lock:
            return self._kept.setdefault(key, kept)

    def forget(self) -> bool:
        """Find nothing again of what is kept, which stays with who uses it; return whether there was something."""
        with self._lock:
            found = len(self._kept) > 0
            self._kept.clear()
            return found


RESULTS = Pool()
"""What backends returned for partitions."""

HANDLES = Pool()
"""What delegates compiled payloads to."""


def forget() -> None:
    """Begin anew: what is lowered and compiled from now on takes nothing from before, and what nobody uses is freed."""
    if any([RESULTS.forget(), HANDLES.forget()]):
        gc.collect()  # what Dynamo has dropped refers to itself: without it, delegates would get no `destroy` yet


class SharedBackends(Mapping[str, Backend]):
    """The backends of a lowering, by id, each asked only for partitions that no compiled graph has yet.

    Those that are given are looked up before the installed ones.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._made: dict[str, Backend] = {}
        self.used: list[Kept] = []

    def __getitem__(self, backend_id: str) -> Backend:
        if backend_id not in self._made:
            backend = registry.find_backend(backend_id, self._given)
            identity = self._given.get(backend_id, getattr(backend, "details", type(backend)))
            kind = _OnceExecutorch if isinstance(backend, ExecutorchBackend) else _Once
            self._made[backend_id] = kind(backend, identity, self.used)
        return self._made[backend_id]

    def __contains__(self, backend_id: object) -> bool:
        return True  # whatever has no backend is an error of the look-up

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


class _Once(Backend):
    """A backend that is asked only for partitions that no compiled graph has yet."""

    def __init__(self, backend: Backend, given: Any, used: list[Kept]) -> None:
        self.backend_id = backend.backend_id  # type: ignore[misc]
        self.version = f"{backend.version}, without origins"  # type: ignore[misc]
        self.parallel = "thread" if backend.parallel != "none" else "none"  # type: ignore[misc]
        self.independent = True  # type: ignore[misc]
        self.unread = frozenset(_ORIGINS)  # type: ignore[misc]
        self._backend, self._given, self._used = backend, given, used

    @property
    def details(self) -> Any:
        """The class whose lines a failure names."""
        return getattr(self._backend, "details", type(self._backend))

    @property
    def stands_for(self) -> Backend:
        return self._backend

    @property
    def one_by_one(self) -> bool:
        return self._backend.one_by_one

    def lend(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> ExportedProgram | None:
        return self._backend.lend(program, compile_specs)

    def preprocess(
        self, program: ExportedProgram, compile_specs: list[CompileSpec], context: BackendContext | None = None
    ) -> PreprocessResult:
        """Lower one partition."""

        def lower(asked: list[_Asked]) -> list[PreprocessResult]:
            also = context_argument(self._backend.preprocess, context)
            return [self._backend.preprocess(one.numbered, one.specs, **also) for one in asked]

        return self._lower_all([_ask(program, compile_specs, self._given)], lower)[0]

    def preprocess_all(
        self,
        edge_programs: dict[str, list[ExportedProgram]],
        compile_specs: dict[str, list[list[CompileSpec]]],
        *,
        context: BackendContext | None = None,
    ) -> dict[str, list[PreprocessResult]]:
        """Lower partitions, those that are new in one call."""
        names = [method for method, programs in edge_programs.items() for _ in programs]
        asked = [
            _ask(program, specs, self._given)
            for method, programs in edge_programs.items()
            for program, specs in zip(programs, compile_specs[method], strict=True)
        ]
        of_method = {id(one.program): name for one, name in zip(asked, names, strict=True)}

        def lower(new: list[_Asked]) -> list[PreprocessResult]:
            methods = dict.fromkeys(of_method[id(one.program)] for one in new)
            grouped = {name: [one for one in new if of_method[id(one.program)] == name] for name in methods}
            results = self._backend.preprocess_all(
                {name: [one.numbered for one in ones] for name, ones in grouped.items()},
                {name: [one.specs for one in ones] for name, ones in grouped.items()},
                **context_argument(self._backend.preprocess_all, context),
            )
            return _flatten(grouped, new, results)

        results = iter(self._lower_all(asked, lower))
        return {method: [next(results) for _ in programs] for method, programs in edge_programs.items()}

    def _lower_all(
        self, asked: Sequence[_Asked], lower: Callable[[list[_Asked]], list[PreprocessResult]]
    ) -> list[PreprocessResult]:
        kept: dict[Hashable, Kept] = {}
        new: dict[Hashable, _Asked] = {}
        for one in asked:
            known = RESULTS.find(one.key)
            if known is not None:
                kept[one.key] = known
            elif one.key not in kept:
                new.setdefault(one.key, one)
        if new:
            for one, result in zip(new.values(), _lower_new(list(new.values()), lower), strict=True):
                kept[one.key] = RESULTS.keep(one.key, Kept(result, (self._given,)))
        self._used.extend(kept.values())
        return [one.own(kept[one.key].value) for one in asked]


class _OnceExecutorch(_Once, ExecutorchBackend):  # type: ignore[override]
    """The same for a class of ExecuTorch."""


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A partition that is asked for."""

    key: Hashable  # what it computes
    program: ExportedProgram
    numbered: ExportedProgram  # what the backend gets: the program with its debug handles numbered
    specs: list[CompileSpec]
    handles: Mapping[int, int] | None  # the number by handle; None if the handles were left as they are

    def own(self, result: PreprocessResult) -> PreprocessResult:
        """Return a result with the partition's own handles in its table."""
        table = result.debug_handle_map if isinstance(result, PreprocessResult) else None
        if self.handles is None or not isinstance(table, Mapping):
            return result
        back = {number: handle for handle, number in self.handles.items()}
        return replace(result, debug_handle_map={key: renumber(named, back) for key, named in table.items()})


_ORIGINS = ("nn_module_stack", "source_fn_stack", "torch_fn")
"""What ExecuTorch's backends take operators of one module together by. The border of a partition may be inside a module
here: XNNPACK would compute a linear layer that starts with a view and ends without one in a wrong shape."""

_OF_THE_PRODUCER = ("tensor_meta", debug_handles.KEY)
"""What an input has of the operator that computes it outside; equal partitions differ in it."""


def numbers_of_handles(program: ExportedProgram) -> Mapping[int, int] | None:
    """Return the number that a backend gets for each debug handle of a partition; None if it gets the handles."""
    copied = graphs.copy_program(program, kind=type(program))
    _leave_out(copied)
    return number_handles(copied)


def _leave_out(program: ExportedProgram) -> None:
    for _, module in graphs.walk(program.graph_module):
        for node in module.graph.nodes:
            for key in (*_ORIGINS, *(_OF_THE_PRODUCER if node.op == "placeholder" else ())):
                node.meta.pop(key, None)


def _ask(program: ExportedProgram, specs: list[CompileSpec], given: Any) -> _Asked:
    _leave_out(program)
    handles = number_handles(program)
    try:
        parts = describe_program(program, Storages(), PROVENANCE, handles)
        parts["specs"] = [f"{spec.key!r} {bytes(spec.value)!r}" for spec in specs]
        computed: Hashable = (id(given), make_key("torch.compile", parts).digest)
    except (NoKeyError, TypeError):
        computed = object()  # equal to nothing
    numbered = program if handles is None else with_handles(program, handles)
    return _Asked(computed, program, numbered, specs, handles)


def _lower_new(asked: list[_Asked], lower: Callable[[list[_Asked]], list[PreprocessResult]]) -> list[PreprocessResult]:
    try:
        return lower(asked)
    except Exception as error:
        let_through(error)
        if all(one.handles is None for one in asked):
            raise
        # Once more with their own handles, so that the failure names the right lines of the model.
        return lower([replace(one, numbered=one.program, handles=None) for one in asked])


def _flatten(grouped: Mapping[str, list[_Asked]], asked: list[_Asked], results: Any) -> list[PreprocessResult]:
    """Return results in the order of what was asked."""
    given: dict[str, Any] = {name: results.get(name) if isinstance(results, Mapping) else None for name in grouped}
    for name, ones in grouped.items():
        if not isinstance(given[name], (list, tuple)) or len(given[name]) != len(ones):
            raise BackendContractError(
                f"preprocess_all returned {given[name]!r} for method {name!r}, expected a list of {len(ones)} results."
            )
    by_id = {id(one): result for name, ones in grouped.items() for one, result in zip(ones, given[name], strict=True)}
    return [by_id[id(one)] for one in asked]
