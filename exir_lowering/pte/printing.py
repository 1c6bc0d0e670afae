"""What was found as plain text: in a file, in a run, in a comparison."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def printable(text: str) -> str:
    """Return a name from a file so that a terminal shows it, whatever characters it has."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def render(parts: Iterable[RenderableType], width: int) -> str:
    """Return parts as plain text."""
    from rich.console import Console

    out = io.StringIO()
    # The terminal and the environment (FORCE_COLOR, COLUMNS) must not affect the text.
    console = Console(file=out, width=width, force_terminal=False, color_system=None, highlight=False, emoji=False)
    for part in parts:
        console.print(part, markup=False)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
