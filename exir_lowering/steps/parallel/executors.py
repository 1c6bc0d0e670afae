"""Who lowers partitions: threads of this process, loky's processes, or a given executor; and what a worker does.

A task is a header of plain values and parts of bytes: the program, its compile specs and its weights.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from executorch.exir.backend.backend_details import PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec

from exir_lowering.errors import InputError, LoweringError, PluginLoadError, exception_text
from exir_lowering.graphs.serialized import NotSerialisableError, decode, encode
from exir_lowering.model import BackendGroup, CallSite, Partition
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins import registry
from exir_lowering.plugins.addresses import load_class
from exir_lowering.plugins.backend import Backend
from exir_lowering.plugins.worker_errors import WorkerDiedError, describe_error, raise_error
from exir_lowering.steps.cache.results import flatten_results, restore_results
from exir_lowering.steps.preprocess import describe_failure, preprocess
from exir_lowering.steps.session import Session

Message: TypeAlias = tuple[dict[str, Any], Sequence[bytes]]
"""A header of plain values, and its parts."""

_IDLE = 300
"""After so many seconds without work, processes end."""


class RefusedError(Exception):
    """A partition cannot be lowered by a worker; the message says why."""


class InThreads:
    """Lowers in threads of this process."""

    def __init__(self, backend: Backend, options: LoweringOptions) -> None:
        self._backend, self._options = backend, options
        given = options.executor
        self._own = not isinstance(given, ThreadPoolExecutor)
        self._pool = (
            given if isinstance(given, ThreadPoolExecutor) else ThreadPoolExecutor(options.jobs, "exir-lowering")
        )

    def begin(self, partition: Partition) -> Future[Any]:
        """Begin to lower a partition."""
        return self._pool.submit(self._lower, partition)

    def finish(self, partition: Partition, future: Future[Any]) -> PreprocessResult:
        """Wait for a partition; raise what `preprocess` raises."""
        # A task that waits in a given pool is done here: the pool may be waiting for this very call.
        stolen = not self._own and future.cancel()
        return self._lower(partition) if stolen else future.result()

    def end(self, begun: Iterable[Future[Any]], *, interrupted: bool) -> None:
        """Cancel what has not begun, and wait for the rest: it uses the caller's tensors."""
        if self._own:
            self._pool.shutdown(wait=True, cancel_futures=True)
        wait([future for future in begun if not future.cancel()])

    def _lower(self, partition: Partition) -> PreprocessResult:
        # Nothing is shown, cached or passed on to others.
        session = Session(replace(self._options, progress=False, cache=False, executor=None, jobs=1))
        (lowered,) = preprocess(BackendGroup(partition.backend_id, (partition,)), self._backend, session)
        return lowered.result


class InProcesses:
    """Lowers in processes, ours or those of a given executor, which find the backend's class at an address."""

    def __init__(self, backend: Backend, address: str, options: LoweringOptions) -> None:
        self._backend, self._address, self._options = backend, address, options
        self._given: Executor | None = options.executor
        self._alone: Executor | None = None  # has a process for what is tried once more
        self._chunks: dict[bytes, bytes] = {}  # bytes of results: equal ones are kept once

    def begin(self, partition: Partition) -> Future[Any]:
        """Send a partition; RefusedError if it cannot be."""
        task = _task(partition, self._address, self._options)
        if self._given is not None:
            return _submit(self._given, task)
        found = _submit(_pool(self._options.jobs), task)
        if found.done() and isinstance(found.exception(), BrokenExecutor):  # a process died before
            _forget(self._options.jobs)
            found = _submit(_pool(self._options.jobs), task)
        return found

    def finish(self, partition: Partition, future: Future[Any]) -> PreprocessResult:
        """Wait for a partition, which is tried once more if its worker died; raise what `preprocess` raises."""
        try:
            return self._read(future)
        except WorkerDiedError as error:
            first = error
        try:
            if self._given is not None:
                return self._read(self.begin(partition))
            # The processes of a pool end together, whichever died: this one is tried alone.
            self._alone = self._alone or _make_pool(1)
            return self._read(_submit(self._alone, _task(partition, self._address, self._options)))
        except WorkerDiedError as second:
            self._alone = None
            twice = WorkerDiedError(f"{first}; it was tried once more, and {second}")
            raise describe_failure(partition.backend_id, self._backend, [partition], twice) from second

    def end(self, begun: Iterable[Future[Any]], *, interrupted: bool) -> None:
        """Take back what has not begun; after an interrupt, end the processes."""
        for future in begun:
            future.cancel()
        if self._alone is not None:
            self._alone.shutdown(wait=False)
        if interrupted and self._given is None:
            _forget(self._options.jobs)

    def _read(self, future: Future[Any]) -> PreprocessResult:
        try:
            header, parts = future.result()
        except MemoryError:
            raise
        except Exception as error:
            who = "a worker process" if self._given is None else f"the executor {type(self._given).__name__}"
            raise WorkerDiedError(f"{who} raised {exception_text(error)}") from error
        if header["kind"] == "refusal":
            raise RefusedError(header["reason"])
        raise_error(header)
        chunks = [self._chunks.setdefault(chunk, chunk) for chunk in parts]
        (result,) = restore_results(header["values"], chunks)
        return result


def _submit(executor: Executor, task: Message) -> Future[Any]:
    try:
        return executor.submit(work, task)
    except MemoryError:
        raise
    except Exception as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


# -- processes of our own ----------------------------------------------------------------------------------------------

_pools: dict[int, Any] = {}
"""The processes of this one that lower partitions, by their number; kept for later calls."""

_lock = threading.Lock()


def _pool(jobs: int) -> Any:
    with _lock:
        if jobs not in _pools:
            _pools[jobs] = _make_pool(jobs)
        return _pools[jobs]


def _make_pool(jobs: int) -> Any:
    import loky  # only where it is needed

    # With safe paths, nothing is imported from the current folder, whatever lies there. What loky starts at once, to
    # track resources, has the environment of this process. Memory that grows is a weight here, and no leak.
    workers = {"PYTHONSAFEPATH": "1", "LOKY_MAX_MEMORY_LEAK_SIZE": "1e18"}
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        return loky.ProcessPoolExecutor(jobs, timeout=_IDLE, env=workers)
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _forget(jobs: int) -> None:
    """End the processes of a pool; others that wait for them try once more."""
    with _lock:
        pool = _pools.pop(jobs, None)
    if pool is not None:
        with suppress(RuntimeError):
            pool.shutdown(wait=False, kill_workers=True)


def _begin_child() -> None:
    """Leave the processes to the one that this one was forked from."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)


# -- what travels, and what a worker does ------------------------------------------------------------------------------


def _task(partition: Partition, address: str, options: LoweringOptions) -> Message:
    """Return what a worker needs to lower a partition; RefusedError if that cannot be written."""
    for spec in partition.compile_specs:
        if type(spec) is not CompileSpec or type(spec.key) is not str or not isinstance(spec.value, (bytes, bytearray)):
            raise RefusedError(f"the compile spec {spec.key!r} has a value of type {type(spec.value).__name__}")
    try:
        encoded = encode(partition.program)
    except NotSerialisableError as error:
        raise RefusedError(str(error)) from error
    header = {
        "address": address,
        "check_weights": options.check_weights,
        "fast": options.fast,
        "threads": torch.get_num_threads(),
        "partition": partition.id,
        "method": partition.method,
        "backend_id": partition.backend_id,
        "specs": [spec.key for spec in partition.compile_specs],
    }
    specs = [bytes(spec.value) for spec in partition.compile_specs]
    return header, (encoded.graph, *specs, *(piece.numpy().tobytes() for piece in encoded.pieces))


def work(task: Message) -> Message:
    """Lower a partition for a process that is trusted: the backend that it names is imported; the program is data."""
    header, (graph, *parts) = task
    count = len(header["specs"])
    try:
        backend = registry.as_backend(header["backend_id"], load_class(header["address"]))
        specs = tuple(map(CompileSpec, header["specs"], parts[:count]))
        program = decode(graph, [_own(part) for part in parts[count:]])
    except (PluginLoadError, InputError) as error:
        return {"kind": "refusal", "reason": str(error)}, ()
    site = CallSite(header["method"], (), "", (), ())
    partition = Partition(header["partition"], header["method"], "", header["backend_id"], specs, program, site)
    session = Session(LoweringOptions(check_weights=header["check_weights"], fast=header["fast"]))
    try:
        with _threads(header["threads"]):
            (lowered,) = preprocess(BackendGroup(header["backend_id"], (partition,)), backend, session)
    except (LoweringError, MemoryError) as error:
        return describe_error(error, error), ()
    flat = flatten_results([lowered.result])
    if flat is None:
        return {"kind": "refusal", "reason": "its result holds more than bytes, numbers and names"}, ()
    return {"kind": "result", "values": flat[0]}, flat[1]


def _own(content: bytes) -> torch.Tensor:
    """Return memory that the task may write into."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch compute with as many threads as in the process that sent the task: results may depend on it."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)
