"""Debug handles: the numbers by which payloads, events and failures name the operators of a method, from 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering.graphs.walking import every_node

if TYPE_CHECKING:
    from executorch.exir.backend.backend_details import PreprocessResult

KEY = "debug_handle"
"""ExecuTorch's key of node.meta."""

_MOST = 65_534  # backends use 65535 for operators that they make themselves


def handle(node: Node) -> int | None:
    """Return a node's debug handle, or None; 0, which ExecuTorch writes too, means that it has none."""
    value = node.meta.get(KEY)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def find_highest(graph_module: GraphModule) -> int:
    """Return the highest handle of a method, or 0."""
    return max((handle(node) or 0 for _, node in every_node(graph_module)), default=0)


def fill(graph_module: GraphModule) -> None:
    """Give each computing node without a handle, in place, that of what it was decomposed from, or a new one."""
    missing = [node for _, node in every_node(graph_module) if node.op == "call_function" and handle(node) is None]
    if not missing:
        return
    known: dict[str, int] = {}
    for _, node in every_node(graph_module):
        value, origin = handle(node), _origin(node)
        if value is not None and origin is not None and not graphs.is_delegate_call(node):
            known.setdefault(origin, value)
    last = find_highest(graph_module)
    for node in missing:
        origin = _origin(node)
        producer = node.args[0] if graphs.is_getitem(node) else None
        value = handle(producer) if isinstance(producer, Node) else known.get(origin or "")
        if value is None:
            value = last = last + 1
        if origin is not None:
            known.setdefault(origin, value)
        node.meta[KEY] = value


def copy_with_handles(program: ExportedProgram) -> ExportedProgram:
    """Copy a program and fill in missing debug handles; every copy gets the same ones."""
    copied = graphs.copy_program(program)
    fill(copied.graph_module)
    return copied


def number_handles(program: ExportedProgram) -> dict[int, int] | None:
    """Return a number for each debug handle of a partition, from 1 in its order, as handles shift when a model changes.

    Return None if an operator has no handle, or there are too many.
    """
    numbers: dict[int, int] = {}
    for _, node in every_node(program.graph_module):
        found = handle(node) if node.op != "placeholder" else None  # an input's is that of its producer, outside
        if found is not None:
            numbers.setdefault(found, len(numbers) + 1)
        elif node.op == "call_function":
            return None
    return numbers if len(numbers) <= _MOST and max(numbers, default=0) < 1 << 32 else None


def put_back(result: PreprocessResult, numbers: Mapping[int, int]) -> PreprocessResult:
    """Return the result of a partition that was lowered with handles 1 to n, with its own beside the payload."""
    handles = {number: handle for handle, number in numbers.items()}

    def own(named: Any) -> Any:
        if isinstance(named, (tuple, list, set, frozenset)):
            return type(named)(handles.get(each, each) for each in named)
        return handles.get(named, named)

    table = result.debug_handle_map
    if isinstance(table, Mapping):
        table = {identifier: own(named) for identifier, named in table.items()}
    return replace(result, debug_handle_map=table)


def as_tuple(named: Any) -> tuple[Any, ...]:
    """Return what an entry of a debug handle map names: one handle, or several."""
    return tuple(named) if isinstance(named, (tuple, list, set, frozenset)) else (named,)


def _origin(node: Node) -> str | None:
    """Return what identifies the operator in the exported program for ExecuTorch, None if that is not known."""
    sources = node.meta.get("from_node")
    if not sources:
        return None
    source = sources[-1]
    while source.from_node:
        source = source.from_node[-1]
    return f"{source.name}.{source.graph_id}"
