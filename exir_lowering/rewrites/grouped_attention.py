"""Grouped-query attention without copies of keys and values: the queries of a group are rows of one product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import call_again, calls, is_contiguous, same_layout, static_shape, tensor_of

_BMM, _EXPAND = "aten.bmm.default", "aten.expand_copy.default"
_VIEW, _PERMUTE = "aten.view_copy.default", "aten.permute_copy.default"
_BY_ELEMENT = (
    "aten.mul.Tensor",
    "aten.mul.Scalar",
    "aten.div.Tensor",
    "aten.div.Scalar",
    "aten.clone.default",
    "dim_order_ops._clone_dim_order.default",
    "dim_order_ops._to_dim_order_copy.default",
)
"""Operators that compute each element from one element, if their other operand is a number or has one element."""


class GroupedAttention(Rewrite):
    """Replaces `bmm(q, f(expand(x)))`, which repeats each matrix of `f(x)`, by `bmm` with the matrices themselves.

    Where several heads of queries share a head of keys, models repeat that `repeats` times: the matrices of the product
    are `(group, repeat)`, and the second operand is the same for all repeats. `f` may view, permute, copy, convert, and
    multiply or divide by one number. The repeats of `q`, which lie one after another, become rows of one matrix:
    `[groups * repeats, length, depth]` viewed as `[groups, repeats * length, depth]`; and so does the result.

    That is exact: each element of the result is the product of the same row and column as before. Kernels may sum it
    in another order, as they choose by the number of rows, which is a matter of rounding. It holds for every dtype,
    for infinities and NaN. All sizes have to be known, and not 0; the repeats have to be found, by following one
    dimension through the views, as the fastest part of the first dimension.
    """

    name = "grouped-attention"
    operators = (_BMM,)
    exactness = "tolerance"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return the product with matrices that are not repeated."""
        queries, repeated = node.args[:2]
        chain = _find_chain(repeated)
        shape = static_shape(queries)
        if chain is None or shape is None or not isinstance(queries, Node) or static_shape(node) is None:
            return None
        axis = _follow(chain)
        value = tensor_of(queries)
        if axis is None or axis.position != 0 or axis.inner != 1 or value is None or not value.is_contiguous():
            return None
        matrices = _repeat_nothing(chain, scope)
        if matrices is None:
            return None
        groups, (_, length, depth) = axis.outer, shape
        rows = scope.call(_VIEW, queries, [groups, axis.repeats * length, depth])
        product = scope.call(_BMM, rows, matrices)
        result = scope.call(_VIEW, product, list(static_shape(node) or ()))
        return result if same_layout(result, node) else None


@dataclass(frozen=True, slots=True)
class _Axis:
    """A dimension whose index is (outer, repeat, inner), of which nothing depends on the repeat."""

    position: int  # which dimension it is
    repeats: int  # at least 2
    outer: int = 1  # the number of indices before the repeat
    inner: int = 1  # and behind it


def _find_chain(node: object) -> list[Node] | None:
    """Return the nodes from an expansion to a node, in their order; None if there is no expansion."""
    chain: list[Node] = []
    while calls(node, _EXPAND, _VIEW, _PERMUTE, *_BY_ELEMENT):
        if 0 in (static_shape(node) or (0,)) or tensor_of(node.args[0]) is None:
            return None
        chain.append(node)
        if calls(node, _EXPAND):
            return chain[::-1]
        if not _is_of_one_tensor(node):
            return None
        node = node.args[0]
    return None


def _is_of_one_tensor(node: Node) -> bool:
    """Return whether operands behind the first have one element, and not more dimensions than it."""
    rank = len(static_shape(node.args[0]) or ())
    if sum(argument is node.args[0] for argument in node.args) > 1:
        return False
    shapes = [static_shape(other) for other in node.all_input_nodes if other is not node.args[0]]
    return all(shape is not None and math.prod(shape) == 1 and len(shape) <= rank for shape in shapes)


def _follow(chain: Sequence[Node]) -> _Axis | None:
    """Return where the repeats of an expansion are at the end of a chain."""
    axis = _expanded(chain[0])
    for node in chain[1:]:
        if axis is None:
            return None
        if calls(node, _PERMUTE):
            order: Any = node.args[1]
            axis = replace(axis, position=[dim % len(order) for dim in order].index(axis.position))
        elif calls(node, _VIEW):
            axis = _viewed(axis, static_shape(node.args[0]) or (), static_shape(node) or ())
    return axis


def _expanded(node: Node) -> _Axis | None:
    """Return the one dimension that an expansion repeats."""
    before, after = static_shape(node.args[0]), static_shape(node)
    if before is None or after is None or len(before) != len(after):
        return None
    grown = [dim for dim, sizes in enumerate(zip(before, after, strict=True)) if sizes[0] != sizes[1]]
    return _Axis(grown[0], after[grown[0]]) if len(grown) == 1 else None


def _viewed(axis: _Axis, before: Sequence[int], after: Sequence[int]) -> _Axis | None:
    """Return where repeats are after a view, if one dimension of the new shape holds them as a whole."""
    # Elements keep their order, in which a repeat covers `block` elements.
    block = axis.inner * math.prod(before[axis.position + 1 :])
    for position, size in enumerate(after):
        smallest = math.prod(after[position + 1 :])
        if smallest <= block < smallest * size:
            inner, rest = divmod(block, smallest)
            outer, split = divmod(size, inner * axis.repeats)
            return _Axis(position, axis.repeats, outer, inner) if rest == split == 0 else None
    return None


def _repeat_nothing(chain: Sequence[Node], scope: Scope) -> Node | None:
    """Return the result of a chain behind its expansion, without the repeats; None if a view of it is not possible."""
    current = chain[0].all_input_nodes[0]
    for index, node in enumerate(chain[1:], start=1):
        rest: tuple[Any, ...] = ()
        if calls(node, _VIEW):
            if not is_contiguous(current):
                return None
            axis = _follow(chain[: index + 1])
            shape = list(static_shape(node) or ())
            if axis is not None:
                shape[axis.position] = axis.outer * axis.inner
            rest = (shape,)
        current = call_again(scope, node, current, *rest)
    return current
