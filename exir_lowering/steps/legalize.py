"""Step legalize: what stays on the host, and does not run there or not right, becomes other operators, or is refused.

Partitioners come first, so that what a backend takes is left to it, and again where something has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.edge import FULL, allowed_operators
from exir_lowering._upstream.fakes import FakeTensorMode, dim_order, is_unbounded, known_size, unbounded_sizes
from exir_lowering._upstream.legalizing import remove_effect_tokens
from exir_lowering._upstream.operators import draws_numbers, operator_name, wrapped_operator
from exir_lowering._upstream.programs import fake_mode_of, shape_env_in
from exir_lowering.errors import InputError
from exir_lowering.graphs.copies import private_copy
from exir_lowering.graphs.inlining import insert_call
from exir_lowering.graphs.measures import tensors
from exir_lowering.model import EdgeMethod, ExtractedMethod, Legalization
from exir_lowering.pte.releases import Target
from exir_lowering.steps import edge_errors, invariants
from exir_lowering.steps.legalizing.fragments import Fragments, inline, runs_not
from exir_lowering.steps.legalizing.registry import Failed
from exir_lowering.steps.rewriting.editor import Editor
from exir_lowering.steps.session import Session
from exir_lowering.steps.size_functions import lacks_instruction

ROUNDS = 3  # how often partitioners may give back other operators than before

Refused = tuple[tuple[str, ...], Node, str]  # an operator, the path of its graph, and why it does not run


def list_refused(program: ExportedProgram, target: Target) -> list[Refused]:
    """List the operators of a partitioned method that do not run where they are."""
    nodes = [(path, node) for path, node in graphs.every_node(program.graph_module) if node.op == "call_function"]
    return [(path, node, why) for path, node in nodes if (why := runs_not(node, target)) is not None]


def legalize(method: EdgeMethod, refused: Sequence[Refused], session: Session) -> EdgeMethod | None:
    """Return a method with other operators for those on its host that do not run; None if nothing is to be changed."""
    config = session.options.edge_compile_config
    preserved = set(config.preserve_ops) if config else set()  # those that draw numbers draw these, not others
    found = {
        graphs.qualified_name(path, node): why
        for path, node, why in refused
        if wrapped_operator(node.target) not in preserved or not draws_numbers(node.target)
    }
    if not found:
        return None
    program = private_copy(method.program, handles=True)
    mode = fake_mode_of(program.graph_module)
    if mode is None:
        return None
    _drop_checks(program)
    editor, nodes = Editor(program, mode, {}, ()), list(graphs.every_node(program.graph_module))
    fragments = Fragments(mode, session.target, relaid=not any(path for path, _ in nodes))
    done: list[Legalization] = []
    moved: set[Node] = set()  # what may lie in memory in another order than what it replaced
    for path, node in nodes:
        name = graphs.qualified_name(path, node)
        if name not in found or node.op != "call_function":
            continue
        try:
            fragment = fragments.find(node)
        except Failed:
            continue
        constant = partial(_filled, node, mode) if path else editor.constant
        operator, source = graphs.operator_name(node), graphs.source_line(node)
        orders = {dim_order(value) for value in tensors(node.meta["val"])}
        made = inline(node, fragment, constant)
        if not path and any(order != tuple(range(len(order))) for order in orders):
            moved.update(made)
        for gone in (*node.users, node):
            editor.erase(gone)
        done.append(Legalization(method.name, name, operator, found[name], tuple(one.name for one in made), source))
    if not done:
        return None
    _lay_out_again(editor, moved)
    editor.finish()
    invariants.check_program(f"method {method.name}, legalized", program)
    return replace(method, program=program, legalized=(*method.legalized, *done))


def _drop_checks(program: ExportedProgram) -> None:
    """Remove what raises an error for singular matrices in eager mode: a file has their infinities and NaN instead."""
    effects = [node for node in program.graph.nodes if graphs.operator_name(node) == "with_effects"]
    if not any(str(node.args[1]) == _CHECKS for node in effects):
        return
    remove_effect_tokens(program)
    for node in list(program.graph.nodes):
        if graphs.operator_name(node) == _CHECKS:
            program.graph.erase_node(node)


_CHECKS = "aten._linalg_check_errors.default"


def _lay_out_again(editor: Editor, moved: set[Node]) -> None:
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


def require_legal(methods: Iterable[tuple[EdgeMethod, ExtractedMethod, Sequence[Refused]]], session: Session) -> None:
    """Raise an InputError for operators that stay on the host and do not run there, unless the options allow them."""
    options = session.options
    if options.unsupported == "allow":
        return
    allowed = set(map(operator_name, allowed_operators(options.edge_compile_config)))
    lines: list[str] = []
    for edge, method, refused in methods:
        _check_form(method.name, method.program, edge.converted_from or method.program)
        found: dict[str, list[tuple[tuple[str, ...], Node]]] = {}
        for path, node, why in refused:
            if (name := graphs.operator_name(node)) not in allowed:
                reasons = filter(None, (why, _why_not_replaced(node, session.target)))
                found.setdefault(f"{name}: {'; '.join(reasons)}", []).append((path, node))
        if found:
            lines += [f"Method {method.name!r} has operators that stay on the host and do not run there:"]
            lines += edge_errors.list_places(found)
    if lines:
        raise InputError("\n".join([*lines, _HELP]))


def _check_form(method: str, program: ExportedProgram, given: ExportedProgram) -> None:
    """Refuse a method that returns no tensor, and sizes that depend on data and have no bound: ExecuTorch fails."""
    results = program.graph.output_node().args[0]
    idle = not any(node.op == "call_function" for node in program.graph.nodes)
    tensor = any(isinstance(one, Node) and isinstance(one.meta.get("val"), torch.Tensor) for one in results)
    if not tensor and (results or idle):
        raise InputError(
            f"Method {method!r} returns {', '.join(map(str, results)) or 'nothing'} and no tensor, which a file "
            "cannot. What to do: return a tensor, such as torch.tensor(...)."
        )
    for path, node in graphs.every_node(program.graph_module):
        if node.op == "call_function" and lacks_instruction(node):
            raise InputError(
                f"Method {method!r}: {graphs.qualified_name(path, node)} ({graphs.operator_name(node)}), at "
                f"{graphs.source_line(node) or 'an unknown line'}, computes a number of sizes by a function that a "
                "file has no instruction for. What to do: compute it of a tensor, torch.tensor(size)."
            )
        for value in tensors(node.meta.get("val")):
            unbound = [size for size in value.shape if known_size(size) is None and is_unbounded(size)]
            if unbound:
                what = f"{graphs.qualified_name(path, node)} ({graphs.operator_name(node)})"
                names = ", ".join(f'"{name}": 1000' for name in unbounded_sizes(shape_env_in(given), unbound[0]))
                raise InputError(
                    f"Method {method!r}: {what}, at {graphs.source_line(node) or 'an unknown line'}, has the size "
                    f"{unbound[0]}, which depends on data and has no bound, so that no memory can be planned. What to "
                    f"do: torch._check(size <= limit) in the model, or LoweringOptions(bounds={{{names}}})."
                )


def _why_not_replaced(node: Node, target: Target) -> str:
    """Return why no other operators take the place of one, as a clause; "" if none are known."""
    mode = next(iter(tensors(node.meta["val"]))).fake_mode  # type: ignore[attr-defined]
    try:
        Fragments(mode, target).find(node)
    except Failed as failed:
        return str(failed)
    return ""


_HELP = (
    "What to do: write these lines of the model with other operators, or let a partitioner take them (`plan` says why "
    'none did). For a runtime that has more kernels: LoweringOptions(unsupported="allow"), or target="targets.json" '
    "with what it has, as for `check`."
)


def _filled(node: Node, mode: FakeTensorMode, tensor: torch.Tensor) -> Node:
    """Add a constant in a nested graph, which cannot have its own, by a call that makes it."""
    args, meta = (list(tensor.shape), tensor.flatten()[0].item()), {"val": mode.from_tensor(tensor, static_shapes=True)}
    return insert_call(node, FULL, args, {"dtype": tensor.dtype}, meta=meta)
