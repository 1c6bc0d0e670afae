"""What messages share: the known name that was meant, and the first of many names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def did_you_mean(
    wanted: object, known: Iterable[str], otherwise: str = "", *, most: int = 1, sure: Sequence[str] = ()
) -> str:
    """Return the end of a message: the sure names, or else those close to an unknown one, or else another end."""
    close = sure or difflib.get_close_matches(str(wanted), known, n=most)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else otherwise


def few(names: Iterable[str], most: int) -> str:
    """List the first names, and count the others: a, b and 7 more."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
