"""Operators that belong together because one function of the model was decomposed into them.

ExecuTorch's backends recognise a decomposed linear layer by the function that its operators came from
(`torch.fx.passes.utils.source_matcher_utils`), not by their form. They replace all of them at once, and take it for
granted that the views among them join and split leading dimensions only.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from exir_lowering.graphs.operators.names import operator_name
from exir_lowering.graphs.source_lines import modules

_LINEAR = (torch.nn.Linear, torch.nn.functional.linear)
_WHOLE = "aten.linear.default"


def is_part_of_linear(node: Node) -> bool:
    """Return whether a node is one of several that a linear layer was decomposed into."""
    return node.op == "call_function" and _comes_from_linear(node) and operator_name(node) != _WHOLE


def _comes_from_linear(node: Node) -> bool:
    functions, function = node.meta.get("source_fn_stack"), node.meta.get("torch_fn")
    if functions:
        return functions[-1][1] in _LINEAR
    if function and str(function[1]).rpartition(".")[2] == "linear":
        return True
    around = modules(node)
    return bool(around) and around[-1][1] == "torch.nn.modules.linear.Linear"
