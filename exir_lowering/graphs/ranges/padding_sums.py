"""What operators that sum do with padded positions: reductions, products of matrices, attention, convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from exir_lowering.graphs.operators.names import argument, target_name
from exir_lowering.graphs.ranges.intervals import Range, multiply, point, total
from exir_lowering.graphs.ranges.padding_rules import (
    ONE,
    ZERO,
    MixedError,
    Pads,
    by_dimension,
    dim_of,
    rule,
)
from exir_lowering.graphs.ranges.transfers import dtype_of, shape_of

if TYPE_CHECKING:
    from exir_lowering.graphs.ranges.padding import Positions

_FAR = 1000.0
"""Of two numbers that are so far apart, a softmax makes zero of the smaller one, in any type."""

_SOFTMAX_ADVICE = (
    "Use scaled_dot_product_attention, with a mask that is an input, or give a mask that hides by numbers below -1000 "
    'and pass assume={"mask": "finite_rows"} if no row of it is entirely 0.'
)
_NEUTRAL = {"sum": ZERO, "any": ZERO, "all": ONE}


@rule("sum", "mean", "amax", "amin", "any", "all", "var", "argmax")
def _reduce(at: Positions, node: Node) -> Pads:
    source: Any = node.args[0]
    rank = len(shape_of(source) or ())
    given = argument(node, "dim")
    given = range(rank) if given is None or given == [] else [given] if isinstance(given, int) else given
    reduced = {dim % rank for dim in given}
    padded = [dim for dim in at.dims(source) if dim in reduced]
    if padded:  # what is padded in two dimensions is among the terms
        _check_neutral(at, node, padded)
        return {}
    kept = len(shape_of(node) or ()) == rank
    return {dim - (not kept) * sum(one < dim for one in reduced): e for dim, e in _each(at, node, source).items()}


def _check_neutral(at: Positions, node: Node, padded: Sequence[int]) -> None:
    """Check that what is padded does not count in a reduction."""
    source, base = node.args[0], target_name(node.target).split(".")[1]
    what = f"it goes over dimension {padded[0]}, which is padded"
    if len(padded) > 1:
        raise MixedError("it goes over several padded dimensions")
    found = at.pad(source, padded[0])
    if base in ("mean", "var"):
        raise MixedError(what, "Divide a sum by the number of what counts, such as the sum of the mask.")
    if base == "sum" and found != ZERO and not found.nan:
        raise MixedError(f"{what} with other numbers than 0", "Multiply by the mask before.")
    if base not in _NEUTRAL or found != _NEUTRAL[base]:
        raise MixedError(f"{what} with numbers that may count")


@rule("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax", "layer_norm")
def _normalise(at: Positions, node: Node) -> Pads:
    source: Any = node.args[0]
    rank = len(shape_of(source) or ())
    shape: Any = argument(node, "normalized_shape")
    over = range(rank - len(shape), rank) if shape is not None else [dim_of(node, "dim", source)]
    if found := [dim for dim in over if dim in at.dims(source)]:
        if shape is None and (hidden := _hidden(at, node, source, found[0])) is not None:
            return {found[0]: hidden}
        advice = "" if shape is not None else _SOFTMAX_ADVICE
        raise MixedError(f"it goes over dimension {found[0]}, which is padded", advice)
    return _each(at, node, source)


def _hidden(at: Positions, node: Node, source: Any, dim: int) -> Range | None:
    """Return the range of the padded terms of a softmax, if kept ones are so much greater that padded ones are zero."""
    pad, name = at.pad(source, dim), target_name(node.target).split(".")[1]
    if pad.nan or name not in ("softmax", "_softmax", "_safe_softmax") or dtype_of(source) is not dtype_of(node):
        return None
    nothing = name == "_safe_softmax" and pad.high == -math.inf  # an element like the kept ones where all are -inf
    return Range(0.0, 0.0, at.whole(node).nan) if nothing or at.rows.floor(source, dim) - pad.high > _FAR else None


def _each(at: Positions, node: Node, source: Any) -> Pads:
    return by_dimension(
        at, node, at.dims(source), lambda each, dim: at.pad(each, dim) if each is source else at.whole(each)
    )


# -- products of matrices, attention, convolutions ---------------------------------------------------------------------


@rule("linear", "matmul", "mm", "bmm")
def _product(at: Positions, node: Node) -> Pads:
    base = target_name(node.target).split(".")[1]
    (one, other), bias = node.args[:2], argument(node, "bias") if base == "linear" else None
    ranks = [len(shape_of(each) or ()) for each in (one, other)]
    if min(ranks) < 2 or one is other or bias in (one, other):
        raise MixedError("it multiplies what is not two matrices")
    inner, columns = (ranks[1] - 1, ranks[1] - 2) if base == "linear" else (ranks[1] - 2, ranks[1] - 1)
    if ranks[0] - 1 in at.dims(one) or inner in at.dims(other):
        pads = [at.pad(one, ranks[0] - 1), at.pad(other, inner)]
        if ZERO not in pads or not all(each.finite and not each.nan for each in pads):
            raise MixedError("it sums over a padded dimension")
        return {}  # products with zeros add nothing
    rank = len(shape_of(node) or ())

    def region(each: Any, back: int) -> Range:
        if each is bias:
            return at.aligned(each, back)
        if each is one:
            return at.whole(each) if back == -1 else at.aligned(each, back)
        if back == -1:
            return at.pad(each, columns)
        return at.whole(each) if back == -2 or base == "linear" else at.aligned(each, back)

    return by_dimension(at, node, at.dims(node), lambda each, dim: region(each, dim - rank))


@rule("scaled_dot_product_attention")
def _attention(at: Positions, node: Node) -> Pads:
    query, key, value = node.args[:3]
    mask, causal = argument(node, "attn_mask"), bool(argument(node, "is_causal"))
    rank = len(shape_of(query) or ())
    others = [len(shape_of(each) or ()) for each in (key, value)]
    if others != [rank, rank]:
        raise MixedError("its operands have different numbers of dimensions")
    if any(rank - 1 in at.dims(each) for each in (query, key)) or argument(node, "dropout_p"):
        raise MixedError("it sums over a padded dimension")
    size = at.dims(key).get(rank - 2)
    if size is None:
        return {}
    if mask is None and not (causal and at.dims(query).get(rank - 2) == size):
        raise MixedError(
            "it attends to padded positions, as it has no mask", "Give the model a mask that is an input, or is_causal."
        )
    if mask is not None:
        hidden = at.aligned(mask, -1)
        low = hidden == ZERO if dtype_of(mask) is torch.bool else (hidden.high == -math.inf and not hidden.nan)
        if len(shape_of(mask) or ()) < 1 or at.dims(mask).get(len(shape_of(mask) or ()) - 1) != size or not low:
            raise MixedError("its mask is not known to hide padded positions")
    scale = float(argument(node, "scale") or 1.0)
    scores = multiply(total(multiply(at.whole(query), at.pad(key, rank - 2)), 1e6, torch.float32), point(scale))
    values = at.pad(value, rank - 2)
    if not scores.finite or scores.nan or not values.finite or values.nan:
        raise MixedError(
            "what it hides, where it is padded, may be infinite or NaN",
            'assume={"input": "finite"} says that an input is finite.',
        )
    return {}
