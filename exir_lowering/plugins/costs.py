"""The contract of cost models: what operators cost on the host and on backends, and what it costs to move data."""

from __future__ import annotations

import sys
from numbers import Real
from typing import Any, Protocol

from torch.fx import Node

from exir_lowering.errors import InputError
from exir_lowering.errors.interrupts import let_through

HOST = "host"
"""The place of operators that no backend takes, in tables and models."""

_METHODS = ("node_cost", "call_cost")


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


def check_cost(model: Any, what: str, cost: Any) -> float:
    """Return a model's answer as a number; InputError if it is not a finite number of at least 0."""
    number = isinstance(cost, Real) and not isinstance(cost, bool)
    if not number or not 0 <= cost <= sys.float_info.max:
        raise InputError(
            f"The cost model {type(model).__name__} has {what} = {cost!r}, expected a finite number of at least 0."
        )
    return float(cost)


def ask_cost(model: Any, what: str, *arguments: Any) -> Any:
    """Return a model's answer, as it is, to a method or property of that name; InputError if the model raises."""
    try:
        asked = getattr(model, what)
        return asked(*arguments) if what in _METHODS else asked
    except Exception as error:
        let_through(error)
        given = ", ".join(map(repr, arguments))
        raise InputError(
            f"The cost model {type(model).__name__} raised {type(error).__name__}: {error}. It was asked for "
            f"{what}{f'({given})' if given else ''}, expected a number."
        ) from error
