"""A memory that a program knows by several names becomes one buffer, and a constant that it writes becomes a buffer.

`torch.export` lifts each tensor that it finds to an input of its own, also views, and what is an attribute of a cache.
In PyTorch, what is written by one name is read by all others. So there is one input, with views where those were read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import FakeTensor
from exir_lowering._upstream.programs import fake_mode_of
from exir_lowering.graphs.copies import memory_key, memory_span, private_copy
from exir_lowering.steps import edge_errors
from exir_lowering.steps.arguments import RequestedMethod, is_edge

_ATEN = torch.ops.aten
_KINDS = (InputKind.BUFFER, InputKind.PARAMETER, InputKind.CONSTANT_TENSOR)  # whose name is kept, the first before all
_Span = tuple[int, int]  # from which address to which one
_Step = tuple[Any, tuple[Any, ...]]  # an operator, and its arguments behind the first


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    """A lifted input with its memory."""

    node: Node
    spec: InputSpec
    tensor: torch.Tensor
    span: _Span


def unite(methods: Iterable[RequestedMethod]) -> tuple[RequestedMethod, ...]:
    """Return methods in which each memory that one of them writes has one name; InputError if that is impossible."""
    methods = tuple(methods)
    given = {each.name: _members(each.program) for each in methods if not is_edge(each.program)}
    written = {each.name: edge_errors.list_written(each.program) for each in methods if each.name in given}
    for each in methods:
        _check_untouched(each, written.get(each.name, {}))
    spans = [one.span for name, members in given.items() for one in members if one.node in written[name]]
    return tuple(
        replace(method, program=_unite(method, spans))
        if not graphs.written_state(method.program)  # else it is functional: torch has seen to it
        and any(_is_several(group, written[method.name]) for group in _groups(given.get(method.name, ()), spans))
        else method
        for method in methods
    )


def _members(program: ExportedProgram) -> list[_Member]:
    found = []
    for node, spec in graphs.lifted_inputs(program).items():
        tensor = graphs.lifted_value(program, spec.target)
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
            continue
        if (span := memory_span(tensor)) is not None:
            found.append(_Member(node, spec, tensor, span))
    return found


def _check_untouched(method: RequestedMethod, written: dict[Node, list[Node]]) -> None:
    """Refuse what `torch.export` has executed if not strict: operators on nothing but tensors that it does not know."""
    lifted = graphs.lifted_inputs(method.program)
    known: dict[Node, bool] = {
        node: not str(spec.target).rpartition(".")[2].startswith("lifted_tensor_")
        for node, spec in lifted.items()
        if spec.kind is InputKind.CONSTANT_TENSOR
    }
    writers = {node: base for base, nodes in written.items() for node in nodes}
    touched: dict[str, list[Node]] = {}
    for node in method.program.graph.nodes if not all(known.values()) else ():
        if node.op == "call_function":
            operands = node.all_input_nodes
            known[node] = not operands or any(known.get(operand, True) for operand in operands)
            if not known[node] and node in writers:
                touched.setdefault(str(lifted[writers[node]].target), []).append(node)
    if touched:
        raise edge_errors.explain_touched(method.name, touched)


def _groups(members: Iterable[_Member], written: Sequence[_Span]) -> Iterator[list[_Member]]:
    """Yield the members that overlap each other, if any method writes a part of what they cover."""
    group: list[_Member] = []
    end = 0
    for member in [*sorted(members, key=lambda one: one.span), None]:
        if member is None or (group and member.span[0] >= end):
            if any(start < end and group[0].span[0] < stop for start, stop in written if group):
                yield group
            group, end = [], 0
        if member is not None:
            group.append(member)
            end = max(end, member.span[1])


def _is_several(group: Sequence[_Member], written: dict[Node, list[Node]]) -> bool:
    constant = any(one.spec.kind is InputKind.CONSTANT_TENSOR and one.node in written for one in group)
    return constant or len(group) > 1


def _unite(method: RequestedMethod, spans: Sequence[_Span]) -> ExportedProgram:
    program = private_copy(method.program)
    written = edge_errors.list_written(program)
    for group in _groups(_members(program), spans):
        own = [node for one in group for node in written.get(one.node, ())]
        is_written = any(one.node in written for one in group)
        group.sort(key=lambda one: (one.span[0] - one.span[1], _KINDS.index(one.spec.kind)))
        base, *others = group
        for other in others:
            _replace(method, program, base, other, own)
        if is_written and base.spec.kind is not InputKind.BUFFER and (others or base.spec.kind is _KINDS[-1]):
            if (name := str(base.spec.target)) in program.state_dict:
                program.state_dict[name] = base.tensor.detach()
            base.spec.kind, base.spec.persistent = InputKind.BUFFER, name in program.state_dict
    return program


def _replace(
    method: RequestedMethod, program: ExportedProgram, base: _Member, other: _Member, writers: list[Node]
) -> None:
    """Let a view of a buffer take the place of an input, which is removed."""
    steps = _find_view(base.tensor, other.tensor)
    if steps is None:
        names = (str(base.spec.target), str(other.spec.target))
        raise edge_errors.explain_overlap(method.name, names, writers)
    view, mode = base.node, fake_mode_of(program.graph_module)
    first = next(node for node in program.graph.nodes if node.op != "placeholder")
    with program.graph.inserting_before(first):
        for operator, rest in steps if other.node.users else ():
            value = view.meta["val"]
            view = program.graph.call_function(operator, (view, *rest))
            if mode is not None:
                with mode, torch.no_grad():
                    view.meta["val"] = operator(value, *rest)
    other.node.replace_all_uses_with(view)
    program.graph.erase_node(other.node)
    program.graph_signature.input_specs.remove(other.spec)
    for table in (program.state_dict, program.constants):
        table.pop(str(other.spec.target), None)


def _find_view(base: torch.Tensor, other: torch.Tensor) -> list[_Step] | None:
    """Return how a tensor is made as a view of another one, None if it is not known."""
    if memory_key(base) == memory_key(other):
        return []
    strides, others = list(base.stride()), list(other.stride())
    order = sorted(range(base.dim()), key=lambda dim: -strides[dim])
    if base.dtype is not other.dtype or not base.permute(order).is_contiguous():
        return None
    steps: list[_Step] = [(_ATEN.permute.default, (order,))] if order != [*range(base.dim())] else []
    steps.append((_ATEN.view.default, ([-1],)))
    start, width = other.storage_offset() - base.storage_offset(), base.numel()
    placed = sorted((dim for dim in range(other.dim()) if other.shape[dim] != 1), key=lambda dim: -others[dim])
    sizes = [other.shape[dim] for dim in placed]
    for dim, (size, stride) in enumerate(zip(sizes, (others[dim] for dim in placed), strict=True)):
        if stride == 0 or width % stride:
            return None
        steps.append((_ATEN.view.default, ([*sizes[:dim], width // stride, stride],)))
        steps.append((_ATEN.slice.Tensor, (dim, start // stride, start // stride + size)))
        start, width = start % stride, stride
    steps.append((_ATEN.select.int, (len(placed), start)))
    steps.append((_ATEN.permute.default, ([placed.index(dim) for dim in sorted(placed)],)))
    steps.append((_ATEN.view.default, ([*other.shape],)))
    made = base.detach()
    try:
        for operator, rest in steps:
            made = operator(made, *rest)
    except (RuntimeError, IndexError):  # of elements that lie in no grid
        return None
    return steps if memory_key(made) == memory_key(other.detach()) else None
