"""What operators do with padded positions: the rules of `padding`.

A rule returns the ranges of what is padded in its result, by dimension (what it leaves out is like the whole value), or
raises a `MixedError` if what is kept could change. A list has these for each of several results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import sympy
import torch
from torch.fx import Node

from exir_lowering._upstream.fakes import expression
from exir_lowering.graphs.operators.names import argument, target_name
from exir_lowering.graphs.ranges.intervals import Range, point, total
from exir_lowering.graphs.ranges.transfers import dim_of, dtype_of, rank_of, shape_of

if TYPE_CHECKING:
    from exir_lowering.graphs.ranges.padding import Positions

Pads: TypeAlias = "dict[int, Range]"
_Apply: TypeAlias = "Callable[[Positions, Node], Pads | list[Pads]]"

ZERO, ONE = Range(0.0, 0.0, False), Range(1.0, 1.0, False)


class MixedError(Exception):
    """A value is mixed; raised by the rule of an operator."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.reason, self.advice = reason, advice


_RULES: dict[str, tuple[_Apply, bool]] = {}


def rule(*names: str, sized: bool = False) -> Callable[[_Apply], _Apply]:
    """Register the rule of operators; `sized`: whether arguments may be padded sizes, as those of the result are."""

    def register(function: _Apply) -> _Apply:
        _RULES.update(dict.fromkeys(names, (function, sized)))
        return function

    return register


@lru_cache(maxsize=4096)
def rule_of(target: Any) -> tuple[_Apply, bool] | None:
    """Return the rule of an operator, and whether it may take padded sizes; None if nothing is known about it."""
    space, _, name = target_name(target).partition(".")
    base = name.partition(".")[0]
    tags = set(getattr(target, "tags", ()))
    if space not in ("aten", "quantized_decomposed"):
        return None
    plain = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return _RULES.get(base) or (_RULES[""] if plain else None)


def by_dimension(at: Positions, node: Node, dims: Iterable[int], region: Callable[[Any, int], Range]) -> Pads:
    """Return the ranges of a call for those that its operands have where each dimension is padded."""

    def lookup(dim: int) -> Callable[[Node], Range]:
        return lambda each: region(each, dim)

    return {dim: at.transfer(node, lookup(dim)) for dim in dims}


# -- elements at the same place ----------------------------------------------------------------------------------------

_SAME = ("clone", "alias", "detach", "lift_fresh_copy", "_to_copy", "add")


@rule(
    "", "clone", "alias", "detach", "lift_fresh_copy", "_to_copy", "__and__", "__or__", "masked_fill", "where", "copy",
    "quantize_per_tensor", "dequantize_per_tensor", "type_as",
)  # fmt: skip
def pointwise(at: Positions, node: Node) -> Pads:
    """Apply the rule of operators that compute each element from those at the same place."""
    rank, name = rank_of(node), target_name(node.target).split(".")[1]
    operands = [each for each in node.all_input_nodes if shape_of(each) is not None]
    dims = at.dims(node)
    for each in operands:
        for dim, size in at.dims(each).items():
            if dims.get(dim - rank_of(each) + rank) != size:
                raise MixedError("its operands have different sizes")
    found = by_dimension(at, node, dims, lambda each, dim: at.aligned(each, dim - rank))
    dtype = dtype_of(node)
    divides = name in ("div", "floor_divide", "remainder", "fmod") and not (dtype and dtype.is_floating_point)
    if divides and any(each.has_zero for each in at.padding(node.args[1])):
        raise MixedError("it may divide integers by zero where the input is padded")
    integers = all(dtype_of(each) in (torch.int64, torch.int32) for each in (node, node.args[0]))
    adds_zero = len(node.args) == 2 and bool(node.args[1] == 0) and not node.kwargs
    if name in _SAME and integers and (name != "add" or adds_zero):
        source = operands[0]
        at.counts[node] = {dim + rank - rank_of(source): e for dim, e in at.counts.get(source, {}).items()}
    return found


# -- views -------------------------------------------------------------------------------------------------------------


@rule("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", sized=True)
def _view(at: Positions, node: Node) -> Pads:
    source: Any = node.args[0]
    if target_name(node.target).startswith("aten.squeeze."):
        rank = rank_of(source)
        given: Any = range(rank) if len(node.args) < 2 else node.args[1]
        if any(dim % rank in at.dims(source) for dim in ([given] if isinstance(given, int) else given)):
            raise MixedError("it drops a dimension that is padded where its size is 1")
    if dtype_of(source) is not dtype_of(node):
        raise MixedError("it reads bits as another type")
    before, after = ([expression(size) for size in shape_of(each) or ()] for each in (source, node))
    found: Pads = {}
    at.counts[node] = {}
    for dim, size in at.dims(source).items():  # it stays as it is; what is fixed may be joined or split
        place = next(
            (one for one, each in at.dims(node).items() if each == size and _ahead(before, dim, after, one)), None
        )
        if place is None:
            raise MixedError("it joins a padded dimension with another one")
        found[place] = at.pad(source, dim)
        if dim in at.counts.get(source, {}):
            at.counts[node][place] = size
    if len(found) != len(at.dims(node)):
        raise MixedError("it makes a dimension of a padded size of other ones")
    return found


def _ahead(before: Sequence[Any], dim: int, after: Sequence[Any], place: int) -> bool:
    """Return whether two dimensions have as many elements ahead of them."""
    return bool(sympy.expand(sympy.Mul(*before[:dim]) - sympy.Mul(*after[:place])) == 0)


@rule("permute", "transpose", "t")
def _permute(at: Positions, node: Node) -> Pads:
    args: Any = node.args
    source = args[0]
    rank, base = rank_of(source), target_name(node.target).split(".")[1]
    order = [dim % rank for dim in args[1]] if base == "permute" else list(range(rank))
    if base != "permute":
        one, other = (dim % rank for dim in (args[1:3] if base == "transpose" else (0, rank - 1)))
        order[one], order[other] = other, one
    return {place: at.pad(source, dim) for place, dim in enumerate(order)}


@rule("expand", sized=True)
def _expand(at: Positions, node: Node) -> Pads:
    source: Any = node.args[0]
    return {dim: at.aligned(source, dim - rank_of(node)) for dim in at.dims(node)}


@rule("slice", sized=True)
def _slice(at: Positions, node: Node) -> Pads:
    source: Any = node.args[0]
    cut = dim_of(node, source)
    start, step = argument(node, "start"), argument(node, "step")
    start, step = 0 if start is None else start, 1 if step is None else step
    given, left, fixed = at.dims(source).get(cut), at.dims(node).get(cut), (shape_of(node) or ())[cut]
    if not isinstance(start, int) or not isinstance(step, int) or (start < 0 and (given is not None or left)):
        raise MixedError("it begins at a place that depends on the padded size")
    if given is not None and left is not None and not left.free_symbols <= given.free_symbols:
        raise MixedError("it takes as many elements as another input has, which may have more")
    if given is not None and left is None and start + (fixed - 1) * step >= at.least(given):
        raise MixedError("it takes elements that a small input does not have")
    found = {dim: at.pad(source, dim) for dim in at.dims(source) if dim != cut}
    if left is not None and given is not None:  # what is behind a smaller end is kept in the source
        rest = step == 1 and sympy.expand(given - start - left) == 0
        found[cut] = at.pad(source, cut) if rest else at.whole(source)
    return found


@rule("select")
def _select(at: Positions, node: Node) -> Pads:
    source: Any = node.args[0]
    cut, index = dim_of(node, source), argument(node, "index")
    if (size := at.dims(source).get(cut)) is not None and not (isinstance(index, int) and 0 <= index < at.least(size)):
        raise MixedError("it takes an element that is padded, or that a small input does not have")
    return {dim - (dim > cut): at.pad(source, dim) for dim in at.dims(source) if dim != cut}


@rule("split", "split_with_sizes", "chunk")
def _split(at: Positions, node: Node) -> list[Pads]:
    source: Any = node.args[0]
    cut = dim_of(node, source)
    if cut in at.dims(source):
        raise MixedError("it splits a padded dimension")
    return [{dim: at.pad(source, dim) for dim in at.dims(source)} for _ in node.meta["val"]]


@rule("cat")
def _cat(at: Positions, node: Node) -> Pads:
    tensors: Any = node.args[0]
    along = dim_of(node, node)
    if any(along in at.dims(each) for each in tensors):
        raise MixedError("it joins along a padded dimension")
    return by_dimension(at, node, at.dims(node), at.pad)


# -- made of sizes -----------------------------------------------------------------------------------------------------


@rule("full", "zeros", "ones", "new_full", "new_zeros", "new_ones", "full_like", "zeros_like", "ones_like", sized=True)
def _filled(at: Positions, node: Node) -> Pads:
    if at.sized(argument(node, "fill_value")):
        raise MixedError("it computes with the padded size itself")
    return {}


@rule("arange", sized=True)
def _arange(at: Positions, node: Node) -> Pads:
    start, step = argument(node, "start") or 0, argument(node, "step")
    if not isinstance(start, (int, float)) or not (step is None or isinstance(step, (int, float))):
        raise MixedError("it begins at a number that depends on the padded size")
    if start == 0 and step in (None, 1) and dtype_of(node) in (torch.int64, torch.int32):
        at.counts[node] = at.dims(node)
    return {}


# -- look-ups ----------------------------------------------------------------------------------------------------------


def _check_indices(at: Positions, index: Any, source: Any, dim: int, *, negative: bool = False) -> None:
    """Check that indices are within a dimension where they are padded, and do not count from an end that is padded."""
    size = (shape_of(source) or ())[dim]
    padded = at.dims(source).get(dim)
    if padded is not None and not at.whole(index).low >= 0:
        raise MixedError("an index may count from the end, which is padded")
    counted = padded is not None and list(at.counts.get(index, {}).items()) == list(at.dims(index).items())
    if counted and set(at.dims(index).values()) == {padded}:
        return  # it is its own place
    for found in at.padding(index):
        if not isinstance(size, int) or found.low < -size * negative or found.high >= size or found.nan:
            raise MixedError("where it is padded, an index may be outside of what it looks up")


@rule("embedding")
def _embedding(at: Positions, node: Node) -> Pads:
    weight, index = node.args[:2]
    if at.dims(weight):
        raise MixedError("its weight has a padded dimension")
    _check_indices(at, index, weight, 0)
    return {}


@rule("gather")
def _gather(at: Positions, node: Node) -> Pads:
    source, _, index = node.args[:3]
    if at.dims(source):
        raise MixedError("it looks up what is padded")
    _check_indices(at, index, source, dim_of(node, source))
    return {}


@rule("index")
def _index(at: Positions, node: Node) -> Pads:
    source: Any = node.args[0]
    indices: Any = node.args[1]
    if None in indices or {dtype_of(each) for each in indices} != {torch.int64}:
        raise MixedError("it picks elements in an order that is not understood")
    width = max(rank_of(each) for each in indices)
    places = []
    for dim, index in enumerate(indices):
        _check_indices(at, index, source, dim, negative=True)
        shift = width - rank_of(index)
        places += [(dim, place, place + shift, size) for place, size in at.dims(index).items()]
    found = {dim - len(indices) + width: at.pad(source, dim) for dim in at.dims(source) if dim >= len(indices)}
    for dim, place, result, size in places:  # where only the index of this dimension is padded, the element is too
        alone = sum(result == other for _, _, other, _ in places) == 1
        if alone and at.dims(source).get(dim) == size and at.counts.get(indices[dim], {}).get(place) == size:
            found[result] = at.pad(source, dim)
    return found


# -- reductions, softmax, normalisation --------------------------------------------------------------------------------

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
    rank = rank_of(source)
    given = argument(node, "dim")
    given = range(rank) if given is None or given == [] else [given] if isinstance(given, int) else given
    reduced = {dim % rank for dim in given}
    padded = [dim for dim in at.dims(source) if dim in reduced]
    if padded:  # what is padded in two dimensions is among the terms
        _check_neutral(at, node, padded)
        return {}
    kept = rank_of(node) == rank
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
    rank = rank_of(source)
    shape: Any = argument(node, "normalized_shape")
    over = range(rank - len(shape), rank) if shape is not None else [dim_of(node, source)]
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
    ranks = [rank_of(each) for each in (one, other)]
    if min(ranks) < 2 or one is other or bias in (one, other):
        raise MixedError("it multiplies what is not two matrices")
    inner, columns = (ranks[1] - 1, ranks[1] - 2) if base == "linear" else (ranks[1] - 2, ranks[1] - 1)
    if ranks[0] - 1 in at.dims(one) or inner in at.dims(other):
        pads = [at.pad(one, ranks[0] - 1), at.pad(other, inner)]
        if ZERO not in pads or not all(each.finite and not each.nan for each in pads):
            raise MixedError("it sums over a padded dimension")
        return {}  # products with zeros add nothing
    rank = rank_of(node)

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
    rank = rank_of(query)
    others = [rank_of(each) for each in (key, value)]
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
        if rank_of(mask) < 1 or at.dims(mask).get(rank_of(mask) - 1) != size or not low:
            raise MixedError("its mask is not known to hide padded positions")
    scale = float(argument(node, "scale") or 1.0)
    scores = total(at.whole(query) * at.pad(key, rank - 2), 1e6, torch.float32) * point(scale)
    values = at.pad(value, rank - 2)
    if not scores.finite or scores.nan or not values.finite or values.nan:
        raise MixedError(
            "what it hides, where it is padded, may be infinite or NaN",
            'assume={"input": "finite"} says that an input is finite.',
        )
    return {}
