"""Step preprocess for several partitions at once, in the same order and with the same bytes as one after the other."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from executorch.exir.backend.backend_details import PreprocessResult

from exir_lowering._upstream import locks
from exir_lowering.errors import LoweringError
from exir_lowering.model import BackendGroup, LoweredPartition, Partition
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins.addresses import NoAddressError, find_address
from exir_lowering.plugins.backend import Backend, takes_context
from exir_lowering.steps.parallel.executors import InProcesses, InThreads, RefusedError
from exir_lowering.steps.preprocess import list_tensors, preprocess
from exir_lowering.steps.session import Session

MOST_BYTES = 1 << 31
"""How many bytes of weights the partitions that are lowered at once may have; one larger partition goes alone.

A backend copies what it packs, so a machine whose workers are all here needs about twice as much memory beside the
model's.
"""

_LOG = logging.getLogger(__name__)


def preprocess_parallel(
    group: BackendGroup, backend: Backend, session: Session, *, sharing: BackendGroup | None = None
) -> list[LoweredPartition]:
    """Lower a group as `preprocess` does, several partitions at once if options and backend allow it.

    The rest is lowered here, and the log says why. Errors are those of `preprocess`; a worker that ends twice is a
    failure of the backend. `sharing` is the larger group with whose weights those of this one share pieces.
    """
    options = session.options
    # One alone is worth a worker where the backend may end its process, and that is no error.
    here = len(group.partitions) == 1 and options.on_backend_error == "raise"
    if options.executor is None and (options.jobs == 1 or here):
        return preprocess(group, backend, session, sharing=sharing)
    try:
        runner = _choose_runner(backend, options)
        if isinstance(runner, InThreads) and locks.converts_here():
            raise RefusedError("the caller holds the conversion lock, which other threads would wait for")
    except RefusedError as reason:
        log = _LOG.info if backend.parallel == "none" else _LOG.warning
        log("The partitions for backend %r are lowered one after the other: %s.", group.backend_id, reason)
        return preprocess(group, backend, session, sharing=sharing)
    call = _Call(group, sharing or group, backend, session, runner)
    if takes_context(backend.preprocess) or not backend.one_by_one:
        call.leave_entangled()
    return call.run()


def _choose_runner(backend: Backend, options: LoweringOptions) -> InThreads | InProcesses:
    """Decide who lowers; raise RefusedError if nobody but the caller's thread can."""
    executor = options.executor
    if not (backend.one_by_one or backend.independent):
        raise RefusedError("it lowers them together, in preprocess_all")
    if not backend.in_processes:
        raise RefusedError('it declares parallel = "none"')
    threads = isinstance(executor, ThreadPoolExecutor) or (executor is None and backend.parallel == "thread")
    if threads and backend.parallel != "none":
        return InThreads(backend, options)
    if threads:
        raise RefusedError("it can be lowered by several processes, but not by several threads")
    try:
        address = find_address(backend)
    except NoAddressError as error:
        if backend.parallel == "none":
            raise RefusedError(str(error)) from error
        _LOG.warning("The partitions for backend %r are lowered in threads: %s.", backend.backend_id, error)
        return InThreads(backend, options)
    return InProcesses(backend, address, options)


@dataclass
class _Call:
    """The lowering of one group."""

    group: BackendGroup
    sharing: BackendGroup  # the group with whose weights those of this one share pieces
    backend: Backend
    session: Session
    runner: InThreads | InProcesses  # who lowers
    here: set[str] = field(default_factory=set)  # the ids of partitions that are lowered by this thread
    done: dict[str, PreprocessResult] = field(default_factory=dict)  # the results so far, by partition

    def leave_entangled(self) -> None:
        """Leave here what has weights that overlap those of others: they are one piece, which needs one store."""
        views: dict[int, dict[str, set[Any]]] = {}
        for partition in self.sharing.partitions:
            for tensor in _tensors(partition):
                if tensor.layout is torch.strided and tensor.device.type == "cpu":
                    view = tensor.storage_offset() * tensor.element_size(), tensor.dtype, tensor.shape, tensor.stride()
                    storage = views.setdefault(tensor.untyped_storage().data_ptr(), {})
                    storage.setdefault(partition.id, set()).add(view)
        found: set[str] = set()
        for users in views.values():
            first = next(iter(users.values()))
            if any(used != first for used in users.values()):
                found.update(users)
        for partition in self.group.partitions:
            if partition.id in found:
                self._leave(partition, "a part of its weights is in another partition too")

    def _leave(self, partition: Partition, reason: object) -> None:
        _LOG.warning(
            "Partition %s of method %r is not lowered by a worker: %s.", partition.id, partition.method, reason
        )
        self.here.add(partition.id)

    def run(self) -> list[LoweredPartition]:
        """Lower the group."""
        partitions = self.group.partitions
        begun: deque[tuple[Partition, Future[Any], int]] = deque()  # with the bytes of the weights
        title, interrupted = f"lower for {self.group.backend_id}", True
        try:
            with self.session.progress.count(title, len(partitions) - len(self.here)) as advance:
                for partition in partitions:
                    size = sum(tensor.nbytes for tensor in _tensors(partition))
                    while begun and sum(each for _, _, each in begun) + size > MOST_BYTES:
                        self._finish(*begun.popleft()[:2], advance)
                    try:
                        if partition.id not in self.here:
                            begun.append((partition, self.runner.begin(partition), size))
                    except RefusedError as reason:
                        self._leave(partition, reason)
                while begun:
                    self._finish(*begun.popleft()[:2], advance)
            interrupted = False
            self._lower_here(partitions)
        except LoweringError:
            interrupted = False
            raise
        finally:
            self.runner.end([future for _, future, _ in begun], interrupted=interrupted)
        return [LoweredPartition(partition, self.done[partition.id]) for partition in partitions]

    def _finish(self, partition: Partition, future: Future[Any], advance: Callable[[], None]) -> None:
        """Wait for a partition. Partitions are waited for in their order, so the first failure is that of a loop."""
        try:
            self.done[partition.id] = self.runner.finish(partition, future)
        except RefusedError as reason:
            self._leave(partition, reason)
        except LoweringError:
            partitions = self.group.partitions
            self._lower_here(partitions[: partitions.index(partition)])
            raise
        advance()

    def _lower_here(self, partitions: Sequence[Partition]) -> None:
        left = tuple(one for one in partitions if one.id in self.here and one.id not in self.done)
        if left:
            group = BackendGroup(self.group.backend_id, left)
            for one in preprocess(group, self.backend, self.session, sharing=self.sharing):
                self.done[one.partition.id] = one.result


def _tensors(partition: Partition) -> Iterator[torch.Tensor]:
    return list_tensors(BackendGroup(partition.backend_id, (partition,)))
