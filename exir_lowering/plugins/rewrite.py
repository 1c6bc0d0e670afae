"""The contract of rewrites: exact changes of programs in Edge dialect, before a partitioner sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch.fx import Node

from exir_lowering.graphs.ranges import Doubt, ValueRanges

__all__ = ["Doubt", "Rewrite", "Scope"]


class Scope(Protocol):
    """What a rewrite may use at one node; everything that it makes is placed before that node."""

    @property
    def ranges(self) -> ValueRanges:
        """What is known about the values in the graph."""

    @property
    def memory(self) -> dict[Any, Any]:
        """A dictionary of this rewrite for this graph, empty at its first node."""

    def call(self, operator: str, *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
        """Add a call of an operator of the Edge dialect.

        Args:
            operator: Its name, such as "aten.mul.Tensor".
            args: Its arguments: nodes, numbers, lists of these.
            like: A node whose value has the same shape, strides and dtype as the result, if there is one: saves time.
            kwargs: Its named arguments.

        Returns:
            The node, with its value, and with the debug handle and the source lines of the node that is rewritten.
        """

    def constant(self, tensor: torch.Tensor) -> Node:
        """Add a lifted constant; constants of equal content and up to 64 KB are one.

        Args:
            tensor: Its content, which nothing may change any more.
        """

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
        when: "always", or "taken": only where the new nodes go to a backend, and cost less than the old ones. The
            partitioners are asked.
    """

    name: ClassVar[str]
    operators: ClassVar[Sequence[str]]
    exactness: ClassVar[Literal["bits", "tolerance"]]
    when: ClassVar[Literal["always", "taken"]] = "always"

    @abstractmethod
    def rewrite(self, node: Node, scope: Scope) -> Node | Doubt | None:
        """Say what to do with a node.

        Args:
            node: A call of one of `operators`. Neither it nor any other node of the graph may be changed.
            scope: Adds nodes, and knows the values in the graph.

        Returns:
            The node whose value replaces the given one, made by `scope` or found in the graph before it; why it is
            left alone, if it has the right form but equality cannot be proven; None if it does not concern this
            rewrite.
        """
