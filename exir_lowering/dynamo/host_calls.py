"""Calls of higher-order operators that PyTorch makes, as one operator of the program that is lowered.

The line knows nothing of it but its tensors, as of anybody's custom operator; the assembled function has the call in
its place. So what is before and after it is lowered, and nothing is taken together across it that could not be.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.operators import wrapped_operator
from exir_lowering._upstream.schemas import higher_order_name
from exir_lowering._upstream.trees import pytree

REASON = "it is a higher-order operator, which PyTorch calls"

Path = tuple[int, ...]
"""Where a value is in what a call returns: the numbers by which it is taken, one after the other."""


@dataclass(frozen=True, slots=True)
class Operand:
    """An argument of a call that is computed: one of its tensors, or of its numbers."""

    number: bool
    position: int


@dataclass(frozen=True, eq=False)
class HostCall:
    """A call of a higher-order operator, as a function of its tensors and numbers."""

    target: Any
    leaves: Sequence[Any]  # of its arguments, those that are computed as operands
    structure: Any
    returned: Sequence[Path]

    @property
    def __name__(self) -> str:
        return str(higher_order_name(self.target))

    def __call__(self, tensors: Sequence[Any], numbers: Sequence[Any], name: str = "") -> list[Any]:
        """Call the operator, and return those of its results that are used."""
        given = {False: tensors, True: numbers}
        leaves = [given[leaf.number][leaf.position] if isinstance(leaf, Operand) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        result = self.target(*args, **kwargs)
        return [take(result, path) for path in self.returned]


def take(result: Any, path: Path) -> Any:
    """Return a value of what a call returns."""
    for number in path:
        result = result[number]
    return result


def stand_in(call: HostCall, *, random: bool) -> tuple[Any, str]:
    """Return the operator that stands for a call, and its last argument: a name, known for as long as the call is."""
    name = f"{call.__name__} {uuid.uuid4().hex}"
    _calls[name] = call
    return _OPERATORS[random], name


def is_host_call(node: Node) -> bool:
    """Return whether a node stands for a call."""
    return node.op == "call_function" and wrapped_operator(node.target) in _OPERATORS.values()


def host_call(node: Node) -> HostCall:
    """Return the call that a node stands for."""
    return _calls[str(node.args[2])]


def has_host_calls(module: GraphModule) -> bool:
    """Return whether a graph, or one nested in it, has a node that stands for a call."""
    return any(is_host_call(node) for _, inner in graphs.walk(module) for node in inner.graph.nodes)


_calls: weakref.WeakValueDictionary[str, HostCall] = weakref.WeakValueDictionary()
"""Calls by name. No name is given twice, so nothing that was kept of another call, in a cache on disk too, is taken."""


def _define(name: str, *tags: torch.Tag) -> Any:
    schema = "(Tensor[] tensors, SymInt[] numbers, str name) -> Tensor[]"
    torch.library.define(f"exir_lowering_dynamo::{name}", schema, tags=tags)
    torch.library.register_fake(f"exir_lowering_dynamo::{name}")(_describe)
    return getattr(torch.ops.exir_lowering_dynamo, name).default


def _describe(tensors: Sequence[Any], numbers: Sequence[Any], name: str) -> list[torch.Tensor]:
    """Return fake results that share no memory; a random state comes from torch as a real tensor."""
    returned = _calls[name](tensors, numbers)
    return [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device) for one in returned]


_OPERATORS = {
    False: _define("in_pytorch"),
    True: _define("random_in_pytorch", torch.Tag.nondeterministic_seeded),
}
"""What stands for calls; by whether they draw random numbers."""
