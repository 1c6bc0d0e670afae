"""Run times of programs that are compared: they take turns, so that what else the machine does hits all alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from exir_lowering import LoadedProgram


def interleaved(programs: Sequence[LoadedProgram], inputs: Sequence[Any], rounds: int) -> list[float]:
    """Run programs in turn; return the shortest time of each in seconds."""
    times: list[list[float]] = [[] for _ in programs]
    for number in range(rounds + 3):
        for program, seconds in zip(programs, times, strict=True):
            start = time.perf_counter()
            program.run("forward", *inputs)
            if number >= 3:
                seconds.append(time.perf_counter() - start)
    return [min(seconds) for seconds in times]
