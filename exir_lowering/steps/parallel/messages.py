"""What travels to a worker and back: tuples of bytes, of which the first is a header in JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from executorch.exir.backend.backend_details import PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec

from exir_lowering.errors import InvariantError
from exir_lowering.plugins.processes.failures import raise_error
from exir_lowering.plugins.processes.frames import Message
from exir_lowering.steps.cache.results import flatten_results, restore_results


@dataclass(frozen=True, slots=True)
class Task:
    """One partition, as a worker gets it."""

    partition: str
    method: str  # the one that it was taken from
    backend_id: str
    address: str  # where the worker finds the backend's class
    check_weights: bool  # whether to look for writes into them
    accelerate: bool  # whether to reuse what would be computed again
    threads: int  # with how many torch computes: results may depend on it
    specs: tuple[CompileSpec, ...]
    graph: bytes  # the serialised program
    pieces: tuple[Any, ...]  # where the worker finds each piece of memory, see `WeightsFile.place`
    inline: tuple[bytes, ...]  # the pieces that travel with the task


_PLAIN = ("partition", "method", "backend_id", "address", "check_weights", "accelerate", "threads", "pieces")


def write_task(task: Task) -> Message:
    """Turn a task into bytes."""
    header = {name: getattr(task, name) for name in _PLAIN} | {"specs": [spec.key for spec in task.specs]}
    return (json.dumps(header).encode(), task.graph, *(bytes(spec.value) for spec in task.specs), *task.inline)


def read_task(message: Message) -> Task:
    """Turn bytes into a task."""
    header = json.loads(message[0])
    keys = header.pop("specs")
    values, inline = message[2 : 2 + len(keys)], message[2 + len(keys) :]
    specs = tuple(CompileSpec(key, value) for key, value in zip(keys, values, strict=True))
    return Task(**header, specs=specs, graph=message[1], inline=tuple(inline))


def write_result(result: PreprocessResult) -> Message:
    """Turn a backend's result into bytes; or say that it holds something that does not travel."""
    flat = flatten_results([result])
    if flat is None:
        return write_refusal("its result holds more than bytes, numbers and names")
    values, chunks = flat
    return (json.dumps({"kind": "result", "values": values}).encode(), *chunks)


def write_refusal(reason: str) -> Message:
    """Say why a worker cannot lower a partition, which its sender then does."""
    return (json.dumps({"kind": "refusal", "reason": reason}).encode(),)


def write_missing(digests: Sequence[str]) -> Message:
    """Say which pieces of memory a worker does not have."""
    return (json.dumps({"kind": "missing", "digests": list(digests)}).encode(),)


class RefusedError(Exception):
    """A worker cannot lower a partition."""


class MissingError(Exception):
    """A worker lacks pieces of memory, named by their digests."""

    def __init__(self, digests: Sequence[str]) -> None:
        super().__init__(f"{len(digests)} pieces of memory are missing")
        self.digests = tuple(digests)


def read_reply(message: Message, kept: dict[bytes, bytes]) -> PreprocessResult:
    """Return the result that a worker sent; bytes equal to those of earlier replies are kept once, in `kept`.

    Raise RefusedError if it could not lower the partition, MissingError if it lacks pieces of memory, MemoryError if it
    had too little, or its BackendFailure or BackendContractError.
    """
    header = json.loads(message[0])
    if header["kind"] == "result":
        (result,) = restore_results(header["values"], [kept.setdefault(chunk, chunk) for chunk in message[1:]])
        return result
    if header["kind"] == "refusal":
        raise RefusedError(header["reason"])
    if header["kind"] == "missing":
        raise MissingError(header["digests"])
    raise_error(header)
    raise InvariantError(f"a worker replied with {header['kind']!r}.")
