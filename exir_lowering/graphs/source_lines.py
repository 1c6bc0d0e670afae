"""Where in the model a node came from: source lines and modules."""

from __future__ import annotations

import re

from torch.fx import Node

from exir_lowering.graphs import sources
from exir_lowering.graphs.sources import Frame

_GENERATED = re.compile(r'File "<[^"]+", line \d+, in \S+\s+(\w+) = ')


def stack(node: Node) -> tuple[Frame, ...]:
    """Return the lines of the model from which a node came, outermost first."""
    return sources.parse_frames(node.meta.get("stack_trace") or "")


def source_line(node: Node) -> str:
    """Return the innermost line of the model from which a node came, "" if it is not known.

    Lines of torch itself are skipped if there are others, and lines of generated code always.
    """
    frames = stack(node)
    number = sources.find_innermost(frames)
    return "" if number is None else str(frames[number])


def source_code(node: Node) -> str:
    """Return a node's source line as the end of a message, or the node's name if the line is not known."""
    line = source_line(node)
    return sources.format_lines([line]) if line else f"Node {node.name}; its source line is not known."


def generated_name(node: Node) -> str:
    """Return the name in generated code from which a node came, if nothing else is known of its source, or ""."""
    found = list(_GENERATED.finditer(node.meta.get("stack_trace") or ""))
    return found[-1][1] if found and not stack(node) else ""


def module_stack(node: Node) -> str:
    """Return the path of the module from which a node came, "" if it is not known."""
    stack = modules(node)
    return stack[-1][0] if stack else ""


def modules(node: Node) -> list[tuple[str, str]]:
    """Return the path and the full class name of the modules from which a node came, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    found = []
    for entry in stack.values():
        if isinstance(entry, tuple) and len(entry) == 2:
            path, kind = entry
            found.append((str(path), f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)))
    return found
