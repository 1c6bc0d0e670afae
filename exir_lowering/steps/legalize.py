"""Step legalize: what stays on the host, and does not run there or not right, becomes other operators, or is refused.

It comes after a first partitioning, so that what a backend takes is left to it; where it changed something, the
partitioners are asked again, as they may take what was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from executorch.exir import EdgeCompileConfig
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.edge import FULL, allowed_operators
from exir_lowering._upstream.fakes import FakeTensorMode
from exir_lowering._upstream.operators import operator_name
from exir_lowering._upstream.programs import fake_mode_of
from exir_lowering.errors import InputError
from exir_lowering.graphs.copies import private_copy
from exir_lowering.graphs.operators.calls import tensors
from exir_lowering.model import EdgeMethod, ExtractedMethod, Legalization
from exir_lowering.pte.releases import Target
from exir_lowering.steps import edge_errors, invariants
from exir_lowering.steps.legalizing.fragments import Failed, Fragments, inline, runs_not
from exir_lowering.steps.rewriting.editor import Editor
from exir_lowering.steps.session import Session

ROUNDS = 3  # how often partitioners may give back other operators than before

_Refused = tuple[tuple[str, ...], Node, str]  # an operator, the path of its graph, and why it does not run


def legalize(method: EdgeMethod, partitioned: ExtractedMethod, session: Session) -> EdgeMethod | None:
    """Return a method with other operators for those on its host that do not run; None if nothing is to be changed."""
    target = session.target
    refused = _list_refused(partitioned.program, target)
    found = {graphs.qualified_name(path, node): why for path, node, why in refused}
    if not found:
        return None
    program = private_copy(method.program, handles=True)
    mode = fake_mode_of(program.graph_module)
    if mode is None:
        return None
    editor = Editor(program, mode, {}, ())
    fragments = Fragments(mode, _UNCHECKED, target)
    done: list[Legalization] = []
    for path, node in list(graphs.every_node(program.graph_module)):
        if graphs.qualified_name(path, node) not in found or node.op != "call_function":
            continue
        try:
            fragment = fragments.find(node)
        except Failed:
            continue
        constant = partial(_filled, node, mode) if path else editor.constant
        name, operator, source = graphs.qualified_name(path, node), graphs.operator_name(node), graphs.source_line(node)
        made = tuple(one.name for one in inline(node, fragment, constant))
        _erase(None if path else editor, node)
        done.append(Legalization(method.name, name, operator, found[name], made, source))
    if not done:
        return None
    editor.finish()
    invariants.check_program(f"method {method.name}, legalized", program)
    return replace(method, program=program, legalized=(*method.legalized, *done))


def require_legal(methods: Sequence[ExtractedMethod], session: Session) -> None:
    """Raise an InputError for operators that stay on the host and do not run there, unless the options allow them."""
    options = session.options
    if options.unsupported == "allow":
        return
    allowed = set(map(operator_name, allowed_operators(options.edge_compile_config)))
    lines: list[str] = []
    for method in methods:
        found: dict[str, list[tuple[tuple[str, ...], Node]]] = {}
        for path, node, why in _list_refused(method.program, session.target):
            if (name := graphs.operator_name(node)) not in allowed:
                reasons = filter(None, (why, _why_not_replaced(node, session.target)))
                found.setdefault(f"{name}: {'; '.join(reasons)}", []).append((path, node))
        if found:
            lines += [f"Method {method.name!r} has operators that stay on the host and do not run there:"]
            lines += edge_errors.list_places(found)
    if lines:
        raise InputError("\n".join([*lines, _HELP]))


def _why_not_replaced(node: Node, target: Target) -> str:
    """Return why no other operators take the place of one, as a clause; "" if none are known."""
    mode = next(iter(tensors(node.meta["val"]))).fake_mode  # type: ignore[attr-defined]
    try:
        Fragments(mode, _UNCHECKED, target).find(node)
    except Failed as failed:
        return str(failed)
    return ""


_UNCHECKED = EdgeCompileConfig(_check_ir_validity=False)

_HELP = (
    "What to do: write these lines of the model with other operators, or let a partitioner take them (`plan` says why "
    'none did). For a runtime that has more kernels: LoweringOptions(unsupported="allow"), or target="targets.json" '
    "with what it has, as for `check`."
)


def _list_refused(program: ExportedProgram, target: Target) -> list[_Refused]:
    """List the operators of a partitioned method that do not run where they are."""
    found = []
    for path, node in graphs.every_node(program.graph_module):
        why = runs_not(node, target) if node.op == "call_function" else None
        if why is not None:
            found.append((path, node, why))
    return found


def _erase(editor: Editor | None, node: Node) -> None:
    for user in list(node.users):
        node.graph.erase_node(user) if editor is None else editor.erase(user)
    node.graph.erase_node(node) if editor is None else editor.erase(node)


def _filled(node: Node, mode: FakeTensorMode, tensor: torch.Tensor) -> Node:
    """Add a constant in a nested graph, which cannot have its own, by a call that makes it."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(FULL, (list(tensor.shape), tensor.flatten()[0].item()), {"dtype": tensor.dtype})
    made.meta = {"val": mode.from_tensor(tensor, static_shapes=True)}
    return made
