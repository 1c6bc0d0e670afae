"""`sys.stderr` without lines of ExecuTorch's runtime that say nothing to who runs a command."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, TextIO, cast

_NOISE = "[cpuinfo_utils.cpp:"  # how the lines begin about what it could not find out about the processor


def without_noise() -> contextlib.AbstractContextManager[Any]:
    """Leave out these lines while the context lasts; anything else passes at once."""
    return contextlib.redirect_stderr(cast("TextIO", _Filter(sys.stderr)))


class _Filter:
    def __init__(self, stream: TextIO) -> None:
        self._stream, self._begun = stream, ""

    def write(self, text: str) -> int:
        for part in text.splitlines(keepends=True):
            # The runtime writes a line in pieces; the first ones may still turn out to be noise.
            line = self._begun + part
            if not _NOISE.startswith(line) and not line.startswith(_NOISE):
                self._stream.write(line if _NOISE.startswith(self._begun) else part)
            self._begun = "" if part.endswith("\n") else line
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
