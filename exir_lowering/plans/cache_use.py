"""What the cache did for a lowering, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What the cache had for a method's conversion, or for a partition.

    Attributes:
        kind: "edge" for a conversion to Edge dialect, "preprocess" for a partition.
        method: The method.
        partition: The id of the partition, "" for a conversion.
        hit: Whether the result was in the cache.
        differs: The parts of the key in which the nearest entry differs; () for a hit, or if there is no other entry.
        reason: Why there is no key for it, "" if there is one.
    """

    kind: Literal["edge", "preprocess"]
    method: str
    partition: str
    hit: bool
    differs: tuple[str, ...] = ()
    reason: str = ""

    def explain(self) -> str:
        """Return what happened, in words."""
        if self.hit:
            return "taken from the cache"
        if self.reason:
            return f"not cached: {self.reason}"
        if self.differs:
            return f"the nearest entry differs in: {', '.join(self.differs)}"
        return "the cache has no similar entry"

    def __str__(self) -> str:
        return f"{self.method} {self.partition or 'conversion'}: {self.explain()}"
