"""What the values of nodes are like, fake tensors made from them, and what a process has found out about them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from exir_lowering._upstream.fakes import FakeTensor, FakeTensorMode, make_fake, storage_of
from exir_lowering._upstream.guards import without_guards
from exir_lowering._upstream.likeness import SYMBOLS, Likeness
from exir_lowering._upstream.operators import is_composite
from exir_lowering._upstream.programs import pytree
from exir_lowering._upstream.tracing import decomposed_call, enable_python_dispatcher
from exir_lowering.graphs.measures import tensors


class Uncovered(Exception):
    """What the conversion by cases does not cover; its text is the reason for the report."""


def describe_arguments(arguments: Any, number: Callable[[Node], int]) -> Hashable:
    """Describe the arguments of a call, with nodes as numbers; Uncovered for a type not expected in a graph."""

    def other(value: Any) -> Hashable:
        if isinstance(value, Node):
            return Node, number(value)
        if isinstance(value, SYMBOLS):
            raise Uncovered("a symbolic size that no node stands for")
        raise Uncovered(f"an argument of type {type(value).__name__}")

    return Likeness(Uncovered, other).describe(arguments)


_REMEMBERED = 20_000  # how many cases of earlier programs a process remembers; one takes a few kilobytes


class Memory(OrderedDict[Hashable, Any]):
    """What has been found out about cases, the most recently used ones. Threads take turns: conversions have a lock."""

    def find(self, key: Hashable) -> Any:
        """Return what is known of a case, None if nothing is."""
        found = self.get(key)
        if found is not None:
            self.move_to_end(key)
        return found

    def put(self, key: Hashable, found: Any) -> None:
        """Remember what was found."""
        self[key] = found
        if len(self) > _REMEMBERED:
            self.popitem(last=False)


MEMORY = Memory()  # what this process knows of cases without symbols; those with symbols belong to one program


def renew(value: Any, mode: FakeTensorMode | None, *, gradients: bool = True) -> Any:
    """Return equal fake tensors that share nothing with the given ones, of a mode, or of theirs if that is None."""
    if isinstance(value, FakeTensor):
        return make_fake(value, mode or value.fake_mode, requires_grad=gradients and value.requires_grad)
    if isinstance(value, (list, tuple)):
        return pytree.tree_map_only(torch.Tensor, lambda tensor: renew(tensor, mode, gradients=gradients), value)
    return value


_NO_PROGRAM = FakeTensorMode()
"""The mode of what a process remembers: that of a program would keep its symbols alive, and all it knows of them."""


def outlast(value: Any) -> Any:
    """Return a value that keeps no program alive; Uncovered if it has symbols: they stand for what depends on data."""
    likeness = Likeness(Uncovered, constants=True)
    likeness.describe(value)
    if likeness.symbolic:
        raise Uncovered("an operator whose result depends on data")
    return renew(value, _NO_PROGRAM)


def evaluate(node: Node, target: Any, value_of: Callable[[Node], Any], mode: FakeTensorMode, *, gradients: bool) -> Any:
    """Return what a call returns with an operator; without gradients, composite ones are decomposed, as torch does."""
    run = target if gradients or not is_composite(target) else decomposed_call(target)
    args, kwargs = map_arg((node.args, dict(node.kwargs)), value_of)
    # The example's sizes decide nothing: a guard would narrow what export said.
    with mode, enable_python_dispatcher(), torch.set_grad_enabled(gradients), without_guards(mode.shape_env):
        return run(*args, **kwargs)


def storages_of(value: Any) -> set[int]:
    """Return the storages of all tensors in a value."""
    return set(map(storage_of, tensors(value)))


def check_eager(target: Any, value: Any) -> None:
    """Raise Uncovered for a value that torch may conjugate or negate later, when an operator reads it."""
    if any(tensor.dtype.is_complex for tensor in tensors(value)):
        raise Uncovered("complex numbers")
    if target is torch.ops.aten._neg_view.default:
        raise Uncovered(f"{target}")


def require_gradients(value: Any) -> bool:
    """Return whether a tensor of a value requires a gradient."""
    return any(tensor.requires_grad for tensor in tensors(value))
