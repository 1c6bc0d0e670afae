"""What is computed in inference, and where: rewritten, with whole poolings, and in partitions that pay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compile_support import assert_near, clean, compiled, delegated, delegated_operators, reasons
from torch import nn

from exir_lowering import LoweringOptions
from exir_lowering.dynamo import reports

__all__ = ["clean"]


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).eval()


def _run(model: nn.Module, x: torch.Tensor, **options: Any) -> None:
    function = compiled(model, **{"partitions": "profitable", "partitioners": "xnnpack", **options})
    with torch.no_grad():
        assert_near(function(x), model(x))
        assert_near(function(x), model(x))
    assert reasons() == []


def test_partitions_that_take_longer_than_in_pytorch_stay_there() -> None:
    single = nn.Linear(16, 16).eval()
    _run(single, torch.randn(1, 16))
    assert delegated() == []
    ((_, report),) = reports()[-1].reports
    (node,) = [node for node in report.methods[0].host if "linear" in node.operator or "addmm" in node.operator]
    assert "in 'XnnpackBackend' would take" in node.reason and "times as long as in PyTorch" in node.reason
    _run(mlp(256), torch.randn(64, 256))
    assert delegated() == ["XnnpackBackend"]


@pytest.mark.parametrize(
    "options",
    [
        {"partitions": "all"},
        {"lowering": LoweringOptions(require_coverage=0.1)},
        {"partitioners": "reference"},  # of a delegate in this process nobody knows what it costs
    ],
)
def test_partitions_that_are_asked_for_are_kept(options: dict[str, Any]) -> None:
    _run(nn.Linear(16, 16).eval(), torch.randn(1, 16), **options)
    assert len(delegated()) == 1


class Pooled(nn.Module):
    def __init__(self, indices: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 3)
        self.indices = indices

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.relu(self.first(x))
        pooled, where = nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)
        return (self.second(pooled), where) if self.indices else self.second(pooled)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_max_pooling_is_whole_unless_its_indices_are_read(dynamic: bool) -> None:
    _run(Pooled(indices=False).eval(), torch.randn(2, 3, 32, 32))
    assert delegated() == ["XnnpackBackend"] and "max_pool2d" in delegated_operators("XnnpackBackend")
    torch._dynamo.reset()
    _run(Pooled(indices=True).eval(), torch.randn(2, 3, 32, 32))
    assert "max_pool2d" not in delegated_operators("XnnpackBackend")
    torch._dynamo.reset()
    _run(nn.MaxPool2d(2), torch.randn(1, 2, 8, 8), partitions="all")  # the pooling is what is returned
    assert delegated() == ["XnnpackBackend"]


@pytest.mark.parametrize("rewrites", [None, "safe", "none"])
@pytest.mark.parametrize("grad", [False, True])
def test_graphs_without_gradients_are_rewritten_by_default(rewrites: Any, grad: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(32, 4)).train()  # in `eval` there is one operator for a layer
    x = torch.randn(2, 5, 32)
    function = compiled(model, partitioners="xnnpack", lowering=LoweringOptions(rewrites=rewrites))
    with torch.set_grad_enabled(grad):
        assert_near(function(x), model(x))
    done = [one for report in reports() for _, each in report.reports for one in each.methods[0].rewritings]
    assert bool(done) == (rewrites == "safe" or (rewrites is None and not grad))


@pytest.mark.parametrize("partitioner", [None, "reference", "xnnpack"])
def test_operators_that_rely_on_how_their_input_lies_in_memory(partitioner: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch._dynamo.config, "allow_rnn", True)
    model = nn.LSTM(4, 3, num_layers=2, batch_first=True, bidirectional=True).eval()
    _run(model, torch.randn(3, 5, 4), partitioners=partitioner)


def test_a_backend_of_a_list_that_would_not_pay_is_no_failure() -> None:
    model, x = nn.Linear(16, 16).eval(), torch.randn(1, 16)
    function = torch.compile(model, backend="exir_lowering", fullgraph=True, options={"backends": ["xnnpack", "eager"]})
    with torch.no_grad():
        assert_near(function(x), model(x))
    assert (reports()[-1].backend, delegated(), reasons()) == ("exir_lowering", [], [])
