"""Private copies of programs whose sizes are not known ahead of time.

Nodes describe their values with fake tensors, whose symbolic sizes belong to a shape environment. Copies of a program
share it, and a conversion writes into it: new symbols for sizes that depend on data, which stay pending until a node
takes them, facts about symbols, and the symbol that a tensor's `nonzero` had last. The next conversion of the program
would find all of that, so each conversion gets its own values, fake mode and shape environment.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering._upstream.fakes import FakeCopies, has_symbols as environment_has_symbols, shape_env_of
from exir_lowering._upstream.likeness import SYMBOLS
from exir_lowering._upstream.programs import pytree
from exir_lowering.graphs import debug_handles
from exir_lowering.graphs.walking import every_node


def private_copy(program: ExportedProgram, *, handles: bool = False, unbacked: bool = False) -> ExportedProgram:
    """Copy a program, with values of its own (`val` in its metadata) if it has symbolic sizes.

    `handles` fills in debug handles where they are missing. Values stay shared if one is not a plain fake tensor (but
    sparse, or of a tensor subclass) and cannot be copied. If `unbacked`, only sizes that depend on data count, which
    are those that break a second conversion.
    """
    program = debug_handles.copy_with_handles(program) if handles else graphs.copy_program(program)
    if not has_symbols(program, unbacked=unbacked):
        return program
    copies = FakeCopies()
    replaced: list[tuple[dict[str, Any], Any]] = []
    for _, node in every_node(program.graph_module):
        if "val" not in node.meta:
            continue
        leaves, spec = pytree.tree_flatten(node.meta["val"])
        if not all(map(copies.possible, leaves)):
            return program
        if any(isinstance(leaf, (torch.Tensor, *SYMBOLS)) for leaf in leaves):
            replaced.append((node.meta, pytree.tree_unflatten(list(map(copies.copy, leaves)), spec)))
    for meta, value in replaced:
        meta["val"] = value
    return program


def has_symbols(program: ExportedProgram, *, unbacked: bool = False) -> bool:
    """Return whether the shape environments of a program have symbols; usually, the first input answers it."""
    environments = set()
    for _, node in every_node(program.graph_module):
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            environment = shape_env_of(leaf)
            if environment is not None and id(environment) not in environments:
                environments.add(id(environment))
                if environment_has_symbols(environment, unbacked=unbacked):
                    return True
    return False
