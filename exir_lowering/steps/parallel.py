"""Step preprocess for several partitions at once, by threads, processes or an executor, with the same bytes."""

from __future__ import annotations

import logging
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from executorch.exir.backend.backend_details import PreprocessResult

from exir_lowering import graphs
from exir_lowering._upstream import locks
from exir_lowering.errors import LoweringError, exception_text
from exir_lowering.graphs.copies import list_tensors
from exir_lowering.model import BackendGroup, CallSite, LoweredPartition, Partition
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins import registry
from exir_lowering.plugins.addresses import NoAddressError, find_address, load_class
from exir_lowering.plugins.backend import Backend, ExecutorchBackend, takes_context
from exir_lowering.plugins.worker_errors import WorkerDiedError, describe_error, raise_error
from exir_lowering.steps.cache.keys import UNIMPORTANT, NoKeyError, describe_neighbours, describe_partition, digest
from exir_lowering.steps.preprocess import describe_failure, preprocess
from exir_lowering.steps.session import Session

MOST_BYTES = 1 << 31
"""How many bytes of weights the partitions that are lowered at once may have; one larger partition goes alone."""

_LOG = logging.getLogger(__name__)


class RefusedError(Exception):
    """Partitions cannot be lowered by workers; the message says why."""


def preprocess_parallel(
    group: BackendGroup, backend: Backend, session: Session, *, sharing: BackendGroup | None = None
) -> list[LoweredPartition]:
    """Lower a group as `preprocess` does, several partitions at once if options and backend allow it.

    If they do not, it is lowered here, and the log says why. A worker that ends twice is a failure of the backend.
    """
    options, partitions = session.options, group.partitions
    # One alone is worth a worker where the backend may end its process, and that is no error.
    alone = len(partitions) == 1 and options.on_backend_error in (None, "raise")
    if options.executor is None and (options.jobs == 1 or alone):
        return preprocess(group, backend, session, sharing=sharing)
    try:
        workers = _Workers(backend, _find_address(backend, options), options)
        if takes_context(backend.preprocess) or not backend.one_by_one:
            # What overlaps with weights of others is one piece with them, which needs one store.
            together = describe_neighbours(one.program for one in (sharing or group).partitions)
            alone_reads = [describe_neighbours([one.program]) for one in partitions]
            if any(together[at] != views for found in alone_reads for at, views in found.items()):
                raise RefusedError("a part of the weights of one is in another one too")
        advance = session.progress.count(f"lower for {group.backend_id}", len(partitions))
        return _lower(partitions, workers, advance)
    except RefusedError as reason:
        log = _LOG.info if backend.parallel == "none" else _LOG.warning
        log("The partitions for backend %r are lowered one after the other: %s.", group.backend_id, reason)
        return preprocess(group, backend, session, sharing=sharing)


def _lower(partitions: Sequence[Partition], workers: _Workers, advance: Callable[[], None]) -> list[LoweredPartition]:
    """Lower partitions; they are waited for in order, so the first failure is that of a loop."""
    lowered: list[LoweredPartition] = []
    begun: deque[tuple[Partition, Future[Any], int]] = deque()  # with the bytes of the weights
    refused: list[str] = []
    held = 0  # bytes

    def finish() -> None:
        nonlocal held
        partition, future, size = begun.popleft()
        held -= size
        try:
            result = workers.finish(partition, future)
        except RefusedError as reason:
            refused.append(str(reason))
            result = workers.lower_here(partition)
        lowered.append(LoweredPartition(partition, result))
        advance()

    interrupted = False
    try:
        for partition in partitions:
            size = sum(tensor.nbytes for tensor in list_tensors([partition.program]))
            while begun and held + size > MOST_BYTES:
                finish()
            begun.append((partition, workers.begin(partition), size))
            held += size
        while begun:
            finish()
    except BaseException as error:
        interrupted = not isinstance(error, LoweringError)
        raise
    finally:
        workers.end([future for _, future, _ in begun], interrupted=interrupted)
    if refused:
        which = f"{len(refused)} of the {len(partitions)} partitions for backend {partitions[0].backend_id!r}"
        _LOG.warning("%s are lowered one after the other: %s.", which, refused[0])
    return lowered


def _find_address(backend: Backend, options: LoweringOptions) -> str:
    """Return where processes find a backend's class, "" for threads; RefusedError if only the caller's thread can."""
    executor = options.executor
    if not (backend.one_by_one or backend.independent):
        raise RefusedError("it lowers them together, in preprocess_all")
    if not backend.in_processes:
        raise RefusedError('it declares parallel = "none"')
    if not isinstance(executor, ThreadPoolExecutor) and (executor is not None or backend.parallel != "thread"):
        try:
            return find_address(backend.details if isinstance(backend, ExecutorchBackend) else backend)
        except NoAddressError as error:
            raise RefusedError(str(error)) from error
    if backend.parallel == "none":
        raise RefusedError("it can be lowered by several processes, but not by several threads")
    if locks.converts_here():
        raise RefusedError("the caller holds the conversion lock, which other threads would wait for")
    return ""


class _Workers:
    """Threads, or processes that find the backend's class at an address; our own, or those of a given executor."""

    def __init__(self, backend: Backend, address: str, options: LoweringOptions) -> None:
        self._backend, self._address, self._options, self._given = backend, address, options, options.executor
        # What ends with the call: threads, or a process for what is tried once more.
        threads = not address and self._given is None
        self._own: Any = ThreadPoolExecutor(options.jobs, "exir-lowering") if threads else None

    def begin(self, partition: Partition) -> Future[Any]:
        """Begin to lower a partition."""
        if not self._address:
            return (self._given or self._own).submit(self.lower_here, partition)
        future = self._send(self._given or _pool(self._options.jobs), partition)
        if self._given is None and future.done() and isinstance(future.exception(), BrokenExecutor):
            _forget(self._options.jobs)  # a process died before
            future = self._send(_pool(self._options.jobs), partition)
        return future

    def _send(self, executor: Executor, partition: Partition) -> Future[Any]:
        try:
            return executor.submit(work, _make_task(partition, self._address, self._options))
        except MemoryError:
            raise
        except Exception as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def finish(self, partition: Partition, future: Future[Any]) -> PreprocessResult:
        """Wait for a partition, once more if its process died; raise what `preprocess` raises, or RefusedError."""
        if not self._address:
            # A task that waits in a given pool is done here: the pool may be waiting for this very call.
            stolen = self._given is not None and future.cancel()
            return self.lower_here(partition) if stolen else future.result()
        died: list[str] = []
        while True:
            try:
                answer = future.result()
                break
            except (MemoryError, RefusedError):
                raise
            except Exception as error:
                who = "a worker process" if self._given is None else f"the executor {type(self._given).__name__}"
                died.append(f"{who} raised {exception_text(error)}")
                if len(died) > 1:
                    self._own = None
                    twice = WorkerDiedError("; it was tried once more, and ".join(died))
                    raise describe_failure(partition.backend_id, self._backend, [partition], twice) from error
            # The processes of a pool end together, whichever died: this one is tried alone.
            self._own = self._own or self._given or _make_pool(1)
            future = self._send(self._own, partition)
        if isinstance(answer, str):
            raise RefusedError(answer)
        if isinstance(answer, dict):
            raise_error(answer)
        return pickle.loads(answer)

    def end(self, begun: Iterable[Future[Any]], *, interrupted: bool) -> None:
        """Take back what has not begun, and wait for threads, which use the caller's tensors; interrupt processes."""
        running = [future for future in begun if not future.cancel()]
        if not self._address:
            wait(running)
        if self._own is not None and self._own is not self._given:
            self._own.shutdown(wait=not self._address)
        if interrupted and self._address and self._given is None:
            _forget(self._options.jobs)

    def lower_here(self, partition: Partition) -> PreprocessResult:
        """Lower a partition in this thread: nothing is shown, cached or passed on to others."""
        session = Session(replace(self._options, progress=False, cache=False, executor=None, jobs=1))
        return preprocess(BackendGroup(partition.backend_id, (partition,)), self._backend, session)[0].result


_pools: dict[tuple[int, int], Any] = {}  # our processes, kept for later calls, by who has them and how many


def _pool(jobs: int) -> Any:
    key = os.getpid(), jobs
    return _pools.get(key) or _pools.setdefault(key, _make_pool(jobs))


def _forget(jobs: int) -> None:
    """End the processes of a pool; others that wait for them try once more."""
    pool = _pools.pop((os.getpid(), jobs), None)
    if pool is not None:
        with suppress(RuntimeError):
            pool.shutdown(wait=False, kill_workers=True)


def _make_pool(jobs: int) -> Any:
    import loky  # only where it is needed

    # With safe paths, nothing is imported from the current folder, whatever lies there. What loky starts at once, to
    # track resources, has the environment of this process. Memory that grows is a weight here, and no leak.
    workers = {"PYTHONSAFEPATH": "1", "LOKY_MAX_MEMORY_LEAK_SIZE": "1e18"}
    absent = "PYTHONSAFEPATH" not in os.environ
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        return loky.ProcessPoolExecutor(jobs, timeout=300, env=workers)  # after so many seconds without work, they end
    finally:
        if absent:
            os.environ.pop("PYTHONSAFEPATH", None)


def _make_task(partition: Partition, address: str, options: LoweringOptions) -> tuple[Any, ...]:
    """Return what a worker needs to lower a partition; RefusedError if that cannot be written."""
    try:
        from exir_lowering._upstream import transport  # by names of torch that may be gone

        described = digest(describe_partition(partition, None))
        sent = transport.dumps(graphs.copy_program(partition.program, kind=type(partition.program)), UNIMPORTANT)
    except MemoryError:
        raise
    except Exception as error:
        reason = error if isinstance(error, NoKeyError) else exception_text(error)[:500]
        raise RefusedError(f"its program cannot be sent: {reason}") from error
    settings = options.check_weights, options.fast, torch.get_num_threads()
    known = partition.id, partition.method, partition.backend_id, partition.compile_specs
    return address, *known, sent, described, settings


def work(task: tuple[Any, ...]) -> bytes | str | dict[str, Any]:
    """Lower a partition in a worker: return the result as a pickle, why it is refused, or an error as a header."""
    address, name, method, backend_id, specs, sent, described, (check_weights, fast, threads) = task
    try:
        from exir_lowering._upstream import transport

        backend = registry.as_backend(backend_id, load_class(address))
        program = transport.loads(*sent)
        program = graphs.copy_program(program, kind=type(program))  # whose graphs compile their code when it is needed
        partition = Partition(name, method, "", backend_id, specs, program, CallSite(method, (), ""))
        if digest(describe_partition(partition, None)) != described:
            return "its program would be another one in another process"
    except MemoryError:
        raise
    except Exception as error:
        return f"its program cannot be read in another process: {exception_text(error)}"
    session = Session(LoweringOptions(check_weights=check_weights, fast=fast))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)  # as in the process that sent the task: results may depend on it
    try:
        return pickle.dumps(preprocess(BackendGroup(backend_id, (partition,)), backend, session)[0].result)
    except (LoweringError, MemoryError) as error:
        return describe_error(error, error)
    except Exception as error:
        return f"its result cannot be sent: {exception_text(error)}"
    finally:
        torch.set_num_threads(before)
