"""Limits of a program: `load(..., limits=Limits(...))` runs it in a separate process, and ends that beyond them."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from exir_lowering.errors import InputError


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a loaded program; `None` is no limit. Even with none set, a run can be interrupted.

    Attributes:
        seconds: How long a single call may take: a run or profile of a method, or opening the file. It holds for any
            program, also in the middle of a kernel.
        steps: How many instructions a run may execute. In the interpreter they are counted. ExecuTorch's runtime does
            not count them: a method that may execute more, or that has a loop, is refused.
        memory: By how many bytes the memory of the process may grow, for the file, its methods and what they compute.
            On Linux only. A library's threads count too, each with a stack of about 8 MB. Where a backend does not
            report that memory ran out, the error is an InputError that names the limit.

    Raises:
        InputError: A limit is not a number above 0, or cannot be enforced on this system.
    """

    seconds: float | None = None
    steps: int | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        seconds: Any = self.seconds
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (number and math.isfinite(seconds) and seconds > 0):
            raise InputError(f"Limits(seconds={seconds!r}): expected a finite number above 0, or None.")
        for name in ("steps", "memory"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InputError(f"Limits({name}={value!r}): expected an int above 0, or None.")
        if self.memory is not None and sys.platform != "linux":
            raise InputError(f"Limits(memory={self.memory}): this limit works on Linux only. Leave it out here.")
