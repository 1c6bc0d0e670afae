"""What a worker does: it lowers one partition as the process that sent it would, and returns the result as bytes."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from exir_lowering.errors import InputError, LoweringError, PluginLoadError
from exir_lowering.graphs.serialized import decode
from exir_lowering.model import BackendGroup, CallSite, Partition
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins import registry
from exir_lowering.plugins.addresses import load_class
from exir_lowering.plugins.processes.failures import write_error
from exir_lowering.plugins.processes.frames import Message
from exir_lowering.steps.parallel import messages
from exir_lowering.steps.parallel.messages import MissingError, Task
from exir_lowering.steps.parallel.weights import find_pieces
from exir_lowering.steps.preprocess import preprocess
from exir_lowering.steps.session import Session


def work(message: Message) -> Message:
    """Lower a partition; return the result, or what prevents it.

    The task is from a process that is trusted: the backend that it names is imported. The program is data.
    """
    task = messages.read_task(message)
    try:
        backend = registry.as_backend(task.backend_id, load_class(task.address))
        partition = _partition(task)
    except (PluginLoadError, InputError) as error:
        return messages.write_refusal(str(error))
    except MissingError as error:
        return messages.write_missing(error.digests)
    session = Session(LoweringOptions(check_weights=task.check_weights, accelerate=task.accelerate))
    try:
        with _threads(task.threads):
            (lowered,) = preprocess(BackendGroup(task.backend_id, (partition,)), backend, session)
    except (LoweringError, MemoryError) as error:
        return write_error(error, "".join(traceback.format_exception(error)))
    return messages.write_result(lowered.result)


def _partition(task: Task) -> Partition:
    program = decode(task.graph, find_pieces(task.pieces, task.inline))
    site = CallSite(task.method, (), "", (), ())
    return Partition(task.partition, task.method, "", task.backend_id, task.specs, program, site)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch compute with as many threads as in the process that sent the task."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
