"""What messages share: the known name that was meant, the first of many names, and what another one's error says."""

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


def exception_text(error: BaseException, end: str = "") -> str:
    """Return the type and text of an exception, without `end`; its `__str__` may be a plug-in's, and raise."""
    try:
        text = str(error)
    except MemoryError:
        raise
    except Exception:
        text = "it has no message that can be shown"
    return f"{type(error).__name__}: {text.removesuffix(end)}"
