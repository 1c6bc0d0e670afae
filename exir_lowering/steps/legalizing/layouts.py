"""In which order values lie in memory: what a fragment makes, and what is computed of it then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import dim_order
from exir_lowering.graphs.measures import tensors
from exir_lowering.steps.rewriting.editor import Editor


def lay_out_again(editor: Editor, moved: set[Node]) -> None:
    """Find out again in which order values lie in memory that are computed of what may lie in another one now."""
    for node in editor.graph.nodes:
        if node.op != "call_function" or node in moved or moved.isdisjoint(node.all_input_nodes):
            continue
        if "dim_order" in node.kwargs and isinstance(operand := node.args[0], Node):  # as its operand's was
            order = tuple(cast(Sequence[int], node.kwargs["dim_order"]))
            if order not in ((0, 2, 3, 1), tuple(range(len(order)))):
                node.update_kwarg("dim_order", list(dim_order(operand.meta["val"])))
        if graphs.is_getitem(node):
            source, number = node.args
            value = cast(Node, source).meta["val"][number]
        elif any(True for _ in tensors(node.meta.get("val"))):
            value = editor.compute(node)
        else:
            continue
        before = [dim_order(one) for one in tensors(node.meta["val"])]
        node.meta["val"] = value
        if before != [dim_order(one) for one in tensors(value)]:
            moved.add(node)
