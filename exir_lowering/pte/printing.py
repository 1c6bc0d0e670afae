"""What was found as plain text, and as a notebook shows it: in a file, in a run, in a comparison."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import OverflowMethod, RenderableType
    from rich.table import Table

_WIDTH = 100  # how many characters a line of a notebook has

_TEXT_STYLE = (
    "white-space: pre; overflow-x: auto; line-height: normal; font-family: Menlo, 'DejaVu Sans Mono', monospace"
)
_PAGE_STYLE = "width: 100%; height: 600px; border: 1px solid #8886; border-radius: 8px; resize: vertical"


def printable(text: str) -> str:
    """Return a name from a file so that a terminal shows it, whatever characters it has."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def middle(text: str, width: int) -> str:
    """Shorten a text in the middle."""
    if len(text) <= width:
        return text
    kept = width - 1
    return f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"


def render(parts: Iterable[RenderableType], width: int) -> str:
    """Return parts as plain text, without control characters that names may have."""
    from rich.console import Console

    out = io.StringIO()
    # The terminal, a notebook and the environment (FORCE_COLOR, COLUMNS) must not affect the text.
    plain: Any = {"force_terminal": False, "force_jupyter": False, "color_system": None}
    console = Console(file=out, width=width, **plain, highlight=False, emoji=False, markup=False)
    for part in parts:
        console.print(part)
    return "".join(f"{printable(line.rstrip())}\n" for line in out.getvalue().splitlines())


def make_table(
    columns: Iterable[str],
    rows: Iterable[Iterable[str]],
    numbers: Container[str] = (),
    title: str | None = None,
    *,
    overflow: OverflowMethod = "fold",
    whole: bool = False,
    **options: Any,
) -> Table:
    """Return a table of texts; columns of numbers are aligned right, and never broken if these are to stay whole."""
    # Not at the top: importing rich takes as long as running a small file.
    from rich import box
    from rich.table import Table
    from rich.text import Text

    style: Any = {"box": box.SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0), **options}
    table = Table(title=title, **style)
    for column in columns:
        number = column in numbers
        table.add_column(column, justify="right" if number else "left", overflow=overflow, no_wrap=whole and number)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


class Shown:
    """What `print` shows as its text, and a notebook too, or as its page."""

    __slots__ = ()

    if TYPE_CHECKING:

        def to_text(self, *, width: int = ...) -> str:
            """Return it as plain text."""

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return in_notebook(self.to_text, getattr(self, "to_html", None))


def in_notebook(text: Callable[..., str], page: Callable[[], str] | None = None) -> str:
    """Return HTML for Jupyter: a page in a frame, where nothing runs, and the text for others."""
    shown = f'<pre style="{_TEXT_STYLE}">{html.escape(text(width=_WIDTH))}</pre>'
    if page is None:
        return shown
    # Links within the page would lead to the notebook otherwise.
    framed = html.escape(page().replace("<head>", '<head><base href="about:srcdoc">', 1))
    return (
        f'<iframe title="Page" sandbox="" srcdoc="{framed}" style="{_PAGE_STYLE}"></iframe>'
        f"<details><summary>As text</summary>{shown}</details>"
    )
