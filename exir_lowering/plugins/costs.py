"""The contract of cost models: what operators cost on the host and on backends, and what it costs to move data."""

from __future__ import annotations

from typing import Protocol

from torch.fx import Node

HOST = "host"
"""The place of operators that no backend takes, in tables and models."""


class CostModel(Protocol):
    """Costs for plans and `Limits(min_gain=...)`: finite, not negative, and all in one unit."""

    @property
    def unit(self) -> str:
        """The unit of all costs, for messages; a plan takes models in "seconds" only."""

    @property
    def byte_cost(self) -> float:
        """What it costs to bring one byte from one place to another."""

    def node_cost(self, node: Node, place: str) -> float | None:
        """Return what an operator costs at a place, "host" or a backend; None if it is unknown or cannot be there.

        Args:
            node: The operator.
            place: The place.
        """

    def call_cost(self, place: str) -> float:
        """Return what each call of a partition of a backend costs, on top of its operators."""
