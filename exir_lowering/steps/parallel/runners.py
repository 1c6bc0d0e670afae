"""Who lowers partitions: threads of this process, processes of our own, or a given executor; and what a worker does."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from executorch.exir.backend.backend_details import PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec

from exir_lowering.errors import InputError, LoweringError, PluginLoadError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.graphs.serialized import NotSerialisableError, decode, encode
from exir_lowering.model import BackendGroup, CallSite, Partition
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins import registry
from exir_lowering.plugins.addresses import load_class
from exir_lowering.plugins.backend import Backend
from exir_lowering.plugins.processes.messages import Message, describe_error, raise_error
from exir_lowering.plugins.processes.workers import Worker, WorkerDiedError, Workers
from exir_lowering.steps.cache.results import flatten_results, restore_results
from exir_lowering.steps.parallel.weight_files import MissingError, WeightsFile, find_pieces
from exir_lowering.steps.preprocess import describe_failure, preprocess
from exir_lowering.steps.session import Session

WORKERS = Workers("exir_lowering.steps.parallel.runners")
"""The processes that lower partitions for this one."""


class RefusedError(Exception):
    """A runner cannot lower a partition; the message says why."""


class Runner:
    """Lowers single partitions in the calling thread; its methods may be called from several threads."""

    def __init__(self, backend: Backend, options: LoweringOptions) -> None:
        self._backend, self._options = backend, options

    def lower(self, partition: Partition) -> PreprocessResult:
        """Lower a partition, as `preprocess`; RefusedError tells the caller why it is to do that itself."""
        # Nothing is shown, cached or passed on to others.
        session = Session(replace(self._options, progress=False, cache=False, executor=None, jobs=1))
        (lowered,) = preprocess(BackendGroup(partition.backend_id, (partition,)), self._backend, session)
        return lowered.result

    def interrupt(self) -> None:
        """End what is being lowered, if that is possible; `lower` then raises something."""

    def close(self) -> None:
        """Give back what the runner holds."""


class _Remote(Runner, ABC):
    """Lowers somewhere else: sends tasks, and reads replies."""

    def __init__(self, backend: Backend, address: str, options: LoweringOptions, *, digests: bool) -> None:
        super().__init__(backend, options)
        self._weights = WeightsFile(digests=digests)
        self._chunks: dict[bytes, bytes] = {}  # bytes of results: equal ones are kept once
        self._header = {
            "address": address,
            "check_weights": options.check_weights,
            "accelerate": options.accelerate,
            "threads": torch.get_num_threads(),
        }

    @abstractmethod
    def _call(self, message: Message) -> Message:
        """Send a task and wait for the reply; raise WorkerDiedError if who got the task is gone."""

    def lower(self, partition: Partition) -> PreprocessResult:
        """Lower a partition in a worker; if the worker dies, once more in another one."""
        try:
            return self._lower(partition)
        except WorkerDiedError as error:
            first = error
        try:
            return self._lower(partition)
        except WorkerDiedError as second:
            twice = WorkerDiedError(f"{first}; it was tried once more, and {second}")
            raise describe_failure(partition.backend_id, self._backend, [partition], twice) from second

    def _lower(self, partition: Partition) -> PreprocessResult:
        try:
            encoded = encode(partition.program)
        except NotSerialisableError as error:
            raise RefusedError(str(error)) from error
        header = {
            **self._header,
            "partition": partition.id,
            "method": partition.method,
            "backend_id": partition.backend_id,
            "specs": [spec.key for spec in partition.compile_specs],
        }
        options = tuple(map(_content, partition.compile_specs))
        inline: tuple[str, ...] = ()
        while True:
            try:
                places, sent = self._weights.place(encoded.pieces, inline)
            except OSError as error:
                raise RefusedError(f"the file for the weights cannot be written: {error}") from error
            try:
                return self._read(self._call(({**header, "pieces": places}, (encoded.graph, *options, *sent))))
            except MissingError as error:
                if inline or not all(error.digests):
                    raise RefusedError("the worker cannot find its weights") from error
                inline = error.digests

    def _read(self, reply: Message) -> PreprocessResult:
        header, parts = reply
        if header["kind"] == "refusal":
            raise RefusedError(header["reason"])
        if header["kind"] == "missing":
            raise MissingError(header["digests"])
        raise_error(header)
        chunks = [self._chunks.setdefault(chunk, chunk) for chunk in parts]
        (result,) = restore_results(header["values"], chunks)
        return result

    def close(self) -> None:
        """Remove the weights' file."""
        self._weights.close()


def _content(spec: CompileSpec) -> bytes:
    if type(spec) is not CompileSpec or type(spec.key) is not str or not isinstance(spec.value, (bytes, bytearray)):
        raise RefusedError(f"the compile spec {spec.key!r} has a value of type {type(spec.value).__name__}")
    return bytes(spec.value)


class InProcesses(_Remote):
    """Lowers in processes of our own, which find the backend's class at an address."""

    def __init__(self, backend: Backend, address: str, options: LoweringOptions) -> None:
        super().__init__(backend, address, options, digests=False)
        self._module = address.partition(":")[0]
        self._busy: set[Worker] = set()
        self._lock = threading.Lock()
        self._interrupted = False

    def _call(self, message: Message) -> Message:
        if self._interrupted:
            raise RefusedError("it was interrupted")
        try:
            worker = WORKERS.take([self._module])
        except OSError as error:
            raise RefusedError(f"no process can be started: {error}") from error
        with self._lock:
            self._busy.add(worker)
        try:
            if self._interrupted:
                worker.kill()
            reply = worker.call(message)
        finally:
            with self._lock:
                self._busy.discard(worker)
        WORKERS.give(worker)
        return reply

    def interrupt(self) -> None:
        """End the processes that lower something."""
        with self._lock:
            self._interrupted = True
            busy = list(self._busy)
        for worker in busy:
            worker.kill()


class InExecutor(_Remote):
    """Lowers wherever an executor computes; workers there find the backend's class at an address."""

    def __init__(self, backend: Backend, address: str, options: LoweringOptions, executor: Executor) -> None:
        super().__init__(backend, address, options, digests=True)
        self._executor = executor
        self._stop: Future[None] = Future()

    def _call(self, message: Message) -> Message:
        try:
            future = self._executor.submit(work, message)
        except Exception as error:
            let_through(error)
            raise WorkerDiedError(f"the executor takes no tasks: {type(error).__name__}: {error}") from error
        both: list[Future[Any]] = [future, self._stop]
        wait(both, return_when=FIRST_COMPLETED)
        if self._stop.done():
            future.cancel()
            raise RefusedError("it was interrupted")
        try:
            return future.result()
        except MemoryError:
            raise
        except Exception as error:
            let_through(error)
            name = type(error).__name__
            raise WorkerDiedError(f"the executor {type(self._executor).__name__} raised {name}: {error}") from error

    def interrupt(self) -> None:
        """Take back what has not begun, and wait for nothing."""
        self._stop.set_result(None)


# -- what a worker does ----------------------------------------------------------------------------------------------


def work(message: Message) -> Message:
    """Lower a partition for a process that is trusted: the backend that it names is imported; the program is data."""
    header, parts = message
    try:
        backend = registry.as_backend(header["backend_id"], load_class(header["address"]))
        partition = _partition(header, parts)
    except (PluginLoadError, InputError) as error:
        return _refuse(str(error))
    except MissingError as error:
        return {"kind": "missing", "digests": error.digests}, ()
    session = Session(LoweringOptions(check_weights=header["check_weights"], accelerate=header["accelerate"]))
    try:
        with _threads(header["threads"]):
            (lowered,) = preprocess(BackendGroup(header["backend_id"], (partition,)), backend, session)
    except (LoweringError, MemoryError) as error:
        return describe_error(error, error), ()
    flat = flatten_results([lowered.result])
    if flat is None:
        return _refuse("its result holds more than bytes, numbers and names")
    return {"kind": "result", "values": flat[0]}, flat[1]


def _refuse(reason: str) -> Message:
    """Say why this process cannot lower a partition, which its sender then does."""
    return {"kind": "refusal", "reason": reason}, ()


def _partition(header: dict[str, Any], parts: Sequence[bytes]) -> Partition:
    keys = header["specs"]
    graph, values, inline = parts[0], parts[1 : 1 + len(keys)], parts[1 + len(keys) :]
    specs = tuple(map(CompileSpec, keys, values))
    program = decode(graph, find_pieces(header["pieces"], inline))
    site = CallSite(header["method"], (), "", (), ())
    return Partition(header["partition"], header["method"], "", header["backend_id"], specs, program, site)


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
