"""Products of matrices become linear layers or products of batches: where a backend takes them, with equal results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from lowering_support import edge_program
from torch.export import export
from torch.nn.utils import parametrizations

from exir_lowering import LoweringOptions, load, lower, plan
from exir_lowering.partitioners import SupportPartitioner, ops

LINEAR, ADDMM, MM, BMM = "aten.linear.default", "aten.addmm.default", "aten.mm.default", "aten.bmm.default"


class Apply(torch.nn.Module):
    def __init__(self, function: Callable[..., Any], *weights: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for number, weight in enumerate(weights):
            self.register_buffer(f"weight{number}", weight)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs, *self.buffers())


class Attention(torch.nn.Module):
    """Queries, keys and values of three sources, so that the packed weight is split."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(size, 4, batch_first=True)
        torch.nn.init.normal_(self.attention.in_proj_bias)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.attention(x, y, x + y, need_weights=False)[0]


def products(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], *others: tuple[torch.Tensor, ...]) -> Any:
    """Compare the file with eager on all inputs; return the products in delegates, and those on the host."""
    program = export(model.eval(), inputs)
    lowered = lower(program, XnnpackPartitioner())
    loaded = load(lowered.emit().buffer)
    for call in (inputs, *others):
        torch.testing.assert_close(loaded.run("forward", *call)[0], model(*call), equal_nan=True)
    found = plan(program, XnnpackPartitioner()).methods[0]
    wanted = (LINEAR, ADDMM, MM, BMM)
    inside = [name for partition in found.partitions for name in partition.operators if name in wanted]
    return inside, [one.operator for one in found.host if one.operator in wanted]


A, B, C, D = torch.randn(5, 7), torch.randn(7, 3), torch.randn(3), torch.randn(5, 3)

CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], list[str], list[str]]] = {
    "two that are computed": (lambda x, y: x.relu() @ y.t(), (), [BMM], []),
    "a bias": (lambda x, y, c: torch.addmm(c, x, y.t()), (C,), [BMM], []),
    "a bias for each element": (lambda x, y, c: torch.addmm(c, x, y.t()), (D,), [BMM], []),
    "a constant": (lambda x, y, w: x @ w, (B,), [MM], []),
    "a transposed constant": (lambda x, y, w, c: torch.addmm(c, x, w.t()), (B.t().clone(), C), [LINEAR], []),
    "half of a constant": (lambda x, y, w: x @ w.split(3)[1].t(), (torch.randn(6, 7),), [LINEAR], []),
    "beta": (lambda x, y, c: torch.addmm(c, x, y.t(), beta=2), (C,), [], [ADDMM]),
    "alpha": (lambda x, y, c: torch.addmm(c, x, y.t(), alpha=0.5), (C,), [], [ADDMM]),
    "no summands": (lambda x, y, c: torch.addmm(c, x[:, :0], y[:, :0].t()), (C,), [], [ADDMM]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_form(case: str) -> None:
    function, weights, inside, host = CASES[case]
    x, y = A.clone(), torch.randn(3, 7)
    x[1, 2], x[2, 3], x[3, 1] = torch.inf, torch.nan, 3e38
    assert products(Apply(function, *weights), (A, y), (x, y)) == (inside, host)


@pytest.mark.parametrize("size", [32, 640])  # the packed weight of the latter has more than a million elements
def test_packed_weights_are_split_ahead_of_time(size: int) -> None:
    inputs = torch.randn(1, 6, size), torch.randn(1, 6, size)
    inside, host = products(Attention(size), inputs, (inputs[1], inputs[0]))
    assert LINEAR in inside and not host
    program = export(Attention(size).eval(), inputs)
    files = [
        len(lower(program, XnnpackPartitioner(), options=LoweringOptions(rewrites=one)).emit().buffer)
        for one in ("safe", "none")
    ]
    assert files[0] <= files[1]


def test_pieces_of_which_one_is_needed_otherwise_stay_within_bounds() -> None:
    """Where the whole weight stays, its pieces would be stored twice."""

    class Whole(Attention):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return super().forward(x, y), x[0] @ self.attention.in_proj_weight.mT

    inputs = torch.randn(1, 6, 640), torch.randn(1, 6, 640)
    program = export(Whole(640).eval(), inputs)
    lowered = lower(program, XnnpackPartitioner())
    weights = sum(value.nbytes for value in program.state_dict.values())
    assert len(lowered.emit().buffer) < 1.05 * weights
    got = load(lowered.emit().buffer).run("forward", *inputs)
    torch.testing.assert_close(list(got), list(program.module()(*inputs)), rtol=1e-4, atol=1e-4)


def test_a_layer_with_a_weight_that_is_computed_from_constants() -> None:
    layer = parametrizations.weight_norm(torch.nn.Linear(7, 3))
    assert products(torch.nn.Sequential(layer, torch.nn.Tanh()), (A,), (A * 100,)) == ([LINEAR], [])


def test_what_a_backend_takes_is_left_to_it() -> None:
    program = export(torch.nn.Linear(7, 3).eval(), (A,))
    taking = SupportPartitioner({"reference": ops("aten.addmm", "aten.permute_copy", "aten.linear")})
    edge = edge_program(torch.nn.Linear(7, 3).eval(), (A,))
    for given in (program, edge):
        with_it, without = (lower(given, taking, options=LoweringOptions(rewrites=one)) for one in ("safe", "none"))
        assert not with_it.report.methods[0].rewritings
        assert with_it.emit().buffer == without.emit().buffer
