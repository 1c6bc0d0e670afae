"""A graph as the table that `torch.fx.Graph.print_tabular` prints, without the package that it needs for that."""

from __future__ import annotations

from torch.fx import Graph

_HEADERS = ("opcode", "name", "target", "args", "kwargs")
_PADDING = 2
"""By how much a column is at least wider than its header."""


def to_table(graph: Graph) -> str:
    """Return the nodes of a graph: opcode, name, target, arguments and keyword arguments of each."""
    rows = [
        [" ".join(str(cell).split("\n")) for cell in (node.op, node.name, node.target, node.args, node.kwargs)]
        for node in graph.nodes
    ]
    widths = [
        max(len(header) + _PADDING, *(len(row[column]) for row in rows)) for column, header in enumerate(_HEADERS)
    ]
    lines = [list(_HEADERS), ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
