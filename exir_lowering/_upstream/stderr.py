"""What libraries tell their own developers at every start, left out: nothing that is an error, nothing unknown."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

_LOGS = {
    "torchao": ("Failed to load ", "Skipping import of cpp extensions"),
    "torchao.kernel.intmm": ("Warning: Detected no triton",),
    "torch.export": ("Ran into the following error when deserializing",),
    "torch.export.pt2_archive._package": ("Unable to load package",),
    # torch gives it one argument more than the message has room for, so that formatting it fails.
    "torch._export.serde.serialize": ("Fallback to weights_only=False",),
    "torch._subclasses.fake_tensor": ("failed while attempting to run meta for",),  # the error that it raises says it
    "torch.utils._pytree": ("%s is an Enum subclass",),
    "executorch.backends.xnnpack.partition.xnnpack_partitioner": ("\nDEPRECATION WARNING",),
    "torch.distributed.elastic.multiprocessing.redirects": ("NOTE: Redirects are currently not supported",),
    "coremltools": ("Failed to load _ML", "scikit-learn version", "Torch version"),
}  # the beginnings of messages, by logger

_NOISE = "[cpuinfo_utils.cpp:"  # how the lines begin about what it could not find out about the processor


@contextlib.contextmanager
def without_logs() -> Iterator[None]:
    """Leave out the known messages of loggers while something foreign is imported, or a command runs."""

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_LOGS[record.name])

    with contextlib.ExitStack() as stack:
        for logger in map(logging.getLogger, _LOGS):
            logger.addFilter(is_news)
            stack.callback(logger.removeFilter, is_news)
        yield


def without_noise() -> contextlib.AbstractContextManager[Any]:
    """Leave out the runtime's lines while the context lasts; anything else passes at once."""
    filtered: Any = _Filter(sys.stderr)
    return contextlib.redirect_stderr(filtered)


class _Filter:
    def __init__(self, stream: Any) -> None:
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
