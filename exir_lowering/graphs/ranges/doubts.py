"""Words for what could not be proven, and who is to blame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from exir_lowering.graphs.operators.names import target_name
from exir_lowering.graphs.ranges.intervals import BOUND, Doubt
from exir_lowering.graphs.sources import source_line

if TYPE_CHECKING:
    from exir_lowering.graphs.ranges.analysis import ValueRanges

NOTHING = "nothing: no rewrite can prove it here"
"""The advice where none is known."""


def unbounded(ranges: ValueRanges, node: Node) -> Doubt:
    """Say which value makes another one unbounded: the first one whose own inputs are all bounded."""
    seen: set[Node] = set()
    culprit: Node | None = node
    while culprit is not None:
        seen.add(node := culprit)
        culprit = next((n for n in node.all_input_nodes if n not in seen and ranges.of(n).magnitude > BOUND), None)
    if ranges.is_input(node):
        return Doubt(
            node,
            f"{node.name} is an input of the model, and its elements can be infinite or arbitrarily large",
            f'pass assume={{"{node.name}": "finite"}} if all of its elements are numbers up to 1e6',
        )
    state = ranges.state_name(node)
    if state is not None:
        shared = state in ranges.volatile
        who = "a method that may share it writes" if shared else "the model writes"
        each = ", in every method that has it" if shared else ""
        return Doubt(
            node,
            f"{who} values without a known bound into its buffer {state}",
            f"bound what is written into the buffer{each}, for example with a normalisation or a clamp",
        )
    return Doubt(node, f"{_call(node)} can be infinite{_at(node)}", NOTHING)


def masked(ranges: ValueRanges, node: Node, what: str, *, known: bool = False) -> Doubt:
    """Say that a row of a value may be masked entirely, or of a `known` one is: nothing but `what`, such as "-inf"."""
    if known:
        reason = f"a row of {_call(node)}, whose content is known, is entirely {what}{_at(node)}"
        return Doubt(node, reason, "nothing: the softmax of that row has to be 0")
    if ranges.is_input(node):
        return Doubt(
            node,
            f"{node.name} is an input of the model, and a row of it may be entirely {what}",
            f'pass assume={{"{node.name}": "finite_rows"}} if no row is fully masked',
        )
    state = ranges.state_name(node)
    if state is not None:
        return Doubt(node, f"the model writes its buffer {state}, and a row of it may be entirely {what}", NOTHING)
    return Doubt(node, f"a row of what {_call(node)} computes may be entirely {what}{_at(node)}", NOTHING)


def _call(node: Node) -> str:
    return target_name(node.target) if node.op == "call_function" else node.name


def _at(node: Node) -> str:
    line = source_line(node)
    return f" ({line})" if line else ""
