"""The table of docs/edge-operators.md: what a partitioner sees of each function of PyTorch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folders import ROOT

from exir_lowering import ExplainedResult, Partitioner, graphs, plan
from exir_lowering.partitioners import OperatorTable

PAGE = ROOT / "docs" / "edge-operators.md"
ROWS = re.findall(r"^\| `([^`]+)` \| (`[^|]+`) \| (?:`(.+)`)? ?\|$", PAGE.read_text(), re.MULTILINE)
"""Expressions, their operators in order, and the name by which a table gets them whole, as the page has them."""

torch.manual_seed(0)
VALUES: dict[str, Any] = {
    "x": torch.randn(2, 4, 8),
    "y": torch.randn(2, 4, 8),
    "image": torch.randn(2, 4, 8, 8),
    "ids": torch.randint(0, 8, (2, 4)),
    "mask": torch.ones(2, 4, 8, dtype=torch.bool),
}
HELD: dict[str, torch.Tensor] = {
    "w": torch.randn(8, 8),
    "b": torch.randn(8),
    "kernel": torch.randn(4, 4, 3, 3),
    "bias": torch.randn(4),
    "mean": torch.zeros(4),
    "variance": torch.ones(4),
}


class Seeing(Partitioner):  # type: ignore[misc]
    """Takes nothing, and keeps what it sees first: afterwards, what it left was made ready for the host."""

    seen: list[str] | None = None

    def partition(self, exported_program: torch.export.ExportedProgram) -> ExplainedResult:
        operators = [graphs.operator_name(n) for n in exported_program.graph.nodes if graphs.is_operator(n)]
        self.seen = operators if self.seen is None else self.seen
        return ExplainedResult(exported_program, {})


def export(expression: str) -> torch.export.ExportedProgram:
    code = compile(expression, "edge-operators.md", "eval")
    given = {name: value for name, value in VALUES.items() if name in code.co_names}

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in HELD.items():
                self.register_buffer(name, value)

        def forward(self, **inputs: torch.Tensor) -> Any:
            return eval(code, {"torch": torch, "F": F, **inputs, **dict(self.named_buffers())})

    return torch.export.export(Model().eval(), (), given)


@pytest.mark.parametrize(("expression", "operators", "whole"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_of_the_table(expression: str, operators: str, whole: str) -> None:
    program, partitioner = export(expression), Seeing()
    plan(program, partitioner)
    assert partitioner.seen == [
        name if name.startswith("dim_order_ops.") else f"aten.{name}" for name in re.findall("`([^`]+)`", operators)
    ]
    if whole:
        (method,) = plan(program, OperatorTable("npu", {f"aten.{whole}": "ALL"}).partitioner()).methods
        assert [name for one in method.partitions for name in one.operators] == [f"aten.{whole}"]


def test_the_table_has_rows() -> None:
    assert len(ROWS) == PAGE.read_text().count("\n| `") > 50
