"""What is done once per process: lowering a partition, and compiling its payload.

Partitions are equal if they compute the same: names, and the lines of the model that operators come from, do not
count, so a recompilation, a repeated layer, and a function that is compiled again take what is there. Nothing is
kept longer than the compiled graphs that use it, and nothing is found again after `torch._dynamo.reset()`.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering.errors import BackendFailure
from exir_lowering.graphs import debug_handles
from exir_lowering.model import BackendGroup, LoweredPartition, Partition
from exir_lowering.plugins.backend import Backend
from exir_lowering.plugins.reads import PROVENANCE
from exir_lowering.steps.cache.keys import NoKeyError, describe_program, make_key
from exir_lowering.steps.cached import preprocess_cached
from exir_lowering.steps.session import Session


@dataclass(eq=False)
class Cached:
    """A value that is cached while it is in use."""

    value: Any
    alive: tuple[Any, ...] = ()  # what must live as long, such as the object whose identity is in its key


RESULTS: weakref.WeakValueDictionary[Hashable, Cached] = weakref.WeakValueDictionary()
"""What backends returned for partitions, by what these compute."""

HANDLES: weakref.WeakValueDictionary[Hashable, Cached] = weakref.WeakValueDictionary()
"""What delegates compiled payloads to, by content."""

_lock = threading.RLock()


def share(store: weakref.WeakValueDictionary[Hashable, Cached], key: Hashable, made: Cached) -> Cached:
    """Cache a value for a key; return the one that is cached, which another thread may have made."""
    with _lock:
        return store.setdefault(key, made)


def forget() -> None:
    """Forget it all: what is compiled from now on takes nothing from before, and what nobody uses is freed."""
    with _lock:
        found = len(RESULTS) + len(HANDLES)
        RESULTS.clear()
        HANDLES.clear()
    if found:
        gc.collect()  # what Dynamo has dropped refers to itself: without it, delegates would get no `destroy` yet


class Once:
    """Step preprocess of a compilation: backends are called with the partitions that no compiled graph has."""

    def __init__(self, backends: Mapping[str, Any]) -> None:
        self.backends = backends  # by id, before the installed ones
        self.used: list[Cached] = []  # to be kept as long as what is compiled

    def preprocess(self, group: BackendGroup, backend: Backend, session: Session) -> list[LoweredPartition]:
        """Lower a group as `preprocess_cached` does, those partitions that are new in one call."""
        given = self.backends.get(group.backend_id, getattr(backend, "details", type(backend)))
        tasks = [_make_task(partition, given, session) for partition in group.partitions]
        cached = {task.key: RESULTS.get(task.key) for task in tasks}
        new: dict[Hashable, _Task] = {}
        for task in tasks:
            if cached[task.key] is None:
                new.setdefault(task.key, task)
        if new:
            for task, lowered in zip(new.values(), _lower([*new.values()], group, backend, session), strict=True):
                cached[task.key] = share(RESULTS, task.key, Cached(lowered.result, (given,)))
        found = {key: one for key, one in cached.items() if one is not None}
        self.used.extend(found.values())
        return [task.restore(found[task.key].value) for task in tasks]


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """A partition whose result is looked for."""

    partition: Partition
    key: Hashable  # what it computes
    program: ExportedProgram  # what the backend gets: it says nothing of origins, and its debug handles are numbered
    handles: Mapping[int, int] | None  # the number by handle; None if the handles were left as they are

    def restore(self, result: Any) -> LoweredPartition:
        """Return the partition with a result, whose table has the partition's own handles."""
        if self.handles is not None and result.debug_handle_map is not None:
            result = debug_handles.put_back(result, self.handles)
        return LoweredPartition(self.partition, result)


def _make_task(partition: Partition, given: Any, session: Session) -> _Task:
    program, handles = _without_origins(partition.program)
    for _, node in graphs.every_node(program.graph_module):
        handle = debug_handles.handle(node)
        if handles is not None and handle is not None:
            node.meta[debug_handles.KEY] = handles[handle]
    try:
        parts = describe_program(program, session.cache.storages, PROVENANCE, None)
        parts["specs"] = [f"{spec.key!r} {bytes(spec.value)!r}" for spec in partition.compile_specs]
        # What is found here is not written to a cache on disk, so it has to be there.
        key: Hashable = (id(given), str(session.options.cache), make_key("torch.compile", parts).digest)
    except (NoKeyError, TypeError):
        key = object()  # equal to nothing
    return _Task(partition, key, program, handles)


def _lower(tasks: list[_Task], group: BackendGroup, backend: Backend, session: Session) -> list[LoweredPartition]:
    def lower(programs: list[ExportedProgram]) -> list[LoweredPartition]:
        partitions = [replace(task.partition, program=one) for task, one in zip(tasks, programs, strict=True)]
        return preprocess_cached(BackendGroup(group.backend_id, tuple(partitions)), backend, session)

    try:
        return lower([task.program for task in tasks])
    except BackendFailure:
        if all(task.handles is None for task in tasks):
            raise
        # Once more with their own handles, so that the failure names the right lines of the model.
        return lower([_without_origins(task.partition.program)[0] for task in tasks])


_ORIGINS = ("nn_module_stack", "source_fn_stack", "torch_fn")
"""What ExecuTorch's backends take operators of one module together by. The border of a partition may be inside a module
here: XNNPACK would compute a linear layer that starts with a view and ends without one in a wrong shape."""

_OF_THE_PRODUCER = ("tensor_meta", debug_handles.KEY)
"""What an input has of the operator that computes it outside; equal partitions differ in it."""


def numbers_of_handles(program: ExportedProgram) -> Mapping[int, int] | None:
    """Return the number that a backend gets for each debug handle of a partition; None if it gets the handles."""
    return _without_origins(program)[1]


def _without_origins(program: ExportedProgram) -> tuple[ExportedProgram, Mapping[int, int] | None]:
    """Copy a program so that equal partitions are equal; return it with the number of each of its debug handles."""
    copied = graphs.copy_program(program, kind=type(program))
    for _, node in graphs.every_node(copied.graph_module):
        for key in (*_ORIGINS, *(_OF_THE_PRODUCER if node.op == "placeholder" else ())):
            node.meta.pop(key, None)
    return copied, debug_handles.number_handles(copied)
