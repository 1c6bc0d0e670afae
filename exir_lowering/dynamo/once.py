"""What is done once per process: lowering a partition, and compiling its payload, for equal ones that are in use.

Names, and the lines of the model that operators come from, do not count, so repeated layers are equal.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from exir_lowering import graphs
from exir_lowering.errors import BackendFailure
from exir_lowering.graphs import debug_handles
from exir_lowering.model import BackendGroup, LoweredPartition, Partition
from exir_lowering.plugins.backend import PROVENANCE, Backend
from exir_lowering.steps.cache.keys import NoKeyError, describe_partition, digest
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

    def __init__(self) -> None:
        self.used: list[Cached] = []  # to be kept as long as what is compiled

    def preprocess(self, group: BackendGroup, backend: Backend, session: Session) -> list[LoweredPartition]:
        """Lower a group as `preprocess_cached` does, those partitions that are new in one call."""
        given = (session.backends or {}).get(group.backend_id, getattr(backend, "details", type(backend)))
        numbers = [debug_handles.number_handles(one.program) for one in group.partitions]
        equal = [_without_origins(one, own) for one, own in zip(group.partitions, numbers, strict=True)]
        keys: list[Hashable] = []
        for one in equal:
            try:
                described = digest(describe_partition(one, session.cache.storages, PROVENANCE))
                # What is found here is not written to a cache on disk, so it has to be there.
                keys.append((id(given), str(session.options.cache), described))
            except NoKeyError:
                keys.append(object())  # equal to nothing
        cached = {key: RESULTS.get(key) for key in keys}
        new = sorted({key: place for place, key in reversed([*enumerate(keys)]) if cached[key] is None}.values())

        def lower(partitions: Iterable[Partition]) -> list[LoweredPartition]:
            return preprocess_cached(BackendGroup(group.backend_id, tuple(partitions)), backend, session)

        try:
            lowered = lower(equal[place] for place in new) if new else []
        except BackendFailure:
            if all(numbers[place] is None for place in new):
                raise
            # Once more with their own handles, so that the failure names the right lines of the model.
            lowered = lower(_without_origins(group.partitions[place], None) for place in new)
        for place, made in zip(new, lowered, strict=True):
            cached[keys[place]] = share(RESULTS, keys[place], Cached(made.result, (given,)))
        found = {key: one for key, one in cached.items() if one is not None}
        self.used.extend(found.values())
        return [
            LoweredPartition(one, debug_handles.put_back(found[key].value, own or {}))
            for one, key, own in zip(group.partitions, keys, numbers, strict=True)
        ]


_ORIGINS = ("nn_module_stack", "source_fn_stack", "torch_fn")
"""What ExecuTorch's backends take operators of one module together by. The border of a partition may be inside a module
here: XNNPACK would compute a linear layer that starts with a view and ends without one in a wrong shape."""

_OF_THE_PRODUCER = ("tensor_meta", debug_handles.KEY)
"""What an input has of the operator that computes it outside; equal partitions differ in it."""


def _without_origins(partition: Partition, numbers: Mapping[int, int] | None) -> Partition:
    """Copy a partition so that equal ones are equal, with numbers in place of its debug handles."""
    copied = graphs.copy_program(partition.program, kind=type(partition.program))
    for _, node in graphs.every_node(copied.graph_module):
        for key in (*_ORIGINS, *(_OF_THE_PRODUCER if node.op == "placeholder" else ())):
            node.meta.pop(key, None)
        handle = debug_handles.handle(node)
        if numbers is not None and handle is not None:
            node.meta[debug_handles.KEY] = numbers[handle]
    return replace(partition, program=copied)
