"""A plan of all methods, and the ways to show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from exir_lowering.model import State
from exir_lowering.plans import data, dot, page, text
from exir_lowering.plans.planned import MethodPlan, Unchanged
from exir_lowering.pte.printing import Shown


@dataclass(frozen=True, slots=True, repr=False)
class LoweringPlan(Shown):
    """What `lower` does with some programs and partitioners.

    Attributes:
        methods: A plan for each method, in the order in which they were given.
        states: What the methods keep for later calls, and which of them share it.
        versions: The versions of exir-lowering, executorch and torch.
    """

    methods: tuple[MethodPlan, ...]
    states: tuple[State, ...] = field(default=(), kw_only=True)
    versions: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def backend_ids(self) -> tuple[str, ...]:
        """The backends of the partitions, each once, in the order in which they first occur."""
        return tuple(dict.fromkeys(part.backend_id for method in self.methods for part in method.partitions))

    def beside(self, unchanged: LoweringPlan) -> LoweringPlan:
        """Return the plan, compared with the methods without rewrites.

        Args:
            unchanged: The plan of the same methods without rewrites.
        """
        pairs = zip(self.methods, unchanged.methods, strict=True)
        return replace(
            self,
            methods=tuple(
                replace(
                    method,
                    unchanged=Unchanged(
                        len(other.nodes), len(other.host), len(other.partitions), other.prediction.seconds
                    ),
                )
                for method, other in pairs
            ),
        )

    def to_text(self, *, width: int = 120, everything: bool = False) -> str:
        """Return at most 25 lines, on what helps most, what is on the host and why; or everything.

        Args:
            width: How many characters a line may have; only a word that is longer makes a longer line.
            everything: Whether every operator and partition is listed.
        """
        return text.to_text(self, width, everything=everything)

    def to_json(self) -> str:
        """Return everything as JSON."""
        return data.to_json(self)

    def to_dot(self) -> str:
        """Return the graph of partitions, and of what lies between them, for Graphviz."""
        return dot.to_dot(self)

    def to_html(self) -> str:
        """Return an HTML page with the graph, the coverage and every host operator; it needs no network."""
        return page.to_html(self)

    def __repr__(self) -> str:
        return self.to_text()
