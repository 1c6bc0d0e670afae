"""Where nodes come from: torch copies the whole history of a node for each node that is made from it.

Histories are never changed once they are made, so copies share them.
"""

from __future__ import annotations

from typing import Any

# The class that describes where a node came from; it copies the description that the other node has.
from torch.fx.traceback import NodeSource

from exir_lowering._upstream.acceleration.memory import current


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what makes a history refer to earlier ones instead of copying them."""
    copying = NodeSource.__init__

    def sharing(self: NodeSource, node: Any, *args: Any, **kwargs: Any) -> None:
        earlier = node.meta.get("from_node") if node and current() is not None else None
        if not earlier or type(earlier) is not list:
            copying(self, node, *args, **kwargs)
            return
        node.meta["from_node"] = []  # what there is to copy
        try:
            copying(self, node, *args, **kwargs)
        finally:
            node.meta["from_node"] = earlier
        self.from_node = list(earlier)

    return [(NodeSource, "__init__", sharing)]
