"""What torch, ExecuTorch and the libraries below them say at every start, and how a command leaves it out."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO, cast

from exir_lowering.cli.output import say
from exir_lowering.errors import BackendUnavailableWarning

KNOWN_LOGS = {
    "torchao": ("Failed to load ", "Skipping import of cpp extensions"),
    "torch.export": ("Ran into the following error when deserializing",),
    "torch.export.pt2_archive._package": ("Unable to load package",),
    # torch gives it one argument more than the message has room for, so that formatting it fails.
    "torch._export.serde.serialize": ("Fallback to weights_only=False",),
    "torch.utils._pytree": ("%s is an Enum subclass",),
    "executorch.backends.xnnpack.partition.xnnpack_partitioner": ("\nDEPRECATION WARNING",),
    "torch.distributed.elastic.multiprocessing.redirects": ("NOTE: Redirects are currently not supported",),
}
"""Messages of libraries to their own developers: by logger, how they begin."""

# The runtime reports what it could not find out about the CPU, by way of sys.stderr.
_KNOWN_LINES = "[cpuinfo_utils.cpp:"


class KnownLineFilter:
    """Standard error without the lines that start with `_KNOWN_LINES`; anything else passes at once."""

    def __init__(self, stream: TextIO) -> None:
        """Filter what is written to a stream."""
        self._stream = stream
        self._line = ""

    def write(self, text: str) -> int:
        """Write text, in lines or pieces of them, except for known lines."""
        for part in text.splitlines(keepends=True):
            # The runtime writes a line in pieces; the first ones may still turn out to be known.
            held = self._line if _KNOWN_LINES.startswith(self._line) else ""
            self._line += part
            if not _KNOWN_LINES.startswith(self._line) and not self._line.startswith(_KNOWN_LINES):
                self._stream.write(held + part)
            if part.endswith("\n"):
                self._line = ""
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def quieten() -> Iterator[None]:
    """Silence known noise of torch and ExecuTorch. Only a command may: a library must not touch logging."""

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(KNOWN_LOGS.get(record.name, ()))

    for name in KNOWN_LOGS:
        logging.getLogger(name).addFilter(is_news)
    try:
        quiet = cast("TextIO", KnownLineFilter(sys.stderr))
        with warnings.catch_warnings(), contextlib.redirect_stderr(quiet):
            # Both tell programmers what to change in their code, and a command has no code of theirs.
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            show = warnings.showwarning
            warnings.showwarning = lambda message, category, *where: (
                say(f"Note: {message}", error=True)
                if issubclass(category, BackendUnavailableWarning)
                else show(message, category, *where)
            )
            yield
    finally:
        for name in KNOWN_LOGS:
            logging.getLogger(name).removeFilter(is_news)
