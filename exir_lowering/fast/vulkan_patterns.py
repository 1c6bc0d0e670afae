"""Patterns of Vulkan that cannot be in a graph are not built, the others once.

Vulkan looks for rotary embeddings by graphs that it exports and converts itself, for each program and each partition:
more than half of the time of a lowering. A graph without a call that is in each form of a pattern has no match. The
conditions hold for the patterns and the versions that they were written for; the patterns are pinned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

from torch.fx import Graph, Node

from exir_lowering._upstream import pins
from exir_lowering.fast import current
from exir_lowering.fast.xnnpack_passes import Idle, is_checked

_PATTERNS = "executorch.backends.vulkan.patterns"
_searched: ContextVar[Graph | None] = ContextVar("exir_lowering_searched", default=None)


def _no_cat_of(*names: str) -> Idle:
    """Return the condition that nothing is concatenated whose first part is a call of these, each the first operand."""

    def idle(kind: Any, graph: Graph) -> bool:
        calls = (node for node in graph.nodes if _name(node) == "aten.cat.default" and node.args and node.args[0])
        return not any(_is_chain(node.args[0][0], names) for node in calls)

    return idle


def _is_chain(node: Any, names: Sequence[str]) -> bool:
    if not names:
        return True
    return isinstance(node, Node) and _name(node) == names[0] and bool(node.args) and _is_chain(node.args[0], names[1:])


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", ""))


# What each form of a pattern ends with: rotated halves are stacked; the rotated part of a head comes before the rest.
_CONDITIONS: dict[str, tuple[str, Idle]] = {
    "export_llama_rope": (
        f"{_PATTERNS}.rope:get_rope_graphs",
        _no_cat_of("aten.unsqueeze_copy.default", "aten.sub.Tensor"),
    ),
    "hf_rope": (f"{_PATTERNS}.rope_hf:get_hf_rope_graphs", _no_cat_of("aten.add.Tensor")),
}
"""Where the graphs of each pattern are made, and when there is no match."""


@cache
def _build(build: Callable[[], Any]) -> Any:
    """Return a pattern's graphs, which nothing changes: Vulkan decorates the function, but calls what it decorates."""
    return build()


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what builds patterns only where they could match; nothing where Vulkan's are not in use."""
    patterns = sys.modules.get(_PATTERNS)
    if patterns is None or not is_checked():
        return []

    def searching(search: Any) -> Any:
        def searched(*given: Any) -> Any:
            before = _searched.set(given[-1].graph if current() is not None else None)
            try:
                return search(*given)
            finally:
                _searched.reset(before)

        return searched

    def building(build: Any, idle: Idle) -> Any:
        def built() -> Any:
            graph = _searched.get()
            if graph is None:
                return build()
            return [] if idle(None, graph) else _build(build)

        return built

    searches = ("get_all_fusable_subgraphs", "replace_all_fusable_subgraphs")
    entries = ((patterns.fusable_patterns.get(name), *found) for name, found in _CONDITIONS.items())
    return [
        *((patterns, name, searching(getattr(patterns, name))) for name in searches),
        *(
            (entry, "get_graphs_fn", building(entry.get_graphs_fn, idle))
            for entry, place, idle in entries
            if entry is not None and entry.get_graphs_fn is pins.find(place).__wrapped__
        ),
    ]
