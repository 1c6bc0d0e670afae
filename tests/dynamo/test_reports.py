"""What reports() has of graphs that Dynamo starts anew, and of those that are compiled again and again."""

import torch
from compile_support import assert_near, clean, compiled
from torch import nn

from exir_lowering.dynamo import reports

__all__ = ["clean"]


def test_what_dynamo_starts_anew_is_reported_once() -> None:
    def function(x: torch.Tensor, slope: float) -> torch.Tensor:
        return nn.functional.leaky_relu(x, slope)  # a symbolic number first, then a constant

    on = compiled(function, partitioners="reference", dynamic=True)
    x = torch.randn(3, 4)
    assert_near(on(x, 0.25), function(x, 0.25))
    assert [(report.number, report.backend) for report in reports()] == [(0, "exir_lowering")]


def test_a_graph_that_is_compiled_again_for_ever_keeps_its_last_reports() -> None:
    model = nn.Linear(2, 2)
    function = compiled(model, partitioners="xnnpack")
    with torch.no_grad():
        for step in range(105):
            model.weight.add_(1)
            x = torch.randn(2, 2)
            for _ in range(2):  # weights that change in every call become inputs
                assert_near(function(x), model(x))
            if step == 0:
                (first,) = reports()[0].reports
    (report,) = reports()
    assert len(report.reports) == 100
    assert first not in report.reports
