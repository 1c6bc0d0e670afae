"""Log lines that torch, ExecuTorch and their libraries print at every start, and how a command hides them."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

from exir_lowering._upstream import stderr
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


@contextlib.contextmanager
def quieten() -> Iterator[None]:
    """Silence known noise of torch and ExecuTorch. Only a command may: a library must not touch logging."""

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(KNOWN_LOGS.get(record.name, ()))

    for name in KNOWN_LOGS:
        logging.getLogger(name).addFilter(is_news)
    try:
        with warnings.catch_warnings(), stderr.without_lines(stderr.ABOUT_THE_CPU):
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
