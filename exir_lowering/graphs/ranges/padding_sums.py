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
    pointwise,
    rule,
)
from exir_lowering.graphs.ranges.transfers import dtype_of, shape_of

if TYPE_CHECKING:
    from exir_lowering.graphs.ranges.padding import Positions

_NEUTRAL = {"sum": ZERO, "any": ZERO, "linalg_vector_norm": ZERO, "all": ONE, "prod": ONE}


@rule(
    "sum", "mean", "amax", "amin", "max", "min", "any", "all", "prod", "var", "std", "argmax", "argmin", "logsumexp",
    "linalg_vector_norm",
)  # fmt: skip
def _reduce(at: Positions, node: Node) -> Pads | list[Pads]:
    source: Any = node.args[0]
    rank, base = len(shape_of(source) or ()), target_name(node.target).split(".")[1]
    if base in ("max", "min") and isinstance(argument(node, "other"), Node):
        return pointwise(at, node)
    given = argument(node, "dim")
    given = range(rank) if given is None or given == [] else [given] if isinstance(given, int) else given
    reduced = {dim % rank for dim in given}
    padded = [dim for dim in at.dims(source) if dim in reduced]
    if padded:
        _check_neutral(at, node, base, padded)
    values = node.meta["val"]
    several = values if isinstance(values, (tuple, list)) else [values]
    kept = len(several[0].shape) == rank
    places = {dim: dim if kept else dim - sum(each < dim for each in reduced) for dim in at.dims(source)}
    found: Pads = {}
    if not padded:  # else what is padded in two dimensions is among the terms
        found = {places[dim]: each for dim, each in _each(at, node, source).items()}
    return [found, *({} for _ in several[1:])] if isinstance(values, (tuple, list)) else found


def _check_neutral(at: Positions, node: Node, base: str, padded: Sequence[int]) -> None:
    """Check that what is padded does not count in a reduction."""
    source: Any = node.args[0]
    what = f"it goes over dimension {padded[0]}, which is padded"
    if len(padded) > 1:
        raise MixedError("it goes over several padded dimensions")
    found = at.pad(source, padded[0])
    if base in ("mean", "var", "std"):
        advice = "Divide a sum by the number of what counts, such as the sum of the mask, instead of taking the mean."
        raise MixedError(what, advice)
    if base == "sum" and found != ZERO and not found.nan:
        raise MixedError(f"{what} with other numbers than 0", "Multiply by the mask before.")
    if base in _NEUTRAL and found == _NEUTRAL[base] and (argument(node, "ord") or 1) > 0:
        return
    if base == "amax" and not found.nan and found.high <= at.whole(source).low:
        return
    if base == "amin" and not found.nan and found.low >= at.whole(source).high:
        return
    raise MixedError(f"{what} with numbers that may count")


@rule("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax")
def _softmax(at: Positions, node: Node) -> Pads:
    source: Any = node.args[0]
    dim = dim_of(node, "dim", source)
    if dim not in at.dims(source):
        return _each(at, node, source)
    if at.pad(source, dim).high != -math.inf or at.pad(source, dim).nan:
        raise MixedError(
            f"it goes over dimension {dim}, which is padded with scores that are not known to be -inf",
            "Mask what is padded by -inf, with a mask that is an input, or use scaled_dot_product_attention.",
        )
    # Where the kept part of a row is NaN, or -inf, the padded part is NaN too.
    return {} if "log" in target_name(node.target) else {dim: Range(0.0, 0.0, at.whole(node).nan)}


@rule("layer_norm")
def _layer_norm(at: Positions, node: Node) -> Pads:
    source, shape = node.args[:2]
    first = len(shape_of(source) or ()) - len(shape)  # type: ignore[arg-type]
    if any(dim >= first for dim in at.dims(source)):
        raise MixedError("it normalises over a padded dimension")
    return _each(at, node, source)


def _each(at: Positions, node: Node, source: Any) -> Pads:
    return by_dimension(
        at, node, at.dims(source), lambda each, dim: at.pad(each, dim) if each is source else at.whole(each)
    )


@rule("cumsum", "cumprod", "cummax", "cummin", "diff")
def _running(at: Positions, node: Node) -> Pads | list[Pads]:
    """Each element depends on those before it."""
    if "diff" in target_name(node.target):
        dim = dim_of(node, "dim", node, -1)
        ahead, n = argument(node, "prepend"), argument(node, "n")
        if n not in (None, 1) or argument(node, "append") is not None or dim in at.dims(ahead):
            raise MixedError("it puts something behind what is padded")
    values = node.meta["val"]
    return [{} for _ in values] if isinstance(values, (tuple, list)) else {}


@rule("index_put", "index_copy", "scatter", "slice_scatter", "select_scatter", "index_add", sized=True)
def _write(at: Positions, node: Node) -> Pads:
    raise MixedError("it writes what is padded, too")


# -- products of matrices, attention, convolutions ---------------------------------------------------------------------


@rule("linear", "matmul", "mm", "bmm", "addmm", "baddbmm")
def _product(at: Positions, node: Node) -> Pads:
    base = target_name(node.target).split(".")[1]
    one, other = node.args[1:3] if base in ("addmm", "baddbmm") else node.args[:2]
    bias = node.args[0] if base in ("addmm", "baddbmm") else argument(node, "bias") if base == "linear" else None
    ranks = [len(shape_of(each) or ()) for each in (one, other)]
    if min(ranks) < 2 or one is other or bias in (one, other):
        raise MixedError("it multiplies what is not two matrices")
    inner, columns = (ranks[1] - 1, ranks[1] - 2) if base == "linear" else (ranks[1] - 2, ranks[1] - 1)
    summed = at.dims(one).get(ranks[0] - 1)
    if summed != at.dims(other).get(inner):
        raise MixedError("it sums over dimensions of different sizes")
    if summed is not None:
        _check_terms(at.pad(one, ranks[0] - 1), at.pad(other, inner))
        return {}
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


def _check_terms(one: Range, other: Range) -> None:
    """Check that products of padded elements are 0."""
    for zero, factor in ((one, other), (other, one)):
        if zero == ZERO and factor.finite and not factor.nan:
            return
    if ZERO in (one, other):
        raise MixedError(
            "it sums over a padded dimension, where 0 meets what may be infinite or NaN",
            'assume={"input": "finite"} says that an input is finite.',
        )
    raise MixedError("it sums over a padded dimension")


@rule("scaled_dot_product_attention")
def _attention(at: Positions, node: Node) -> Pads:
    query, key, value = node.args[:3]
    mask, causal = argument(node, "attn_mask"), bool(argument(node, "is_causal"))
    rank = len(shape_of(query) or ())
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


@rule(
    "convolution", "conv1d", "conv2d", "conv3d", "max_pool2d", "max_pool1d", "avg_pool2d", "avg_pool1d", "group_norm",
    "adaptive_avg_pool2d", "adaptive_avg_pool1d", "max_pool2d_with_indices", "batch_norm",
    "_native_batch_norm_legit_no_training", "native_group_norm",
)  # fmt: skip
def _by_sample(at: Positions, node: Node) -> Pads | list[Pads]:
    """Samples of a batch are apart; positions are not."""
    source: Any = node.args[0]
    others = [each for each in node.all_input_nodes if each is not source]
    if set(at.dims(source)) - {0} or any(map(at.dims, others)):
        raise MixedError("it mixes positions of an image or a sequence")
    if argument(node, "training"):
        raise MixedError("it normalises over the batch, which is padded")
    values = node.meta["val"]
    return [{} for _ in values] if isinstance(values, (tuple, list)) else _each(at, node, source)
