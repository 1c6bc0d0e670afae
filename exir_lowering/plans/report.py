"""The report of a lowering: its plan, with sizes, times, and what the cache had."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import RenderableType
from rich.table import Table

from exir_lowering.model import NarrowedDimension, RefusedPartition
from exir_lowering.plans import views
from exir_lowering.plans.lowering_plan import LoweringPlan
from exir_lowering.pte.printing import in_notebook, make_table, render


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


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What the cache had for a partition.

    Attributes:
        method: The method.
        partition: The id of the partition.
        hit: Whether the result was in the cache.
        reason: Why there is no key for it, "" if there is one.
    """

    method: str
    partition: str
    hit: bool
    reason: str = ""

    def explain(self) -> str:
        """Return what happened, in words."""
        if self.hit:
            return "taken from the cache"
        return f"not cached: {self.reason}" if self.reason else "not in the cache"

    def __str__(self) -> str:
        return f"{self.method} {self.partition}: {self.explain()}"


@dataclass(frozen=True, slots=True, repr=False)
class Report(LoweringPlan):
    """What a lowering did: its plan, the sizes of the payloads, and the times.

    Attributes:
        payload_bytes: The size of each partition's payload in bytes.
        seconds: The time of each step: edge, rewrite, tag, extract, plan, preprocess, splice.
        left_to_executorch: By method, the steps of the Edge conversion that ExecuTorch's slower code did, each with the
            reason; methods without any are left out.
        cache: What was in the cache and what was not, and why; () without a cache.
        switched_off: The features that were off in this process, each with the reason: they rely on code of torch or
            ExecuTorch that is not known, so upstream's code was used.
        refused: The partitions that backends failed on, if `on_backend_error` is "fallback" or "split".
        narrowed: The dynamic dimensions of inputs that may have fewer sizes in the file than in the programs.
    """

    payload_bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    left_to_executorch: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cache: tuple[CacheUse, ...] = ()
    switched_off: tuple[str, ...] = ()
    refused: tuple[RefusedPartition, ...] = ()
    narrowed: tuple[NarrowedDimension, ...] = ()

    def table(self) -> Table:
        """Return the delegation table."""
        # Fits a terminal with 60 columns.
        numbers = ("ops\nin them", "ops\non host", "share", "payload")
        rows = []
        for method in self.methods:
            payload = sum(self.payload_bytes[partition.id] for partition in method.partitions)
            counts = (str(method.delegated), str(len(method.host)), f"{method.coverage:.1%}", f"{payload:,} B")
            rows.append((method.name, views.destinations(method, "none"), *counts))
        return make_table(("method", "delegates", *numbers), rows, numbers, "Delegation")

    def to_text(self, *, width: int = 120, everything: bool = False) -> str:
        """Return the plan's text, the delegation table and the times, as plain text.

        Args:
            width: The most columns of a line.
            everything: Whether every partition and every operator on the host is listed.

        Returns:
            The text.
        """
        own = render(self._parts(), width)
        most = max(views.LINES // 2, views.LINES - len(own.splitlines()))
        return views.to_text(self, width, everything=everything, most=most) + own

    def _parts(self) -> Iterator[RenderableType]:
        yield self.table()
        yield "  ".join(f"{step} {seconds:.2f} s" for step, seconds in self.seconds.items())
        for method, steps in self.left_to_executorch.items():
            yield from (f"{method}: ExecuTorch did {step}" for step in steps)
        yield from (str(one) for one in self.narrowed if one.given[1] is not None)  # a warning tells of the others
        for partition in self.refused:
            yield "\n  ".join((str(partition), *partition.sources))
        yield from (f"off: {feature}" for feature in self.switched_off)
        if self.cache:
            yield f"cache: {sum(use.hit for use in self.cache)} of {len(self.cache)} results taken from it"

    def _repr_html_(self) -> str:
        # Not the plan's page: that has neither payloads nor times.
        return in_notebook(self.to_text)
