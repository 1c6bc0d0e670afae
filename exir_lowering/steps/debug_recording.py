"""Record what the debug handles of an emitted file stand for."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.emission import EmittedCall
from exir_lowering.graphs import debug_handles, sources
from exir_lowering.pte.debug_info import DebugDelegate, DebugNode, MethodDebug


def record(
    programs: Mapping[str, ExportedProgram],
    emitted: Mapping[str, Sequence[EmittedCall]],
    unchanged: Mapping[str, ExportedProgram],
) -> dict[str, MethodDebug]:
    """Describe a file's methods by the calls that were emitted; `unchanged` has the lines of what was rewritten."""
    return {
        name: _method(program.graph_module, emitted.get(name, ()), unchanged.get(name))
        for name, program in programs.items()
    }


def _method(owner: GraphModule, calls: Sequence[EmittedCall], unchanged: ExportedProgram | None) -> MethodDebug:
    nodes: dict[int, list[DebugNode]] = {}
    _describe(owner, nodes)
    delegates: dict[int, DebugDelegate] = {}
    kernels: dict[int, tuple[int, ...]] = {}
    for call in calls:
        if call.module is not None:
            module = call.module.original_module.graph_module
            _describe(module, nodes)
            meta = call.module.meta or {}
            handle_map, placement = _handle_map(meta.get("debug_handle_map")), _handle_map(meta.get("units"))
            units = {handle: str(unit) for unit, placed in placement.items() for handle in placed}
            handles = tuple(dict.fromkeys(handle for handle, _, _ in _operators(module)))
            delegates[call.delegate] = DebugDelegate(
                call.module.backend_id, call.instruction, handles, handle_map, units
            )
        elif isinstance(call.handle, int) and call.handle > 0:
            kernels[call.instruction] = (call.handle,)
    if unchanged is not None:
        if not debug_handles.are_complete(unchanged.graph_module):
            unchanged = debug_handles.copy_with_handles(unchanged)
        _describe(unchanged.graph_module, nodes, known=frozenset(nodes))
    found = {handle: tuple(nodes[handle]) for handle in sorted(nodes)}
    return MethodDebug(found, tuple(delegates[index] for index in sorted(delegates)), kernels)


def _describe(graph_module: GraphModule, nodes: dict[int, list[DebugNode]], *, known: Container[int] = ()) -> None:
    """Add the operators of a graph, and of the graphs nested in it, whose handles are not known."""
    for handle, name, node in _operators(graph_module):
        if handle not in known:
            frames = graphs.stack(node)
            modules = tuple(f"{module}: {kind}" for module, kind in graphs.modules(node))
            described = DebugNode(name, graphs.operator_name(node), modules, frames, sources.find_innermost(frames))
            nodes.setdefault(handle, []).append(described)


def _operators(graph_module: GraphModule) -> Iterator[tuple[int, str, Node]]:
    """Yield the operators that have a debug handle, with it and with their names."""
    for path, node in graphs.every_node(graph_module):
        handle = debug_handles.handle(node)
        if handle is not None and graphs.is_operator(node):
            yield handle, graphs.qualified_name(path, node), node


def _handle_map(given: Any) -> dict[int | str, tuple[int, ...]]:
    """Return the valid part of a backend's map: ExecuTorch accepts anything."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    found: dict[int | str, tuple[int, ...]] = {}
    for key, value in given.items() if isinstance(given, Mapping) else ():
        if isinstance(key, str) or is_number(key):
            found[key] = tuple(sorted(filter(is_number, debug_handles.as_tuple(value))))
    return {key: found[key] for key in sorted(found, key=lambda key: (isinstance(key, str), key))}
