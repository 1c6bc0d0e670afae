"""Limits for one execution of a file: the free memory, and as many steps as ExecuTorch's runtime allows.

A few bytes of a file can request any amount of memory (`full` with 2**40 elements), and a loop any amount of time. The
system kills a process that uses more memory than there is; here, an error names the operator that requested it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from exir_lowering.errors import InputError

STEPS = 10_000_000
"""How many operators and calls of graphs one execution may have; ExecuTorch's runtime has the same limit."""
_LOOK = 64 << 20
"""How many bytes may be taken before the free memory is checked again, which takes longer than an operator."""
_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Return how many bytes can be allocated without the process being killed; None if the system does not say."""
    found = []
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError, IndexError):  # a container's own limit; its file cache is available too
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        files = sum(int(line.split()[1]) for line in lines if line.startswith(("active_file ", "inactive_file ")))
        found.append(limit - int((_CGROUP / "memory.current").read_text(encoding="ascii")) + files)
    with suppress(ImportError, OSError, ValueError):
        import resource  # not on Windows

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
            found.append(max(limit - int(pages) * resource.getpagesize(), 0))
    if not found:
        with suppress(OSError, ValueError, AttributeError):
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


def check_memory(size: int) -> None:
    """Check that so many bytes of memory are available; InputError if the machine does not have them."""
    free = free_memory() if size > _LOOK else None
    if free is not None and size > free - _LOOK:
        raise InputError(
            f"it needs {_show(size)} of memory, but only {_show(max(free, 0))} are free on this machine. The file "
            "requests too much, or is damaged"
        )


class Budget:
    """Counts what an execution uses; reset for each execution."""

    __slots__ = ("_steps", "_unseen")

    def __init__(self) -> None:
        self._steps, self._unseen = STEPS, 0

    def start(self) -> None:
        """Reset the counts for a new execution."""
        self._steps, self._unseen = STEPS, 0

    def step(self) -> None:
        """Count an operator, or the call of a graph; InputError if the limit is exceeded."""
        self._steps -= 1
        if self._steps < 0:
            raise InputError(
                f"it did not finish within {STEPS:,} steps, the limit of one execution. Does it have an endless loop?"
            )

    def take(self, size: int) -> None:
        """Count bytes that are about to be allocated; InputError if the machine does not have that many."""
        self._unseen += size
        if self._unseen > _LOOK:
            self._unseen = 0
            check_memory(max(size, _LOOK + 1))


def bytes_of(shape: Sequence[int], itemsize: int) -> int:
    """Return the size in bytes of a dense tensor."""
    return itemsize * math.prod(shape)


def extent_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie between a tensor's first and last one, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _show(size: int) -> str:
    amount, unit = float(size), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.1f} {unit}" if unit != "bytes" else f"{size} bytes"
