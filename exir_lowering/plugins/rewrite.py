"""Rewrites, exact changes of programs in Edge dialect before a partitioner sees them: their contract, and finding them.

One is given as an object, registered in this process, or installed with an entry point.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch.fx import Node

from exir_lowering.errors import InputError, PluginLoadError
from exir_lowering.graphs.ranges import Doubt as Doubt, ValueRanges
from exir_lowering.plugins import registry

_Class = TypeVar("_Class", bound=type)


class Scope(Protocol):
    """What a rewrite may use at one node; everything that it makes is placed before that node."""

    @property
    def ranges(self) -> ValueRanges:
        """What is known about the values in the graph."""

    @property
    def memory(self) -> dict[Any, Any]:
        """A dictionary of this rewrite for this graph, empty at its first node."""

    def call(self, operator: str, *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
        """Return a new call of an Edge operator, with its value, and the debug handle and lines of what is rewritten.

        Args:
            operator: Its name, such as "aten.mul.Tensor".
            args: Its arguments: nodes, numbers, lists of these.
            like: A node whose value has the same shape, strides and dtype as the result, if there is one: saves time.
            kwargs: Its named arguments.
        """

    def constant(self, tensor: torch.Tensor) -> Node:
        """Add a lifted constant, whose tensor must not change afterwards; equal ones of up to 64 KB are stored once."""

    def exists(self, node: Node) -> bool:
        """Return whether a node that a rewrite remembers is still in the graph."""

    def is_returned(self, node: Node) -> bool:
        """Return whether the method returns a node's value, or writes it to a buffer or an input."""


class Rewrite(ABC):
    """Replaces a node, and what only it needs, by something that computes the same.

    The graph is walked once, from the inputs to the outputs, so a rewrite finds its operands rewritten already. A
    pattern is therefore found from its last node.

    Attributes:
        name: The name, by which options and reports refer to it.
        operators: The names of the operators that it looks at, such as "aten.expand_copy.default"; "getitem" for
            results of operators with several; "*" for all.
        exactness: Whether results are the same bits, with kernels that compute each operator as eager PyTorch does, or
            equal within the rounding of their dtype ("tolerance").
        when: "always", or "taken": only where the new nodes go to a backend, and cost less than the old ones, for
            which the partitioners are asked.
    """

    name: ClassVar[str]
    operators: ClassVar[Sequence[str]]
    exactness: ClassVar[Literal["bits", "tolerance"]]
    when: ClassVar[Literal["always", "taken"]] = "always"

    @abstractmethod
    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Decide what to do with a node.

        Args:
            node: A call of one of `operators`. Neither it nor any other node of the graph may be changed.
            scope: Adds nodes, and knows the values in the graph.

        Returns:
            The node whose value replaces the given one, made by `scope` or found in the graph before it; why it is
            left alone, if it has the right form but equality cannot be proven; None if it does not concern this
            rewrite.
        """


def register_rewrite(rewrite: _Class) -> _Class:
    """Return a `Rewrite` class, registered in this process under its `name`; a class decorator.

    It runs where `LoweringOptions(rewrites=[...])` names it.

    Raises:
        PluginLoadError: It is not a Rewrite class, has no name or no `rewrite`, or its name is already taken.
    """
    registry.register(registry.REWRITES, registry.check_class("register_rewrite", rewrite, Rewrite, "name"), rewrite)
    return rewrite


def find_rewrites(chosen: str | Sequence[Any]) -> tuple[Rewrite, ...]:
    """Return the rewrites of `LoweringOptions.rewrites`; InputError if it is invalid, or two have the same name."""
    found: dict[str, Rewrite] = {}
    for one in [chosen] if isinstance(chosen, str) else chosen:
        if one == "none":
            continue
        given = registry.load(registry.REWRITES, one) if isinstance(one, str) else one
        for candidate in given if isinstance(one, str) and isinstance(given, (list, tuple)) else [given]:
            rewrite = _make(one, candidate)
            earlier = found.setdefault(rewrite.name, rewrite)
            if type(earlier) is not type(rewrite):
                raise InputError(
                    f"rewrites: {type(earlier).__qualname__} and {type(rewrite).__qualname__} are both named "
                    f"{rewrite.name!r}. Give one of them another name."
                )
    return tuple(found.values())


def _make(asked: Any, rewrite: Any) -> Rewrite:
    """Return a checked Rewrite, for an object or a class that was given or is installed under a name."""
    if isinstance(rewrite, type) and issubclass(rewrite, Rewrite):
        who = f"Rewrite {asked!r}" if isinstance(asked, str) else "rewrites"
        rewrite = registry.create(f"{who}: creating {rewrite!r}", rewrite)
    if not isinstance(rewrite, Rewrite):
        if isinstance(asked, str):
            raise PluginLoadError(
                f"Rewrite {asked!r}: got {rewrite!r}, expected a Rewrite or a tuple of Rewrites. Correct the entry "
                f"point or the registration in group {registry.REWRITES!r}."
            )
        raise InputError(f"rewrites: got {rewrite!r}, expected a name, a Rewrite object or a Rewrite class.")
    name, operators = getattr(rewrite, "name", None), getattr(rewrite, "operators", None)
    if not isinstance(name, str) or not name:
        raise PluginLoadError(f"Rewrite {type(rewrite).__qualname__}: the name is {name!r}, expected a text.")
    known = list(operators) if isinstance(operators, Sequence) and not isinstance(operators, str) else [None]
    if not all(isinstance(one, str) for one in known):
        raise PluginLoadError(f"Rewrite {name!r}: operators is {operators!r}, expected a tuple of operator names.")
    for attribute, possible in (("exactness", ("bits", "tolerance")), ("when", ("always", "taken"))):
        value = getattr(rewrite, attribute, None)
        if value not in possible:
            raise PluginLoadError(f"Rewrite {name!r}: {attribute} is {value!r}, expected one of {possible}.")
    return rewrite
