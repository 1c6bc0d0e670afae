"""Attention without the safe softmax where rows are proven, with a factor where not; fully masked rows are 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting_support import bits, versions
from torch import nn
from torch.export import export
from torch.nn.functional import scaled_dot_product_attention as attention

import exir_lowering
from exir_lowering import InputError, LoweringOptions
from exir_lowering.rewrites import Identity, RowFactors, SafeSoftmax

INF, NAN = float("inf"), float("nan")


class Attention(nn.Module):
    """Attention behind a layer norm, which bounds its scores."""

    def __init__(self, mask: Callable[..., dict[str, Any]] = lambda *inputs: {}, normal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8) if normal else nn.Identity()
        self.queries, self.keys, self.values = (nn.Linear(8, 8) for _ in range(3))
        self.mask = mask

    def forward(self, x: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = [one(y).view(1, -1, 2, 4).transpose(1, 2) for one in (self.queries, self.keys, self.values)]
        return attention(*heads, **self.mask(*inputs))


X = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
HOSTILE = [
    torch.full((1, 5, 8), NAN),
    torch.full((1, 5, 8), INF),
    torch.tensor([[[NAN] * 8, [1.0] * 8, [-INF] * 8, [3e38] * 8, [1e-40] * 8]]),
]
MASKED = torch.tensor([[True] * 5, [False] * 5, [True, False] * 2 + [False], [False] * 4 + [True], [True] * 5])


@pytest.mark.parametrize(
    "mask",
    [
        lambda: {},
        lambda: {"is_causal": True},
        lambda: {"attn_mask": torch.tril(torch.ones(5, 5, dtype=torch.bool))},
        lambda: {"attn_mask": torch.where(torch.tril(torch.ones(5, 5)) == 1, 0.0, -INF)},
        lambda: {"attn_mask": torch.full((5, 5), torch.finfo(torch.float32).min)},
    ],
)
def test_rows_that_are_proven_have_a_plain_softmax(mask: Callable[..., dict[str, Any]]) -> None:
    found = versions(Attention(mask), (X,), [SafeSoftmax])
    assert "aten.any.dim" in found.before
    assert not {"aten.any.dim", "aten.full_like.default"} & {*found.after}
    for x in (X, torch.randn(1, 5, 8) * 100, *HOSTILE):
        found.check(x, exact=True)


class Shifted(nn.Module):
    """What windows of Swin do: a layer norm whose results move before they are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).roll(2, 1).gather(1, torch.tensor([4, 0, 1, 3, 2]).view(1, 5, 1).expand(1, 5, 8))


def test_what_is_moved_by_indices_stays_bounded() -> None:
    model = Attention()
    model.norm = Shifted()
    found = versions(model, (X,), [SafeSoftmax])
    assert "aten.index_select.default" in found.after and "aten.gather.default" in found.after
    assert "aten.any.dim" in found.before and "aten.any.dim" not in found.after
    for x in (X, *HOSTILE):
        found.check(x, exact=True)


def test_a_mask_of_unknown_content_is_a_factor_for_rows() -> None:
    """Also in rows that are fully masked, whose result is 0."""
    found = versions(Attention(lambda mask: {"attn_mask": mask}), (X, MASKED), [SafeSoftmax])
    assert "aten.eq.Scalar" in found.before and "aten.eq.Scalar" not in found.after
    for mask in (MASKED, torch.zeros(5, 5, dtype=torch.bool), torch.ones(5, 5, dtype=torch.bool)):
        for x in (X, *HOSTILE):
            found.check(x, mask, exact=True)
    assert not found.rewritten.run("forward", X, MASKED)[0][0, :, 1].any()


@pytest.mark.parametrize("values", [lambda x: x, lambda x: x * INF, lambda x: x * 1e37])
def test_the_factor_comes_behind_the_product(values: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Scaled(Attention):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            queries, keys = (one(y).view(1, -1, 2, 4).transpose(1, 2) for one in (self.queries, self.keys))
            return attention(queries, keys, values(x.view(1, -1, 2, 4)).transpose(1, 2), attn_mask=mask)

    chosen = [Identity, SafeSoftmax]
    after = versions(Scaled(), (X, MASKED), [*chosen, RowFactors])
    program = export(Scaled().eval(), (X, MASKED))
    options = LoweringOptions(rewrites=[*chosen, RowFactors])
    found = exir_lowering.plan(program, options=options).methods[0].rewritings
    assert [one.operators[0] for one in found if one.rewrite == "row-factors"] == ["aten.bmm.default"]
    for mask in (MASKED, torch.zeros(5, 5, dtype=torch.bool), torch.ones(5, 5, dtype=torch.bool)):
        for x in (X, *HOSTILE):
            after.check(x, mask)


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        (lambda hidden: torch.zeros(5).masked_fill(hidden, -INF).view(1, 1, 1, 5).expand(1, 2, 5, 5), (5,)),
        (lambda hidden: torch.zeros(5, 5).masked_fill(hidden, -INF).t(), (5, 5)),
        (lambda hidden: torch.ones(5, 5).masked_fill(hidden, -INF)[None].clone(), (5, 5)),
        (lambda hidden: torch.zeros(7, 5).masked_fill(hidden, -INF)[2:], (7, 5)),
    ],
)
def test_masks_the_other_way_round_that_are_moved(mask: Callable[..., Any], shape: tuple[int, ...]) -> None:
    """As those of padding that `torch.nn.TransformerEncoder` makes."""
    hidden = torch.zeros(shape, dtype=torch.bool)
    found = versions(Attention(lambda hidden: {"attn_mask": mask(hidden)}), (X, hidden), [SafeSoftmax])
    assert "aten.eq.Scalar" in found.before and "aten.eq.Scalar" not in found.after
    some = hidden.clone()
    some[-2:] = True
    for given in (hidden, some, ~hidden):
        for x in (X, *HOSTILE):
            found.check(x, given, exact=True)


def test_raw_scores_name_the_input_that_is_not_bounded() -> None:
    (method,) = exir_lowering.plan(export(Attention(normal=False).eval(), (X,))).methods
    (refused,) = (one for one in method.refused_rewrites if one.rewrite == "safe-softmax")
    assert "x is an input of the model" in refused.reason and 'assume={"x": "finite"}' in refused.advice


def test_a_float_mask_is_refused_unless_its_rows_are_promised() -> None:
    model = Attention(lambda mask: {"attn_mask": mask})
    mask = torch.where(MASKED, 0.0, -INF)
    found = versions(model, (X, mask), [SafeSoftmax])
    assert found.before == found.after
    found.check(X, mask, exact=True)
    assert not found.rewritten.run("forward", X, mask)[0][0, :, 1].any()
    program = export(model.eval(), (X, mask))
    (method,) = exir_lowering.plan(program).methods
    (refused,) = (one for one in method.refused_rewrites if one.rewrite == "safe-softmax")
    (name,) = (spec.arg.name for spec in program.graph_signature.input_specs[-1:])
    assert f'assume={{"{name}": "finite_rows"}}' in refused.advice and "input of the model" in refused.reason
    assert "test_safe_softmax.py" in refused.source
    promised = LoweringOptions(assume={name: "finite_rows"})
    lowered = exir_lowering.lower(program, options=promised)
    assert not any("eq.Scalar" in str(node.target) for node in lowered["forward"].graph.nodes)
    mask[1] = 0.0
    got = exir_lowering.load(lowered.emit().buffer).run("forward", X, mask)[0]
    torch.testing.assert_close(got, model(X, mask))


def test_a_constant_mask_with_a_row_that_is_fully_masked_is_refused() -> None:
    mask = torch.where(MASKED, 0.0, -INF)
    found = versions(Attention(lambda: {"attn_mask": mask}), (X,), [SafeSoftmax])
    assert "aten.eq.Scalar" in found.after
    found.check(X, exact=True)
    assert not found.rewritten.run("forward", X)[0][0, :, 1].any()


def test_scores_that_may_be_infinite_keep_it() -> None:
    found = versions(Attention(normal=False), (X,), [SafeSoftmax])
    assert found.before == found.after
    for x in (X, *HOSTILE, torch.full((1, 5, 8), -INF)):
        found.check(x, exact=True)


def test_assumptions_are_checked() -> None:
    program = export(Attention().eval(), (X,))
    with pytest.raises(InputError, match=r"no method has an input 'mask'; they have forward: x"):
        exir_lowering.lower(program, options=LoweringOptions(assume={"mask": "finite_rows"}))
    with pytest.raises(InputError, match="finite_rows"):
        LoweringOptions(assume={"x": "positive"})
    bounded = exir_lowering.lower(
        export(Attention(normal=False).eval(), (X,)), options=LoweringOptions(assume={"x": "finite"})
    )
    assert not any("eq.Scalar" in str(node.target) for node in bounded["forward"].graph.nodes)


def look_alikes() -> list[Any]:
    """Return what is almost a safe softmax."""
    inf = -INF

    def safe(x: torch.Tensor, hidden: float = inf, dim: int = -1, other: float = 0.0, swap: bool = False) -> Any:
        plain = torch.softmax(x, -1)
        empty = ~(~(x == hidden)).any(dim, keepdim=True)
        return torch.where(empty, plain, other) if swap else torch.where(empty, other, plain)

    return [
        lambda x: safe(x, hidden=INF),
        lambda x: safe(x, dim=0),
        lambda x: safe(x, other=1.0),
        lambda x: safe(x, swap=True),
        lambda x: torch.where(~(~(x[0] == inf)).any(-1, keepdim=True), 0.0, torch.softmax(x, -1)),
    ]


def test_what_only_looks_like_one_is_left_alone() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [one(torch.tanh(x)) for one in look_alikes()]

    x = torch.randn(4, 4)
    found = versions(Model(), (x,), [SafeSoftmax])
    assert found.before == found.after and len(look_alikes()) == 5
    assert [*map(bits, found.plain.run("forward", x))] == [*map(bits, found.rewritten.run("forward", x))]


class Added(nn.Module):
    """A mask of unknown content, added to something of fewer dimensions."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.where(x > 0, x.clamp(-3, 3), -INF)
        result: torch.Tensor = torch.ops.aten._safe_softmax(mask + self.scores, -1)
        return result


@pytest.mark.parametrize("scores", [torch.tensor(0.5), torch.randn(5), torch.randn(3, 1)], ids=["()", "(5)", "(3, 1)"])
def test_scores_may_be_broadcast_to_the_mask(scores: torch.Tensor) -> None:
    x = torch.randn(2, 3, 5)
    x[0, 1], x[1, 2, 0] = -1.0, NAN
    found = versions(Added(scores), (x,), [SafeSoftmax])
    assert "aten.any.dim" in found.after and "aten.eq.Scalar" not in found.after
    found.check(x, exact=True)
