"""Does something in a forked child, and tells how that ended: what ends the child must not end the tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from exir_lowering import LoweringError

SECONDS = 120


def outcome(action: Callable[[], Any]) -> str:
    """Return what an action in a child ends with: "refused: ..." with a message of ours, "done: ..." or how it died."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        try:
            signal.alarm(SECONDS)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            text = f"done: {action()}"
        except LoweringError as error:
            text = f"refused: {error}"
        except BaseException as error:
            text = f"foreign: {type(error).__name__}: {error}"
        os.write(writes, text.encode()[:60_000])
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return text if code == 0 else f"died: {code}"
