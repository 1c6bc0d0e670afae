"""What hunts have found: programs that rewrites once made wrong, each in the smallest form."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import both_forms
import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.nn import functional as F

import exir_lowering
from exir_lowering import LoweringOptions, rewrites
from exir_lowering.graphs import operator_name
from exir_lowering.graphs.ranges import ValueRanges
from exir_lowering.steps.arguments import RequestedMethod
from exir_lowering.steps.edge import to_edge
from exir_lowering.steps.session import Session
from exir_lowering.steps.shared_state import list_states

INF = float("inf")
SQUARE = torch.arange(16.0).view(4, 4)


class Of(nn.Module):
    """Calls a function, with state at hand."""

    def __init__(self, function: Callable[..., Any], **state: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in state.items():
            self.register_buffer(name, value.clone())

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def program(function: Callable[..., Any], *inputs: torch.Tensor, shapes: Any = None, **state: Any) -> ExportedProgram:
    return export(Of(function, **state), inputs, dynamic_shapes=None if shapes is None else (shapes,), strict=False)


def safe_softmax(scores: torch.Tensor, zeros: torch.Tensor | None = None) -> torch.Tensor:
    empty = torch.logical_not(torch.any(torch.logical_not(scores == -INF), dim=-1, keepdim=True))
    return torch.where(empty, torch.zeros_like(scores) if zeros is None else zeros, F.softmax(scores, -1))


def check(exported: ExportedProgram, *calls: tuple[torch.Tensor, ...]) -> both_forms.Outcome:
    found = both_forms.compare(exported, calls)
    assert found.differences == []
    return found


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x.reshape(-1).reshape(x.shape[1], x.shape[0]) + 1,
        lambda m, x: x.reshape(x.shape[0] * x.shape[1]).view(x.shape[1], x.shape[0]).sum(0),
    ],
)
def test_sizes_that_were_equal_at_export_are_not_the_same_size(function: Any) -> None:
    rows, columns = Dim("rows", min=2, max=16), Dim("columns", min=2, max=16)
    exported = program(function, SQUARE, shapes=({0: rows, 1: columns},))
    found = check(exported, (SQUARE,), (torch.randn(3, 5),))
    assert found.runs


def test_a_part_of_a_dimension_is_not_the_whole_although_it_was_at_export() -> None:
    shapes = ({0: Dim("a", min=2, max=16)}, {0: Dim("b", min=2, max=16)})
    exported = program(lambda m, x, y: x[: y.shape[0]].sum() + 1, SQUARE, SQUARE, shapes=shapes)
    check(exported, (SQUARE, SQUARE), (torch.randn(5, 4), torch.randn(2, 4)))


def test_what_another_method_writes_is_no_constant() -> None:
    state = {"place": torch.zeros(4), "bias": torch.zeros(4, 4)}
    given = {
        "write": program(lambda m, x: m.place.add_(x) + m.bias.fill_(-INF), torch.ones(4), **state),
        "read": program(lambda m, x: ((m.place * 2 + 1) * x, safe_softmax(x.tanh() + m.bias)), SQUARE, **state),
    }
    session = Session(LoweringOptions())
    methods = to_edge([RequestedMethod(name, one, (), None) for name, one in given.items()], session)
    _, read = both_forms.rewritten(methods, both_forms.ALL, session, list_states(methods))
    assert {"b_place", "b_bias"} <= {node.name for node in read.program.graph.nodes}
    operators = [operator_name(node) for node in read.program.graph.nodes if node.op == "call_function"]
    assert "aten.where.self" in operators
    (alone,) = both_forms.rewritten(methods[1:], both_forms.ALL, session)
    assert "b_place" not in {node.name for node in alone.program.graph.nodes}


def test_a_pooling_window_with_gaps_may_see_padding_only() -> None:
    def pooled(m: Any, x: torch.Tensor) -> torch.Tensor:
        return safe_softmax(F.max_pool2d(x.tanh(), 2, stride=1, padding=1, dilation=3))

    exported = program(pooled, torch.randn(1, 1, 2, 2))
    assert pooled(None, torch.randn(1, 1, 2, 2)).item() == 0
    check(exported, (torch.randn(1, 1, 2, 2),))


def test_a_normalisation_without_eps_is_not_bounded() -> None:
    exported = program(lambda m, x: F.layer_norm(x, (4,), eps=0.0), SQUARE)
    (method,) = to_edge([RequestedMethod("forward", exported, (), None)], Session(LoweringOptions()))
    (result,) = (node for node in method.program.graph.nodes if node.name == "getitem")
    assert ValueRanges(method.program).of(result).magnitude == INF


def test_a_number_with_more_dimensions_than_what_it_multiplies() -> None:
    def grouped(m: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.bmm(q, torch.mul(k.expand(4, 5), torch.full((1, 1, 1), 2.0)))

    check(program(grouped, torch.randn(1, 2, 4), torch.randn(1, 5)), (torch.randn(1, 2, 4), torch.randn(1, 5)))


def test_safe_softmax_of_another_form_is_left_alone() -> None:
    mask = torch.tensor([[True], [False], [True], [False]]).expand(4, 4).contiguous()

    def additive(m: Any, x: torch.Tensor, mask: torch.Tensor, hidden: Any, shown: Any, zero: Any) -> torch.Tensor:
        return safe_softmax(x.tanh() + torch.where(mask, shown(x), hidden(x)), zero(x))

    plain = lambda x: torch.zeros_like(x)  # noqa: E731
    hidden = lambda x: torch.full_like(x, -INF)  # noqa: E731
    cases = {
        "plain": (mask, hidden, plain, plain),
        "negative zero": (mask, hidden, plain, lambda x: torch.full_like(x, -0.0)),
        "another dtype": (mask, hidden, lambda x: torch.zeros_like(x, dtype=torch.float16), plain),
        "another shape": (mask[:1], hidden, lambda x: torch.zeros_like(x[:1]), plain),
        "more rows": (mask, hidden, plain, lambda x: torch.zeros_like(x).expand(3, 4, 4) * 1),
        "double": (mask, hidden, plain, lambda x: torch.zeros_like(x, dtype=torch.float64)),
    }
    for name, (given, *made) in cases.items():
        exported = program(lambda m, x, mask, made=made: additive(m, x, mask, *made), SQUARE, given)
        found = check(exported, (SQUARE, given), (SQUARE, given & False))
        assert ("safe-softmax" in found.rewritten) is (name == "plain"), name


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.state.index_put_((m.order,), m.state.clone()),
        lambda m, x: m.state.index_put_((m.order,), m.state.clone().view(4)),
        lambda m, x: m.order.index_put_((m.order.clone(),), m.other),
    ],
)
def test_state_that_is_its_own_value_or_index_is_not_written_in_place(function: Any) -> None:
    def both(m: Any, x: torch.Tensor) -> torch.Tensor:
        function(m, x)
        return m.state + m.order + x

    state = {"state": torch.arange(4.0), "order": torch.tensor([3, 2, 1, 0]), "other": torch.tensor([1, 2, 3, 0])}
    exported, model = program(both, torch.ones(4), **state), copy.deepcopy(Of(both, **state))
    lowered = exir_lowering.lower(exported, options=LoweringOptions(rewrites=[rewrites.Identity]))
    file = exir_lowering.load(lowered.emit().buffer)
    for number in range(3):
        inputs = torch.full((4,), float(number))
        found = file.run("forward", inputs)
        assert torch.equal(found[0] if isinstance(found, (list, tuple)) else found, model(inputs))


def test_constants_of_methods_are_not_mistaken_for_each_other_in_a_data_file(tmp_path: Any) -> None:
    given = {
        name: program(lambda m, x: x + torch.arange(4.0).cos() * m.scale, torch.ones(4), scale=torch.full((4,), scale))
        for name, scale in (("one", 1.0), ("two", 2.0))
    }
    lowered = exir_lowering.lower(given, options=LoweringOptions(rewrites=[rewrites.Constants]))
    assert len([one for method in lowered.report.methods for one in method.rewritings]) == 2
    lowered.emit(external_weights="weights").save(tmp_path / "model.pte")
    file = exir_lowering.load(tmp_path / "model.pte")
    for name, scale in (("one", 1.0), ("two", 2.0)):
        found = file.run(name, torch.ones(4))
        found = found[0] if isinstance(found, (list, tuple)) else found
        assert torch.allclose(found, 1 + torch.arange(4.0).cos() * scale)
