"""Private copies of programs with sizes that are not known ahead of time.

Nodes describe their values by fake tensors, whose symbolic sizes belong to one shape environment. It is shared by every
copy of a program, and a conversion writes into it: new symbols for sizes that depend on data, which are then pending
until a node takes them, what is known of symbols, and the symbol that a tensor's `nonzero` had last time. A program's
second conversion would find all that; so each conversion gets values, a fake mode and a shape environment of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from exir_lowering import graphs
from exir_lowering._upstream.fakes import FakeCopies, has_symbols, shape_env_of
from exir_lowering._upstream.trees import pytree


def isolate(program: ExportedProgram, *, unbacked: bool = False) -> ExportedProgram:
    """Give a private copy of a program values of its own, if it has symbolic sizes.

    Args:
        program: The copy; `val` in the metadata of its nodes is replaced. Values that are no plain fake tensors (those
            of tensor subclasses, sparse ones) have no copy: then nothing is replaced.
        unbacked: Whether only sizes that depend on data count: those are what a second conversion stumbles over.

    Returns:
        The same program.
    """
    if not _has_symbols(program.graph_module, unbacked):
        return program
    copies = FakeCopies()
    replaced: list[tuple[dict[str, Any], Any]] = []
    for _, module in graphs.walk(program.graph_module):
        for node in module.graph.nodes:
            if "val" not in node.meta:
                continue
            leaves, spec = pytree.tree_flatten(node.meta["val"])
            if not all(copies.possible(leaf) for leaf in leaves):
                return program
            if any(isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) for leaf in leaves):
                copied = [copies.copy(leaf) for leaf in leaves]
                replaced.append((node.meta, pytree.tree_unflatten(copied, spec)))
    for meta, value in replaced:
        meta["val"] = value
    return program


def _has_symbols(graph_module: GraphModule, unbacked: bool) -> bool:
    """Tell whether the environment that a program's sizes belong to has symbols; mostly a look at one input."""
    environments = set()
    for _, module in graphs.walk(graph_module):
        for node in module.graph.nodes:
            for leaf in pytree.tree_leaves(node.meta.get("val")):
                environment = shape_env_of(leaf)
                if environment is not None and id(environment) not in environments:
                    environments.add(id(environment))
                    if has_symbols(environment, unbacked=unbacked):
                        return True
    return False
