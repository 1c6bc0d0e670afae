"""What reports() has of graphs that Dynamo starts anew, and of those that are compiled again and again."""

from typing import Any

import pytest
import torch
from compile_support import assert_near, clean, compiled
from torch import nn

from exir_lowering.dynamo import graph, logs, reports

__all__ = ["clean"]


def test_what_dynamo_starts_anew_is_reported_once() -> None:
    def function(x: torch.Tensor, slope: float) -> torch.Tensor:
        return nn.functional.leaky_relu(x, slope)  # a symbolic number first, then a constant

    on = compiled(function, partitioners="reference", dynamic=True)
    x = torch.randn(3, 4)
    assert_near(on(x, 0.25), function(x, 0.25))
    assert [(report.number, report.backend) for report in reports()] == [(0, "exir_lowering")]


def test_a_graph_that_is_lowered_again_and_again_has_a_bounded_number_of_reports(monkeypatch: Any) -> None:
    monkeypatch.setattr(graph, "_WORTH", 2)
    monkeypatch.setattr(logs, "MOST", 6)
    model = nn.Linear(2, 2)
    function, x = compiled(model, partitioners="xnnpack"), torch.randn(2, 2)
    counts = []
    with torch.no_grad():
        for _ in range(9):
            model.weight.add_(1)
            for _ in range(2):
                assert_near(function(x), model(x))
            counts.append(len(reports()[0].reports))
    assert counts == [min(count, 6) for count in range(1, 10)]


@pytest.mark.parametrize("calls", [1, 2, 5])
def test_weights_that_change_again_and_again_become_inputs(calls: int) -> None:
    """Gradient accumulation, evaluations between steps, two sets of weights that are exchanged."""
    model = nn.Linear(2, 2)
    function, x = compiled(model, partitioners="xnnpack"), torch.randn(2, 2)
    found = []
    with torch.no_grad():
        for _ in range(6):
            model.weight.add_(1)
            for _ in range(calls):
                assert_near(function(x), model(x))
            found.append(len(reports()[0].reports))
    assert found[-1] == (2 if calls == 1 else 3)
    assert [fallback.reason for fallback in reports()[0].fallbacks] == ["their values change too often"]


def test_weights_that_change_seldom_are_packed_again() -> None:
    model = nn.Linear(2, 2)
    function, x = compiled(model, partitioners="xnnpack"), torch.randn(2, 2)
    with torch.no_grad():
        for _ in range(4):
            model.weight.add_(1)
            for _ in range(100):
                assert_near(function(x), model(x))
    assert len(reports()[0].reports) == 4 and not reports()[0].fallbacks
