"""Lines that ExecuTorch's runtime writes to `sys.stderr`, left out where they are known to say nothing."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO, cast

ABOUT_THE_CPU = "[cpuinfo_utils.cpp:"
"""How lines begin that say what the runtime could not find out about the processor."""

ABOUT_METHODS = "[method.cpp:"
"""How lines begin that say why a method could not be loaded or executed, besides the error itself."""

_LOCK = threading.Lock()
_ACTIVE: list[str] = []  # how lines begin that are left out now


@contextlib.contextmanager
def without_lines(beginning: str) -> Iterator[None]:
    """Leave out the lines that begin so, in all threads, until every thread that asked for it has ended this."""
    with _LOCK:
        _ACTIVE.append(beginning)
        if not isinstance(sys.stderr, LineFilter):
            sys.stderr = cast("TextIO", LineFilter(sys.stderr))
    try:
        yield
    finally:
        with _LOCK:
            if isinstance(sys.stderr, LineFilter):
                sys.stderr.show_held()
            _ACTIVE.remove(beginning)
            if not _ACTIVE and isinstance(sys.stderr, LineFilter):
                sys.stderr = sys.stderr.stream


class LineFilter:
    """A stream without the lines that `without_lines` leaves out; anything else passes at once."""

    def __init__(self, stream: TextIO) -> None:
        """Filter what is written to a stream."""
        self.stream = stream
        self._lines = threading.local()  # threads write lines at the same time

    def write(self, text: str) -> int:
        """Write text, in lines or pieces of them, except for known lines."""
        for part in text.splitlines(keepends=True):
            # The runtime writes a line in pieces; the first ones may still turn out to be known.
            before = getattr(self._lines, "begun", "")
            line = before + part
            if not _may_be_known(line) and not line.startswith(tuple(_ACTIVE)):
                self.stream.write(line if _may_be_known(before) else part)
            self._lines.begun = "" if part.endswith("\n") else line
        return len(text)

    def show_held(self) -> None:
        """Write the beginning of a line of this thread that might have become a known one."""
        begun = getattr(self._lines, "begun", "")
        if begun and _may_be_known(begun) and begun not in _ACTIVE:
            self.stream.write(begun)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _may_be_known(line: str) -> bool:
    return any(known.startswith(line) for known in tuple(_ACTIVE))
