"""What conditions say of sizes: ExecuTorch emits comparisons, but not how they are joined, which its runtime can do.

False is less than True, so that one comparison with what is not joins two: `a and b` is `a > not b`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.edge import TRUTHS


def join_truths(out_variants: Callable[[GraphModule], Any]) -> Callable[[GraphModule], Any]:
    """Let ExecuTorch's pass, after which nothing is traced again, find only what its emitter takes."""

    def run(module: GraphModule) -> Any:
        for _, node in [*graphs.every_node(module)]:
            if isinstance(node.meta.get("val"), (bool, torch.SymBool)):
                _join(node)
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
