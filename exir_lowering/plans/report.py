"""The report of a lowering: what was delegated, what was not and why, and where the time went."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table

from exir_lowering.model import NarrowedDimension, RefusedPartition
from exir_lowering.plans import text
from exir_lowering.plans.cache_use import CacheUse
from exir_lowering.plans.lowering_plan import LoweringPlan


@dataclass
class Times:
    """The seconds spent in each step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the duration of the body to a step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True, repr=False)
class Report(LoweringPlan):
    """What a lowering did: its plan, the sizes of the payloads, and the times.

    Attributes:
        payload_bytes: The size of each partition's payload in bytes.
        seconds: The time of each step: edge, rewrite, tag, extract, plan, preprocess, splice.
        left_to_executorch: By method, the steps of the Edge conversion that went ExecuTorch's slower way, each with the
            reason; methods that have none are left out.
        cache: What was in the cache and what was not, and why; () without a cache.
        switched_off: What of ours was off in this process, each with the reason: it relies on code of torch or
            ExecuTorch that is not known, and upstream's own was used instead.
        refused: What backends failed on, where `on_backend_error` says to go on without it.
        units: By partition, on which unit a backend's compiler put which operators, if it says so.
        narrowed: The dynamic dimensions of inputs that may have fewer sizes in Edge dialect than in the programs.
    """

    payload_bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    left_to_executorch: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cache: tuple[CacheUse, ...] = ()
    switched_off: tuple[str, ...] = ()
    refused: tuple[RefusedPartition, ...] = ()
    units: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    narrowed: tuple[NarrowedDimension, ...] = ()

    def table(self) -> Table:
        """Return the delegation table."""
        # Fits a terminal with 60 columns.
        table = Table(title="Delegation", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        for column in ("method", "delegates", "ops\nin them", "ops\non host", "share", "payload"):
            left = column in ("method", "delegates")
            table.add_column(column, justify="left" if left else "right", overflow="fold")
        for method in self.methods:
            backends = Counter(partition.backend_id for partition in method.partitions)
            table.add_row(
                method.name,
                ", ".join(f"{count} x {backend}" for backend, count in backends.items()) or "none",
                str(method.delegated),
                str(len(method.host)),
                f"{method.coverage:.1%}",
                f"{sum(self.payload_bytes[partition.id] for partition in method.partitions):,} B",
            )
        return table

    def to_text(self, *, width: int = 120, everything: bool = False) -> str:
        """Return the plan's text, the delegation table and the times, as plain text.

        Args:
            width: The most columns of a line.
            everything: Whether every partition and every operator on the host is listed.

        Returns:
            The text.
        """
        console = Console(width=width, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(self.table())
            console.print("  ".join(f"{step} {seconds:.2f} s" for step, seconds in self.seconds.items()))
            for method, steps in self.left_to_executorch.items():
                for step in steps:
                    console.print(f"{method}: ExecuTorch did {step}", markup=False)
            for dimension in self.narrowed:
                console.print(str(dimension), markup=False)
            for partition in self.refused:
                console.print(str(partition), *partition.sources, sep="\n  ", markup=False)
            for partition_id, units in self.units.items():
                placed = ", ".join(f"{len(names)} on {unit}" for unit, names in units.items())
                console.print(f"{partition_id}: of its operators {placed or 'none was placed'}", markup=False)
            for feature in self.switched_off:
                console.print(f"off: {feature}", markup=False)
            if self.cache:
                console.print(f"cache: {sum(use.hit for use in self.cache)} of {len(self.cache)} taken from it")
        own = capture.get()
        most = max(text.LINES // 2, text.LINES - len(own.splitlines()))
        return text.to_text(self, width, everything=everything, most=most) + own
