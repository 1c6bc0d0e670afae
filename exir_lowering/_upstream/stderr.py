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
            _ACTIVE.remove(beginning)
            if not _ACTIVE and isinstance(sys.stderr, LineFilter):
                sys.stderr = sys.stderr.stream


class LineFilter:
    """A stream without the lines that `without_lines` leaves out; anything else passes at once."""

    def __init__(self, stream: TextIO) -> None:
        """Filter what is written to a stream."""
        self.stream = stream
        self._line = ""

    def write(self, text: str) -> int:
        """Write text, in lines or pieces of them, except for known lines."""
        for part in text.splitlines(keepends=True):
            # The runtime writes a line in pieces; the first ones may still turn out to be known.
            held = self._line if self._may_be_known() else ""
            self._line += part
            if not self._may_be_known() and not self._line.startswith(tuple(_ACTIVE)):
                self.stream.write(held + part)
            if part.endswith("\n"):
                self._line = ""
        return len(text)

    def _may_be_known(self) -> bool:
        return any(known.startswith(self._line) for known in tuple(_ACTIVE))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
