"""Control flow that no file can have, or that ExecuTorch's runtime refuses when it runs, is refused before.

Rows of maps and scans whose size differs from call to call fail in the runtime: their kernel only changes how many
there are. So do loops over tensors with channels last: what is carried is planned in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream import pins
from exir_lowering._upstream.fakes import dim_order
from exir_lowering._upstream.programs import pytree
from exir_lowering.errors import InputError
from exir_lowering.graphs.walking import OPERAND_LAYOUTS

_MAP, _SCAN, _WHILE = (getattr(torch.ops.higher_order, name) for name in ("map_impl", "scan", "while_loop"))


def check_carried(method: str, program: ExportedProgram) -> None:
    """Refuse loops that carry numbers, which conversions to Edge dialect do not trace."""
    for node in _calls(program.graph_module):
        for value in node.args[2] if node.target is _WHILE else ():  # type: ignore[union-attr]
            if not isinstance(value, Node) or not isinstance(value.meta.get("val"), torch.Tensor):
                _refuse(method, node, f"carries the number {value}", "carry torch.tensor(...) instead of numbers")


def check_emitted(method: str, program: ExportedProgram) -> None:
    """Refuse what stays on the host and cannot be emitted, or fails when it runs."""
    for node in _calls(program.graph_module):
        if node.target not in OPERAND_LAYOUTS or (node.target is _WHILE and not pins.is_on("loops in files")):
            what, advice = "calls graphs in a way that files do not have", "write it with torch.cond, map or scan"
            _refuse(method, node, what, advice)
        carried = len(node.args[1]) if node.target is _SCAN else 0  # type: ignore[arg-type]
        for place, value in enumerate(pytree.tree_leaves(node.meta.get("val"))):
            if not isinstance(value, torch.Tensor):
                _refuse(method, node, f"returns the number {value}", "return tensors")
            sizes = value.shape[place >= carried :] if node.target in (_MAP, _SCAN) else ()
            if not all(isinstance(size, int) for size in sizes):
                what = f"{'carries' if place < carried else 'stacks rows of'} the dynamic shape {[*sizes]}"
                _refuse(method, node, what, "fix these sizes, or use while_loop")
        for place in OPERAND_LAYOUTS[node.target].before:
            for value in (one.meta.get("val") for one in node.args[place] if isinstance(one, Node)):  # type: ignore[union-attr]
                if isinstance(value, torch.Tensor) and (order := [*dim_order(value)]) != sorted(order):
                    what = f"loops over a tensor whose dimensions lie in memory in the order {order}"
                    _refuse(method, node, what, "loop over contiguous() tensors")


def _calls(graph_module: GraphModule) -> Iterator[Node]:
    for _, module in graphs.walk(graph_module):
        yield from (node for node in module.graph.nodes if graphs.calls_graphs(module, node))


def _refuse(method: str, node: Node, reason: str, advice: str) -> NoReturn:
    module: Any = node.graph.owning_module
    inside = (one for nested in graphs.nested_graphs(module, node) for one in nested.module.graph.nodes)
    line = next(filter(None, map(graphs.source_line, (node, *inside))), "a line that is not known")
    raise InputError(
        f"Method {method!r}: {node.name} ({graphs.operator_name(node)}), at {line}, {reason}, which ExecuTorch cannot "
        f"do in a file. What to do: {advice}."
    )
