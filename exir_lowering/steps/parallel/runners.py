"""Who lowers partitions: threads of this process, processes of our own, or a given executor; and what a worker does.

Tasks name pieces of memory. What is small travels with the task. The rest is written to a file, once for all tasks; a
worker that sees the file maps what it needs, privately, so that a backend that writes into a weight changes nothing for
others. A worker on another machine asks for what it has not been sent before.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from executorch.exir.backend.backend_details import PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec

from exir_lowering.errors import InputError, LoweringError, PluginLoadError, let_through
from exir_lowering.graphs.serialized import NotSerialisableError, decode, encode
from exir_lowering.model import BackendGroup, CallSite, Partition
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins import registry
from exir_lowering.plugins.addresses import load_class
from exir_lowering.plugins.backend import Backend
from exir_lowering.plugins.processes.messages import Message, describe_error, raise_error
from exir_lowering.plugins.processes.workers import Worker, WorkerDiedError, Workers
from exir_lowering.pte.saving import TemporaryFolder
from exir_lowering.steps.cache.results import flatten_results, restore_results
from exir_lowering.steps.preprocess import describe_failure, preprocess
from exir_lowering.steps.session import Session

_SMALL = 1 << 16  # bytes up to which a piece travels with its task; a mapping costs about as much
_MOST_RECEIVED = 1 << 30  # how many bytes of pieces a worker keeps that have no file

_TOKEN = 32


class MissingError(Exception):
    """A worker lacks pieces of memory, named by their digests."""

    def __init__(self, digests: Sequence[str]) -> None:
        super().__init__(f"{len(digests)} pieces of memory are missing")
        self.digests = tuple(digests)


class WeightsFile:
    """The memory of one call for its workers, in a file until `close`; with digests, for other machines too."""

    def __init__(self, *, digests: bool) -> None:
        self._digests = digests
        self._lock = threading.Lock()
        self._folder: TemporaryFolder | None = None
        self._path, self._token, self._end = Path(), "", 0
        self._places: dict[tuple[int, int], tuple[torch.Tensor, list[Any]]] = {}

    def place(self, pieces: Sequence[torch.Tensor], inline: Collection[str] = ()) -> tuple[list[Any], list[bytes]]:
        """Return what `find_pieces` takes, and the bytes sent with the task: small pieces, and `inline` digests."""
        places: list[Any] = []
        sent: list[bytes] = []
        for piece in pieces:
            found = [] if piece.numel() <= _SMALL else self._add(piece)
            if not found or found[-1] in inline:
                found = ["inline", len(sent), found[-1] if found else ""]
                sent.append(piece.numpy().tobytes())
            places.append(found)
        return places, sent

    def _add(self, piece: torch.Tensor) -> list[Any]:
        key = piece.data_ptr(), piece.numel()
        with self._lock:
            if key not in self._places:
                memory = piece.numpy().data
                digest = sha256(memory).hexdigest() if self._digests else ""
                offset = self._write(memory)
                self._places[key] = piece, ["file", str(self._path), self._token, offset, piece.numel(), digest]
            return self._places[key][1]

    def _write(self, memory: memoryview) -> int:
        if self._folder is None:
            self._folder = TemporaryFolder()
            self._path, self._token = self._folder.path / "weights", secrets.token_hex(_TOKEN // 2)
            self._path.write_bytes(self._token.encode())
            self._end = _TOKEN
        offset = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        with self._path.open("r+b") as file:
            file.seek(offset)
            file.write(memory)
        self._end = offset + len(memory)
        return offset

    def close(self) -> None:
        """Remove the file; workers that have mapped it keep what they have."""
        if self._folder is not None:
            self._folder.remove()


_received: OrderedDict[str, torch.Tensor] = OrderedDict()
"""The pieces that this process was sent, by digest, the last used ones last."""

_received_lock = threading.Lock()


def _note_received(digest: str, piece: torch.Tensor) -> None:
    with _received_lock:
        _received[digest] = piece
        while sum(one.numel() for one in _received.values()) > _MOST_RECEIVED:
            _received.popitem(last=False)


def _find_received(digest: str) -> torch.Tensor | None:
    with _received_lock:
        if digest not in _received:
            return None
        _received.move_to_end(digest)
        return _received[digest].clone()


def find_pieces(places: Sequence[Any], inline: Sequence[bytes]) -> list[torch.Tensor]:
    """Return a task's pieces of memory, from their places and the bytes that came with it; or MissingError."""
    found: list[torch.Tensor] = []
    missing = []
    for kind, *where, digest in places:
        piece: torch.Tensor | None
        if kind == "inline":
            piece = _copy(inline[where[0]])
            if digest:
                _note_received(digest, piece.clone())  # the task may write into its own
        else:
            piece = _map(*where)
            if piece is None:
                piece = _find_received(digest)
        if piece is None:
            missing.append(digest)
        else:
            found.append(piece)
    if missing:
        raise MissingError(missing)
    return found


def _copy(content: bytes) -> torch.Tensor:
    piece = torch.empty(len(content), dtype=torch.uint8)
    piece.numpy().data[:] = content
    return piece


def _map(path: str, token: str, offset: int, length: int) -> torch.Tensor | None:
    """Map a part of the file, None if there is no such file; another machine may have one of the same name."""
    try:
        with open(path, "rb") as file:
            if file.read(_TOKEN) != token.encode() or os.fstat(file.fileno()).st_size < offset + length:
                return None
            memory = mmap.mmap(file.fileno(), length, offset=offset, access=mmap.ACCESS_COPY)
    except OSError:
        return None
    return torch.frombuffer(memory, dtype=torch.uint8)


WORKERS = Workers("exir_lowering.steps.parallel.runners")  # the processes that lower partitions for this one


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
            "fast": options.fast,
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
    session = Session(LoweringOptions(check_weights=header["check_weights"], fast=header["fast"]))
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
