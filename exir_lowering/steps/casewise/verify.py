"""Verification by cases: ExecuTorch's verifier looks at each operator by itself, so that each case needs one look."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import GraphModule

from exir_lowering._upstream.conversion import verify_signature
from exir_lowering._upstream.programs import lazy_graph_module
from exir_lowering.steps.casewise.cases import Case, Describer, place_side_by_side


def verify(program: Any, verifier: Any) -> None:
    """Check a program as its verifier does, and raise what that raises; it names calls by their cases."""
    checker = verifier()
    checker(_one_of_each(program.graph_module))
    verify_signature(program)


def _one_of_each(graph_module: GraphModule) -> GraphModule:
    describer, cases = Describer(constants=True), dict[Any, Case]()
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            values = [operand.meta["val"] for operand in node.all_input_nodes]
            case = describer.case(node, node.target, values, node.meta["val"])
            cases.setdefault((case.key, describer.value(node.meta["val"])), case)
    return lazy_graph_module({}, place_side_by_side(list(cases.values())).graph)
