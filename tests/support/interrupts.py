"""Interrupts (Ctrl-C) at a given moment."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import executorch.exir

import exir_lowering

_BEARS_IT = tuple(str(Path(package.__path__[0])) for package in (exir_lowering, executorch.exir))
_AGAIN = 0.0002
"""Seconds until an interrupt that came where torch does not bear one comes again."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Interrupt the body, unless it ends before; the interrupt ends here.

    It waits for code of ours or of ExecuTorch's compiler: torch's C++ ends the process if Python that it calls raises
    (in `find_torch_dispatch_rule`, for example), or keeps a dispatch key, whoever called torch.
    """

    over = False

    def interrupt(_: int, frame: FrameType | None) -> None:
        if over:  # It came as the body ended. Set again, the timer would meet the handler of before: none, and the end.
            return
        if frame is None or not frame.f_code.co_filename.startswith(_BEARS_IT):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        else:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    except KeyboardInterrupt:
        pass
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
