"""What a worker does: it lowers one partition as the process that sent it would, and returns the result as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from executorch.exir.backend.compile_spec_schema import CompileSpec

from exir_lowering.errors import InputError, LoweringError, PluginLoadError
from exir_lowering.graphs.serialized import decode
from exir_lowering.model import BackendGroup, CallSite, Partition
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins import registry
from exir_lowering.plugins.addresses import load_class
from exir_lowering.plugins.processes.messages import Message, describe_error
from exir_lowering.steps.cache.results import flatten_results
from exir_lowering.steps.parallel.weight_files import MissingError, find_pieces
from exir_lowering.steps.preprocess import preprocess
from exir_lowering.steps.session import Session


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
