"""Converts a program fast and as ExecuTorch does, and compares the results."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from edge_differences import list_differences
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig
from executorch.exir.backend.partitioner import Partitioner, PartitionResult
from torch.export import ExportedProgram

import exir_lowering
from exir_lowering import LoweringOptions
from exir_lowering.errors import LoweringError
from exir_lowering.steps.arguments import RequestedMethod
from exir_lowering.steps.edge import to_edge
from exir_lowering.steps.session import Session


class Keeping(Partitioner):
    """Keeps every operator of a program whole, or those that it is told to, and tags nothing."""

    def __init__(self, keeps: Callable[[torch.fx.Node], bool] | None = None) -> None:
        super().__init__()
        self._keeps = keeps

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], Callable[[torch.fx.Node], bool] | None]:
        targets = [node.target for node in ep.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        return list(dict.fromkeys(targets)), self._keeps

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        return PartitionResult(exported_program, {})


def _every_other(node: torch.fx.Node) -> bool:
    return len(node.args) % 2 == 1 or len(node.name) % 2 == 1


PARTITIONERS: Mapping[str, Callable[[], tuple[Partitioner, ...]]] = {
    "xnnpack": lambda: (XnnpackPartitioner(),),
    "none": lambda: (),
    "keeping": lambda: (Keeping(),),
    "keeping some": lambda: (Keeping(_every_other), XnnpackPartitioner()),
}
CONFIGS: Mapping[str, EdgeCompileConfig | None] = {
    "": None,
    " unchecked": EdgeCompileConfig(_check_ir_validity=False),
    " without dim order": EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    " preserving": EdgeCompileConfig(_check_ir_validity=False, preserve_ops=[torch.ops.aten.linear.default]),
}
Way = tuple[Callable[[], tuple[Partitioner, ...]], EdgeCompileConfig | None]
WAYS: Mapping[str, Way] = {f"{p}{c}": (PARTITIONERS[p], CONFIGS[c]) for p in PARTITIONERS for c in CONFIGS}
"""How a program is converted: what makes its partitioners, and the configuration."""


@dataclass(frozen=True)
class Outcome:
    """What the comparison of one program found.

    Attributes:
        differences: What differs; empty if nothing does.
        left: What was left to ExecuTorch, and why.
        error: The text of the error that the conversion raises, if it does.
    """

    differences: list[str]
    left: tuple[str, ...]
    error: str | None = None


def compare(program: ExportedProgram, way: str = "xnnpack") -> Outcome:
    """Convert a program both ways. Where ExecuTorch's raises, `lower` must raise the same error in both modes."""
    try:
        theirs, _ = convert(program, way, False)
    except LoweringError as error:
        texts = [_error(program, way, fast) for fast in (True, False)]
        different = [] if len(set(texts)) == 1 else [f"errors: {texts}"]
        return Outcome(different, (), str(error))
    try:
        ours, left = convert(program, way, True)
    except LoweringError as error:
        return Outcome([f"raised {error} / converted"], ())
    if any(reason.startswith("the whole conversion") for reason in left):
        return Outcome([], left)
    return Outcome(list_differences(ours, theirs), left)


def convert(program: ExportedProgram, way: str, fast: bool) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Convert a program; return also what was left to ExecuTorch."""
    method = RequestedMethod("forward", program, WAYS[way][0](), None)
    with quiet():
        (made,) = to_edge([method], Session(LoweringOptions(fast=fast, edge_compile_config=WAYS[way][1])))
    return made.program, made.left_to_executorch


def _error(program: ExportedProgram, way: str, fast: bool) -> str:
    options = LoweringOptions(fast=fast, edge_compile_config=WAYS[way][1])
    try:
        with quiet():
            exir_lowering.lower(program, WAYS[way][0](), options=options)
    except LoweringError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class quiet(warnings.catch_warnings):
    """Without warnings and logs."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)

    def __exit__(self, *error: object) -> None:
        logging.disable(logging.NOTSET)
        super().__exit__(*error)
