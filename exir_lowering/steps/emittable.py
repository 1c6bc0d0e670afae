"""What ExecuTorch's emitter does not take, though its runtime can do it, in a form that it takes.

Conditions on sizes: it emits comparisons, but not how they are joined. False is less than True, so that one comparison
with what is not joins two: `a and b` is `a > not b`.

Maps over several tensors, or to several: it emits those as a scan that carries nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.edge import TRUTHS

_MAP, _SCAN = torch.ops.higher_order.map_impl, torch.ops.higher_order.scan


def make_emittable(out_variants: Callable[[GraphModule], Any]) -> Callable[[GraphModule], Any]:
    """Let ExecuTorch's pass, after which nothing is traced again, find only what its emitter takes."""

    def run(module: GraphModule) -> Any:
        for _, node in [*graphs.every_node(module)]:
            if isinstance(node.meta.get("val"), (bool, torch.SymBool)):
                _join(node)
            elif node.target is _MAP and max(len(node.args[1]), len(node.meta["val"])) > 1:  # type: ignore[arg-type]
                node.target, node.args = _SCAN, (node.args[0], [], *node.args[1:])
        return out_variants(module)

    return run


def _join(node: Node) -> None:
    graph, joined = node.graph, {operator.and_: "gt", operator.or_: "ge"}.get(node.target)  # type: ignore[arg-type]
    if joined is not None:
        one, other = node.args
        with graph.inserting_before(node):
            opposite = graph.call_function(TRUTHS["sym_not"], (other,))
        opposite.meta = dict(node.meta)
        node.target, node.args = TRUTHS[joined], (one, opposite)
    elif node.target in (operator.ne, operator.xor):
        with graph.inserting_before(node):
            equal = graph.call_function(TRUTHS["eq"], node.args)
        equal.meta = dict(node.meta)
        node.target, node.args = TRUTHS["sym_not"], (equal,)
