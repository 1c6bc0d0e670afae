"""Values that depend on nothing but constants, computed once, ahead of time."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.fx import Node

from exir_lowering.graphs import is_getitem
from exir_lowering.graphs.operators.purity import only_computes
from exir_lowering.plugins import Doubt, Rewrite, Scope
from exir_lowering.rewrites.node_facts import MOVEMENTS, call_key, calls, is_quantisation, static_shape, tensor_of

_GROWTH = 1 << 18  # bytes by which every method may grow
_SHARE = 50  # the part of its weights by which a method may grow besides: one of so many
_CONE = 256  # how many nodes are looked at, to find the constants that one replaces

_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
_TRANSPOSITION = "aten.permute_copy.default"


class Constants(Rewrite):
    """Replaces values that are known at lowering by constants: masks, positions, tables of cosines.

    It is computed by PyTorch's kernels, as in eager mode; those of the file may round otherwise. What is known depends
    on neither inputs nor state that the program changes, and has fixed sizes; operators with effects are not computed.

    So that files do not grow, a method gets at most 256 KB and 2 % of its weights larger, less the weights that
    nothing needs any more, as those of a layer with weight normalisation, or the packed ones of an attention that
    splits them. Only the last known values of a computation become constants.

    Backends look for weights under transpositions, and quantised ones under their operators: operators that only move
    elements of a stored floating-point tensor are left alone, and so are permutations of others, and everything near
    operators of quantisation. Values that a method returns stay computed.
    """

    name = "constants"
    operators = ("*",)
    exactness = "tolerance"

    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Return the constant for a value that is known, unless all that use it become constants themselves."""
        number = _number(node, scope)
        if number is None or all(_is_foldable(user, scope) for user in node.users):
            return None
        if number in scope.memory and not (scope.is_returned(node) or any(map(is_quantisation, node.users))):
            return scope.memory[number]  # type: ignore[no-any-return]
        if not _is_foldable(node, scope):
            return None
        content, value = scope.ranges.constant(node), tensor_of(node)
        if content is None or value is None or content.dtype is not value.dtype or content.stride() != value.stride():
            return None
        if content.device.type != "cpu":
            return None
        grown = content.nbytes - _freed(node, scope)
        if grown > _left(node, scope):
            return None
        scope.memory["left"] = _left(node, scope) - max(grown, 0)
        constant = scope.constant(content.detach().clone(memory_format=torch.preserve_format))
        scope.memory[number] = constant  # also for equal values for which there is no room any more
        return constant


def _number(node: Node, scope: Scope) -> int | None:
    """Return a number that equal computations from the same constants, which may be gone, share; else None."""
    if not only_computes(node) or not all(_is_known(operand, scope) for operand in node.all_input_nodes):
        return None
    key = call_key(node, lambda operand: scope.memory.get(("number", operand), operand))
    if key is None:
        return None
    numbers: dict[Hashable, int] = scope.memory.setdefault("numbers", {})
    number = numbers.setdefault(key, len(numbers))
    scope.memory["number", node] = number
    return number


def _is_foldable(node: Node, scope: Scope) -> bool:
    """Return whether a node can be replaced by a constant."""
    known = scope.memory.get(node)
    if known is None:
        known = scope.memory[node] = _may_fold(node, scope)
    return bool(known)


def _may_fold(node: Node, scope: Scope) -> bool:
    value, shape = tensor_of(node), static_shape(node)
    if value is None or shape is None or 0 in shape or value.dtype not in _DTYPES or value.is_sparse:
        return False
    if not only_computes(node) or scope.is_returned(node) or _is_weight(node) or _near_quantisation(node, scope):
        return False
    if not all(_is_known(operand, scope) for operand in node.all_input_nodes):
        return False
    size, left = _bytes(node), _left(node, scope)
    return (size <= left or size - _freed(node, scope) <= left) and _is_known(node, scope)


def _is_known(node: Node, scope: Scope) -> bool:
    """Return whether a value is known; of several results, whether one is."""
    return any(scope.ranges.constant(one) is not None for one in (node, *filter(is_getitem, node.users)))


def _left(node: Node, scope: Scope) -> int:
    """Return the bytes by which a method may still grow."""
    if "left" not in scope.memory:
        inputs = [each for each in node.graph.nodes if each.op == "placeholder" and _is_known(each, scope)]
        scope.memory["left"] = _GROWTH + sum(map(_bytes, inputs)) // _SHARE
    return int(scope.memory["left"])


def _bytes(node: Node) -> int:
    value = tensor_of(node)
    return value.numel() * value.element_size() if value is not None and static_shape(node) is not None else 0


def _is_weight(node: Node) -> bool:
    """Return whether a node is a form of a weight that backends look for."""
    value = tensor_of(node)
    if value is None or not value.is_floating_point():
        return False
    if calls(node, _TRANSPOSITION):
        return True
    operand: object = node
    while calls(operand, *MOVEMENTS):
        operand = operand.args[0]
    return isinstance(operand, Node) and operand.op in ("placeholder", "get_attr")


def _near_quantisation(node: Node, scope: Scope) -> bool:
    """Return whether a node's value depends on, or is given to, operators of quantisation."""
    if any(is_quantisation(user) for user in node.users):
        return True
    key = ("quantised", node)
    if key not in scope.memory:
        operands = node.all_input_nodes
        scope.memory[key] = is_quantisation(node) or any(
            scope.memory.get(("quantised", each), False) for each in operands
        )
    return bool(scope.memory[key])


def _freed(node: Node, scope: Scope) -> int:
    """Return the bytes of the stored tensors that nothing needs any more once a node is a constant.

    Of what several pieces of a tensor free together, as those of packed weights, each has a part by its size.
    """
    pieces = [*node.args[0].users] if is_getitem(node) else [node]  # type: ignore[union-attr]
    if any(scope.is_returned(each) or any(map(is_quantisation, each.users)) for each in pieces):
        pieces = [node]
    dead, pending, freed = set(pieces), pieces[:1], 0
    while pending and len(dead) < _CONE:
        for operand in pending.pop().all_input_nodes:
            if operand in dead or scope.is_returned(operand) or not dead.issuperset(operand.users):
                continue
            dead.add(operand)
            pending.append(operand)
            freed += _bytes(operand) if operand.op == "placeholder" else 0
    return freed * _bytes(node) // max(1, sum(map(_bytes, pieces)))
