"""The operators of nodes: their names as people write them, and facts from their schemas."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch.fx import Node

from exir_lowering._upstream import operators
from exir_lowering._upstream.operators import list_arguments, mutates_arguments

OUT_OF_SIGHT = "exir_lowering.out_of_sight.default"
"""Replaces an operator that a partitioner must not take, while it runs inside another partitioner."""


def operator_name(node: Node) -> str:
    """Return a node's operator as people write it, such as `aten.add.Tensor`."""
    return target_name(node.target)


_RETRACING = frozenset({"ExportedProgram.module()", "Interpreter_PropagateUnbackedSymInts"})
"""The names of the passes in which torch.export decomposes; other passes make nodes for other reasons."""


def origins(node: Node) -> list[str]:
    """Return the operators from which a node was decomposed, such as `aten.linear.default` for an addmm."""
    found: dict[str, None] = {}
    sources = list(node.meta.get("from_node") or ())
    while sources:
        source = sources.pop()
        if source.pass_name in _RETRACING:
            found[str(source.target)] = None
            sources += source.from_node
    return list(found)


@lru_cache(maxsize=8192)
def target_name(operator: Any) -> str:
    """Return an operator's name as people write it, such as `aten.add.Tensor`."""
    return operators.operator_name(operator)


@lru_cache(maxsize=1)
def known_operators() -> frozenset[str]:
    """Return the names of all operators that torch knew at the first call."""
    return operators.known_operators()


def is_mutating(node: Node) -> bool:
    """Return whether a node's operator writes into its arguments, according to its schema."""
    return mutates_arguments(node.target)


def argument(node: Node, name: str) -> Any:
    """Return what a node passes for an argument of its operator, by name; None if it passes nothing.

    Args:
        node: The node.
        name: The argument's name in the operator's schema.
    """
    if name in node.kwargs:
        return node.kwargs[name]
    names = [one.name for one in list_arguments(node.target)]
    if name in names and names.index(name) < len(node.args):
        return node.args[names.index(name)]
    return None


def arguments(node: Node) -> list[Any]:
    """Return the arguments of a node's operator in the order of its schema, with the defaults of those left out."""
    return [value for _, value in operators.bind(node.target, node.args, node.kwargs)]
