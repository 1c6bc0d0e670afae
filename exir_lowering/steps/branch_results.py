"""Views of what control flow returns, which ExecuTorch would emit wrongly.

The runtime returns a branch's result by pointing the value of `cond` at the branch's memory. ExecuTorch makes a view
share the memory that was planned for its base, so a view of such a value reads memory that was never written.
ExecuTorch handles this for the outputs of a graph, which are redirected too, but not for these views.
"""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.edge_operators import CLONE, VIEWS


def copy_before_views(program: ExportedProgram) -> None:
    """Let views read a copy of what control flow returns.

    Args:
        program: A private copy of a lowered program, which is changed.
    """
    for _, module in graphs.walk(program.graph_module):
        copies: dict[Node, Node] = {}
        for node in list(module.graph.nodes):
            base = node.args[0] if node.target in VIEWS else None
            if isinstance(base, Node) and _is_result(module, base):
                if base not in copies:
                    copies[base] = _copy(module, base, node)
                node.update_arg(0, copies[base])


def _is_result(module: GraphModule, node: Node) -> bool:
    """Return whether a node is a result of an operator that calls graphs."""
    call = node.args[0] if graphs.is_getitem(node) else node
    return isinstance(call, Node) and any(True for _ in graphs.nested_graphs(module, call))


def _copy(module: GraphModule, base: Node, view: Node) -> Node:
    with module.graph.inserting_before(view):
        copied = module.graph.call_function(CLONE, (base,))
    copied.meta = {**view.meta, "val": base.meta["val"]}
    return copied
