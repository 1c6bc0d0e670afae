"""Pieces, repeats and powers become what backends take, with the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from torch import nn
from torch.export import Dim, export
from torch.nn import functional

from exir_lowering import LoweringOptions, load, lower, plan
from exir_lowering.graphs import operator_name
from exir_lowering.partitioners import SupportPartitioner, ops


class Layered(nn.Module):
    """A function of what a linear layer returns."""

    def __init__(self, function: Callable[[torch.Tensor], Any], size: int) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(12, size), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer(x))


def attend(x: torch.Tensor) -> torch.Tensor:
    query, key, value = x.reshape(2, 5, 3, 4, 3).permute(2, 0, 3, 1, 4).unbind(0)
    query, key = functional.normalize(query, dim=-1), functional.normalize(key, dim=-1)
    return ((query @ key.transpose(-2, -1)).softmax(-1) @ value).transpose(1, 2).reshape(2, 5, 12)


CASES: dict[str, tuple[Callable[[torch.Tensor], Any], int]] = {
    "attention": (attend, 36),
    "select": (lambda x: x[:, 0].sigmoid() + x[:, -1].sigmoid() + x[1, 1].sigmoid() * x.select(2, -3)[1, :1], 7),
    "split": (lambda x: [one.sigmoid() for one in x.split([1, 4, 2], -1)], 7),
    "split of equal parts": (lambda x: [one.sigmoid() for one in x.split(3, 2)], 7),
    "one part": (lambda x: x.chunk(2, -1)[1].tanh(), 8),
    "unbind": (lambda x: [one.tanh() for one in x.unbind(1)], 4),
    "squeeze": (lambda x: (x[:, :1].tanh().squeeze(1)[:, None, :, None].tanh(), x.unsqueeze(0).tanh()), 4),
    "divided by a norm": (lambda x: x / (x.square().sum(-1, keepdim=True).sqrt() + 1).expand_as(x), 6),
    "an expansion first": (lambda x: x[..., :1].tanh().expand(2, 5, 6) - x, 6),
    "an expansion of both": (lambda x: x[..., :1].expand(2, 5, 6) * x[:, :1, :6].expand(2, 5, 6), 6),
    "powers": (lambda x: x.pow(2.0) + x.pow(3) - x.abs().pow(0.5), 6),
    "inverse powers": (lambda x: (x.abs() + 0.5).pow(-0.5) + (x.abs() + 1).reciprocal(), 6),
    "means": (lambda x: (x.mean(-1), x.mean((1, 2)), x.mean((-1, -2), keepdim=True)), 6),
}


SUM = "aten.sum.dim_IntList"  # the host's kernel takes half the instructions of any other form


@pytest.mark.parametrize("name", CASES)
def test_all_but_sums_is_in_delegates_and_equal(name: str) -> None:
    model, given = Layered(*CASES[name]).eval(), torch.randn(2, 5, 12)
    program = export(model, (given,))
    found = plan(program, XnnpackPartitioner()).methods[0]
    host = [one.operator for one in found.host]
    assert set(host) <= {SUM} and len(found.partitions) <= 1 + len(host), Counter(host)
    loaded = load(lower(program, XnnpackPartitioner()).emit().buffer)
    for x in (given, torch.zeros_like(given), -given * 100):
        expected = model(x) if isinstance(model(x), (list, tuple)) else [model(x)]
        torch.testing.assert_close(list(loaded.run("forward", x)), list(expected), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["powers", "inverse powers", "means", "divided by a norm", "split"])
def test_infinities_and_nan(name: str) -> None:
    model = Layered(CASES[name][0], 12).eval()
    model.layer = nn.ReLU() if name == "powers" else nn.Sigmoid() if name == "split" else nn.Hardtanh(-1e38, 1e38)
    x = torch.randn(2, 5, 12 if name != "split" else 7)
    x[0, 0, 0], x[0, 1, 1], x[0, 2, 2], x[1, 0, 3] = torch.inf, torch.nan, -torch.inf, 3e38
    (file,) = [lower(export(model, (x,)), XnnpackPartitioner()).emit().buffer]
    (without,) = [
        lower(export(model, (x,)), XnnpackPartitioner(), options=LoweringOptions(rewrites="none")).emit().buffer
    ]
    got, expected = (load(one).run("forward", x) for one in (file, without))
    torch.testing.assert_close(list(got), list(expected), equal_nan=True)


def joined(x: torch.Tensor) -> list[torch.Tensor]:
    first, second = x.sigmoid(), x.tanh()
    whole = torch.cat([first, second, torch.cat([x, first], -1)], -1)  # of 6, 6 and 12 elements
    return [*(one.sigmoid() for one in whole.split(3, -1)), torch.cat([first, second], 1).select(1, 5).sigmoid()]


def test_pieces_of_a_concatenation_are_those_of_its_operands() -> None:
    model, given = Layered(joined, 6).eval(), torch.randn(2, 5, 12)
    model.layer.bias.data[0] = torch.nan
    lowered = lower(export(model, (given,)), XnnpackPartitioner())
    (module,) = (one for _, one in lowered["forward"].graph_module.named_children())
    calls = [node for node in module.original_module.graph.nodes if node.op == "call_function"]
    operators = Counter(map(operator_name, calls))
    assert operators["aten.slice_copy.Tensor"] == 7 and not operators["aten.cat.default"], operators
    for got, wanted in zip(load(lowered.emit().buffer).run("forward", given), model(given), strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat([x[..., :4], x.sigmoid()], -1).split(5, -1),  # on both sides of the border
        lambda x: torch.cat([x, x.sigmoid()], 0).split(3, -1),  # along another dimension
        lambda x: torch.cat([x.to(torch.float64), x], -1).split(6, -1),
        lambda x: torch.cat([torch.zeros(0), x, x.sigmoid()], -1).split(6, -1),
    ],
)
def test_other_pieces_of_concatenations(function: Callable[[torch.Tensor], Any]) -> None:
    model, given = Layered(lambda x: [one.sigmoid() for one in function(x)], 6).eval(), torch.randn(2, 5, 12)
    got = load(lower(export(model, (given,)), XnnpackPartitioner()).emit().buffer).run("forward", given)
    torch.testing.assert_close(list(got), model(given), rtol=1e-5, atol=1e-4)


def test_any_number_of_rows() -> None:
    """What needs known sizes is left alone, the rest is equal for each."""
    model = Layered(lambda x: functional.normalize(x, dim=-1) * x.chunk(2, -1)[0].sum(-1, keepdim=True), 6).eval()
    program = export(model, (torch.randn(2, 5, 12),), dynamic_shapes=({1: Dim("n", max=9)},))
    loaded = load(lower(program, XnnpackPartitioner()).emit().buffer)
    for rows in (2, 5, 9):
        x = torch.randn(2, rows, 12)
        torch.testing.assert_close(loaded.run("forward", x)[0], model(x))


def test_what_a_backend_takes_as_it_is_stays() -> None:
    model = Layered(lambda x: [one.sigmoid().select(1, 0) for one in x.split([1, 4, 2], -1)], 7).eval()
    program = export(model, (torch.randn(2, 5, 12),))
    taking = SupportPartitioner({"reference": ops("aten.select_copy", "aten.split_with_sizes_copy")})
    for one in plan(program, taking).methods[0].rewritings:
        assert one.rewrite not in ("pieces", "powers", "broadcasts")
