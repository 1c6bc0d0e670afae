"""Sizes that are computed at runtime and need not be: equal results at each size, and delegates as in static files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting_support import always, versions
from torch.export import Dim, export

from exir_lowering import LoweringOptions, load, lower, plan
from exir_lowering.rewrites import InferredSizes, Repeats

WIDTH, HEADS = 16, 4
ROWS = Dim("rows", min=1, max=40)
ODD = (float("inf"), float("-inf"), float("nan"), -0.0)


class Attention(torch.nn.Module):
    """Attention of grouped heads, with rotary embeddings, under a mask."""

    def __init__(self, groups: int = 2, attend: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.groups, self.attend = groups, attend or torch.nn.functional.scaled_dot_product_attention
        self.query, self.out = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (torch.nn.Linear(WIDTH, WIDTH // HEADS * groups) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = x.shape
        x = x.tanh()  # so that scores are finite
        split = (one(x).view(batch, rows, -1, WIDTH // HEADS) for one in (self.query, self.key, self.value))
        query, key, value = (one.transpose(1, 2) for one in split)
        repeats = HEADS // self.groups
        key, value = (
            one[:, :, None].expand(batch, self.groups, repeats, rows, -1).reshape(batch, HEADS, rows, -1)
            for one in (key, value)
        )
        made = self.attend(query, key, value, mask[:, None, None] | torch.eye(rows, dtype=torch.bool))
        return self.out(made.transpose(1, 2).reshape(batch, rows, -1))


def eager_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(2, 3)) * 0.5 + torch.where(mask, 0.0, -1e9)
    return torch.matmul(scores.softmax(-1), value)


def inputs(rows: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, rows, WIDTH), torch.rand(batch, rows) > 0.3


def compare(model: torch.nn.Module, program: Any, calls: list[tuple[torch.Tensor, ...]]) -> None:
    loaded = load(lower(program, "xnnpack").emit().buffer)
    for call in calls:
        torch.testing.assert_close(loaded.run("forward", *call)[0], model(*call))


@pytest.mark.parametrize("attend", [None, eager_attention], ids=["sdpa", "eager"])
def test_attention_has_the_partitions_of_the_static_file(attend: Any) -> None:
    model = Attention(attend=attend).eval()
    programs = [export(model, inputs(9), dynamic_shapes=shapes) for shapes in (({1: ROWS}, {1: ROWS}), None)]
    dynamic, static = (plan(program, "xnnpack").methods[0] for program in programs)
    assert len(dynamic.partitions) == len(static.partitions) == 1
    assert "aten.view_copy.default" not in [one.operator for one in dynamic.host]
    compare(model, programs[0], [inputs(rows) for rows in (1, 2, 9, 17, 40, 3)])


def test_a_dynamic_batch() -> None:
    model, batch = Attention(groups=HEADS).eval(), Dim("batch", min=1, max=6)
    program = export(model, inputs(9, 3), dynamic_shapes=({0: batch}, {0: batch}))
    assert len(plan(program, "xnnpack").methods[0].partitions) == 1
    compare(model, program, [inputs(9, batch) for batch in (1, 2, 6, 3)])


def test_a_dynamic_batch_of_dynamic_rows() -> None:
    model, batch = Attention().eval(), Dim("batch", min=1, max=6)
    program = export(model, inputs(9, 3), dynamic_shapes=({0: batch, 1: ROWS}, {0: batch, 1: ROWS}))
    compare(model, program, [inputs(*call) for call in ((1, 1), (40, 6), (1, 6), (7, 1), (9, 3))])


def test_methods_that_share_weights() -> None:
    model = Attention().eval()
    shapes = ({1: ROWS}, {1: ROWS})
    programs = {"prefill": export(model, inputs(9), dynamic_shapes=shapes), "decode": export(model, inputs(1))}
    lowered = lower(programs, "xnnpack")
    loaded = load(lowered.emit().buffer)
    for method, rows in (("prefill", 40), ("decode", 1), ("prefill", 2), ("decode", 1)):
        call = inputs(rows)
        torch.testing.assert_close(loaded.run(method, *call)[0], model(*call))


class Apply(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def mean_and_scores(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = (x @ x.transpose(1, 2)).view(1, 2, x.shape[1], x.shape[1])
    return scores.softmax(-1).view(2, x.shape[1], x.shape[1]), scores


FORMS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "a view": (lambda x: x.relu().view(2, x.shape[1], 2, 4).exp(), []),
    "a view by element count": (lambda x: x.relu().view(x.shape[0] * x.shape[1], 8).exp(), []),
    "all in one": (lambda x: x.relu().view(x.numel()).exp(), []),
    "more dimensions": (lambda x: x.relu()[:, None].exp(), []),
    "repeats": (lambda x: x[:, :, None].expand(2, x.shape[1], 3, 8).exp(), []),
    "repeats of more dimensions": (lambda x: x.expand(3, 2, x.shape[1], 8).exp(), []),
    "repeats that are not known": (lambda x: x[:, :1].expand(2, x.shape[1], 8).exp(), ["aten.expand_copy.default"]),
    "two that are not known": (
        lambda x: (x @ x.transpose(1, 2)).view(1, 2, x.shape[1], x.shape[1]).tanh(),
        ["aten.view_copy.default"],
    ),
    "between two views": (
        lambda x: (
            ((x @ x.transpose(1, 2)).view(1, 2, x.shape[1], x.shape[1]) * 0.5 + x[None, :1, :, :1])
            .softmax(-1)
            .view(2, x.shape[1], x.shape[1])
        ),
        [],
    ),
    "between two views, another dimension": (
        lambda x: (
            (x @ x.transpose(1, 2)).view(1, 2, x.shape[1], x.shape[1]).softmax(1).view(2, x.shape[1], x.shape[1]).exp()
        ),
        ["aten._softmax.default", "aten.view_copy.default", "aten.view_copy.default"],
    ),
    "between two views, returned": (mean_and_scores, ["aten.view_copy.default", "aten.view_copy.default"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form(form: str) -> None:
    function, host = FORMS[form]
    model = Apply(function)
    program = export(model, (torch.randn(2, 5, 8),), dynamic_shapes=({1: ROWS},))
    watched = ("aten.view_copy.default", "aten.expand_copy.default", "aten._softmax.default")
    found = [one.operator for one in plan(program, "xnnpack").methods[0].host]
    assert sorted(one for one in found if one in watched) == host
    loaded = load(lower(program, "xnnpack").emit().buffer)
    for rows in (1, 2, 5, 40):
        x = torch.randn(2, rows, 8)
        expected = model(x)
        listed = [expected] if isinstance(expected, torch.Tensor) else [*expected]
        for got, wanted in zip(loaded.run("forward", x), listed, strict=True):
            torch.testing.assert_close(got, wanted)


def test_repeats_are_the_same_bits() -> None:
    model = Apply(lambda x: x[:, None].expand(-1, 3, -1).clone())
    found = versions(model, (torch.randn(6, 4),), [always(Repeats)], dynamic_shapes=({0: ROWS},))
    assert "aten.mul.Tensor" in found.after and "aten.expand_copy.default" not in found.after
    for rows in (1, 6, 40):
        x = torch.randn(rows, 4)
        x[0] = torch.tensor(ODD)
        found.check(x, exact=True)


def test_a_size_of_nothing() -> None:
    """-1 beside 0 means nothing; a dynamic size of 0 is inferred."""
    rows = Dim("rows", min=0, max=8)
    empty = Apply(lambda x: x[:, :0].view(x.shape[0], 2, 0).sin())
    found = versions(empty, (torch.randn(5, 4),), [InferredSizes()], dynamic_shapes=({0: rows},))
    assert found.before == found.after
    found.check(torch.randn(3, 4), exact=True)
    model = Apply(lambda x: x.sin().view(x.shape[0], 2, 2).cos())
    found = versions(model, (torch.randn(5, 4),), [InferredSizes()], dynamic_shapes=({0: rows},))
    assert len(found.after) == len(found.before) - 1  # without the size
    for count in (0, 1, 8):
        found.check(torch.randn(count, 4), exact=True)


def test_the_input_program_keeps_its_sizes() -> None:
    program = export(Attention().eval(), inputs(9), dynamic_shapes=({1: ROWS}, {1: ROWS}))
    before = str(program), str(program.range_constraints)
    lowered = lower(program, "xnnpack", options=LoweringOptions(rewrites=["inferred-sizes"]))
    assert (str(program), str(program.range_constraints)) == before
    value = lowered["forward"].graph.output_node().args[0][0].meta["val"]
    assert not isinstance(value.shape[1], int)
