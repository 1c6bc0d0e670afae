"""Patterns of Vulkan that cannot be in a graph are not built, the others once.

Vulkan looks for rotary embeddings by graphs that it exports and converts itself, for each program and each partition:
more than half of the time of a lowering. A graph has no match if no concatenation in it starts with what all forms of a
pattern concatenate. That holds for the patterns, which are pinned, and the versions that it was written for.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from typing import Any

from torch.fx import Graph, Node

from exir_lowering._upstream import pins
from exir_lowering.fast import current
from exir_lowering.fast.xnnpack_passes import is_checked

_MODULE = "executorch.backends.vulkan.patterns"
PATTERNS = {
    "export_llama_rope": (f"{_MODULE}.rope:get_rope_graphs", ("aten.unsqueeze_copy.default", "aten.sub.Tensor")),
    "hf_rope": (f"{_MODULE}.rope_hf:get_hf_rope_graphs", ("aten.add.Tensor",)),
}
"""Where the graphs of each pattern are made; and what is concatenated first there, and what that is made of."""


def may_match(graph: Graph, names: tuple[str, ...]) -> bool:
    """Return whether something is concatenated whose first part is the first call, of the result of the next one."""

    def starts(node: Any, names: tuple[str, ...]) -> bool:
        node = node[0] if isinstance(node, list) and node else node
        known = isinstance(node, Node) and getattr(node.target, "__name__", None) == names[0]
        return known and (len(names) == 1 or (bool(node.args) and starts(node.args[0], names[1:])))

    return any(starts(node, ("aten.cat.default", *names)) for node in graph.nodes)


@cache
def _build_once(build: Any) -> Any:  # Vulkan means to do so, but calls what is below the decorator
    return build()


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what builds patterns only where they could match; nothing where Vulkan's are not in use."""
    patterns = sys.modules.get(_MODULE)
    if patterns is None or not is_checked():
        return []
    searches = ("get_all_fusable_subgraphs", "replace_all_fusable_subgraphs")
    found: list[Any] = [(patterns, name, partial(_search, getattr(patterns, name))) for name in searches]
    for name, (place, names) in PATTERNS.items():
        entry = patterns.fusable_patterns.get(name)
        if entry is not None and entry.get_graphs_fn is pins.find(place).__wrapped__:
            found.append((entry, "get_graphs_fn", partial(_build, entry.get_graphs_fn, names)))
    return found


def _search(search: Any, *given: Any) -> Any:
    if (work := current()) is None:
        return search(*given)
    before, work.searched = work.searched, given[-1].graph
    try:
        return search(*given)
    finally:
        work.searched = before


def _build(build: Any, names: tuple[str, ...]) -> Any:
    if (work := current()) is None or work.searched is None:
        return build()
    return _build_once(build) if may_match(work.searched, names) else []
