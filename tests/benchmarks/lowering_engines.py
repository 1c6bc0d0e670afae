"""ExecuTorch's way from a program to a `.pte`, and ours, with the CPU time of their steps."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeProgramManager, to_edge_transform_and_lower
from executorch.exir.lowered_backend_module import LoweredBackendModule
from executorch.exir.program import _program
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram

import exir_lowering
from exir_lowering import LoweringOptions
from exir_lowering._upstream.value_keys import MEMORY
from exir_lowering.graphs import walk


@dataclass(frozen=True)
class Lowered:
    """What a lowering made.

    Attributes:
        seconds: CPU seconds: "total", and of each step.
        buffer: The `.pte`.
        delegates: The delegates, in the order of the graph.
        operators: The operators on the host, in the order of the graph.
    """

    seconds: dict[str, float]
    buffer: bytes
    delegates: list[LoweredBackendModule]
    operators: list[str]


Engine = Callable[[ExportedProgram], Lowered]


def executorch(program: ExportedProgram) -> Lowered:
    """Lower as ExecuTorch's documentation says; its edge conversion and its `to_backend` are timed inside."""
    seconds: dict[str, float] = {}
    start = time.process_time()
    with (
        _timed(_program, "_gen_edge_manager_for_partitioners", "edge", seconds),
        _timed(EdgeProgramManager, "to_backend", "backend", seconds),
    ):
        manager = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    seconds["lower"] = time.process_time() - start
    parts = _parts(manager.exported_program())  # emission changes it
    start = time.process_time()
    buffer = manager.to_executorch().buffer
    return Lowered(_with_total(seconds, time.process_time() - start), buffer, *parts)


def ours(program: ExportedProgram, options: LoweringOptions | None = None) -> Lowered:
    """Lower with this package. Its report has wall times; they become shares of the CPU time of `lower`."""
    start = time.process_time()
    methods = exir_lowering.lower(program, "xnnpack", options=options or LoweringOptions(rewrites="none"))
    lower = time.process_time() - start
    parts = _parts(methods["forward"])
    wall = methods.report.seconds
    edge = wall.get("edge", 0.0) / max(sum(wall.values()), 1e-9) * lower
    start = time.process_time()
    buffer = methods.emit().buffer
    seconds = {"edge": edge, "backend": lower - edge, "lower": lower}
    return Lowered(_with_total(seconds, time.process_time() - start), buffer, *parts)


def ours_without(program: ExportedProgram) -> Lowered:
    """Lower with this package, without what makes it fast."""
    return ours(program, LoweringOptions(fast=False, rewrites="none"))


ENGINES: dict[str, Engine] = {"executorch": executorch, "ours": ours, "plain": ours_without}
STEPS = ("edge", "backend", "emit")


def forget() -> None:
    """Forget what this package remembers of earlier lowerings in the process."""
    MEMORY.clear()


class FakeResults:
    """What torch remembered of fake operators at one moment, so that each first lowering finds the same."""

    def __init__(self) -> None:
        self._kept = dict(FakeTensorMode.cache)

    def restore(self) -> None:
        """Forget what was added since, such as by the other engine."""
        FakeTensorMode.cache.clear()
        FakeTensorMode.cache.update(self._kept)


def run(engine: Engine, program: ExportedProgram) -> Lowered:
    """Lower after a full garbage collection, without warnings."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return engine(program)


@contextmanager
def _timed(owner: Any, name: str, step: str, seconds: dict[str, float]) -> Iterator[None]:
    original = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return original(*args, **kwargs)
        finally:
            seconds[step] = seconds.get(step, 0.0) + time.process_time() - start

    with patch.object(owner, name, timed):
        yield


def _with_total(seconds: dict[str, float], emit: float) -> dict[str, float]:
    return {**seconds, "emit": emit, "total": seconds["lower"] + emit}


def _parts(program: ExportedProgram) -> tuple[list[LoweredBackendModule], list[str]]:
    delegates, operators = [], []
    for _, module in walk(program.graph_module):
        for node in module.graph.nodes:
            named = getattr(module, str(node.target), None) if node.op == "get_attr" else None
            if isinstance(named, LoweredBackendModule):
                delegates.append(named)
            elif node.op == "call_function":
                operators.append(str(node.target))
    return delegates, operators
