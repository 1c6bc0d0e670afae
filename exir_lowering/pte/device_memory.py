"""What a method takes on a device: the parts, their sum, and the table that `plan`, `inspect` and `bench` print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exir_lowering.pte.xnnpack_memory import PayloadMemory


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a method takes on a device, beside the runtime's own code, in bytes.

    What XNNPACK allocates is estimated; of other backends nothing is known but the size of their payloads.
    """

    planned: int  # for tensors: inputs, outputs, state and what flows between kernels and delegates
    state: int  # how much of it is state
    constants: int  # weights that kernels read in the file; of a file that is mapped, only what they have read counts
    packed: int  # weights in the order of XNNPACK's kernels
    workspace: int  # of XNNPACK, for what flows inside its delegates
    running: int  # all of this: what it takes once it has run
    peak: int  # the most it takes; while it is loaded, a delegate's payload and weights are there beside what it packs
    unknown: tuple[str, ...] = ()  # the other backends, which may allocate more

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the rows of a table: the field, its bytes, and what they are for."""
        rows = (
            ("planned", f"planned tensors, {self.state:,} of them state"),
            ("constants", "weights that kernels read in the file"),
            ("packed", "weights that XNNPACK packs"),
            ("workspace", "XNNPACK's workspace"),
            ("running", "all of this, once it has run"),
            ("peak", "the most, with what is read while it is loaded"),
        )
        unknown = [("", "?", f"what {backend} allocates") for backend in self.unknown]
        known = ((name, getattr(self, name), what) for name, what in rows)
        return [(name, f"{size:,}", what) for name, size, what in known if size] + unknown


@dataclass(frozen=True, slots=True)
class DelegateMemory:
    """What a delegate takes, in bytes."""

    backend: str
    read: int  # its payload and weights in the file, while it is loaded
    own: PayloadMemory | None  # what its backend allocates, None if that is not known


def add_up(planned: int, state: int, constants: int, delegates: Sequence[DelegateMemory]) -> DeviceMemory:
    """Return what a method takes whose delegates are set up in this order."""
    packed = workspace = loading = 0
    for one in delegates:
        if one.own is not None:
            packed, workspace = packed + one.own.packed, max(workspace, one.own.workspace)
        loading = max(loading, packed + one.read)
    running = planned + constants + packed + workspace
    unknown = tuple(sorted({one.backend for one in delegates if one.own is None}))
    peak = max(running, planned + constants + loading)
    return DeviceMemory(planned, state, constants, packed, workspace, running, peak, unknown)
