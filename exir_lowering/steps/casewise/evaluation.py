"""Operators run on fake tensors, by the rules that hold while torch decomposes, or while ExecuTorch's passes run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from exir_lowering._upstream.fakes import FakeTensorMode, storage_of
from exir_lowering._upstream.retracing import decomposed_call, enable_python_dispatcher
from exir_lowering._upstream.schemas import is_composite
from exir_lowering._upstream.tensors import version
from exir_lowering._upstream.trees import pytree
from exir_lowering.errors.interrupts import let_through
from exir_lowering.steps.casewise.values import renew


def evaluate(node: Node, target: Any, value_of: Callable[[Node], Any], mode: FakeTensorMode, *, gradients: bool) -> Any:
    """Return what a call returns with an operator, its own or the one that it gets; raise what the operator raises.

    ExecuTorch's passes run with gradients; decompositions run without, and take composite operators apart.
    """
    run = target if gradients or not is_composite(target) else decomposed_call(target)
    args, kwargs = map_arg((node.args, dict(node.kwargs)), value_of)
    with mode, enable_python_dispatcher(), torch.set_grad_enabled(gradients):
        return run(*args, **kwargs)


def shared_operands(node: Node, values: Sequence[Any], mode: FakeTensorMode) -> tuple[int, ...]:
    """Return the numbers of the operands whose memory a call's result is in; all if that cannot be found out.

    `values` are those of `node.all_input_nodes`.
    """
    operands = node.all_input_nodes
    own = [renew(value, mode) for value in values]
    found = _try(node, own, mode)
    if found is None:
        return tuple(range(len(operands)))
    storages = storages_of(found)
    return tuple(index for index, value in enumerate(own) if storages & storages_of(value))


def viewed_operands(node: Node, values: Sequence[Any], mode: FakeTensorMode) -> tuple[int, ...]:
    """Return the numbers of the operands in whose memory a call's result is another tensor, as in `shared_operands`."""
    shared = shared_operands(node, values, mode)
    own = [renew(value, mode) for value in values]
    found = {id(tensor) for tensor in _tensors(_try(node, own, mode))}
    return tuple(index for index in shared if not found <= {id(tensor) for tensor in _tensors(own[index])})


def leaves_as_it_is(node: Node, values: Sequence[Any], mode: FakeTensorMode) -> bool:
    """Return whether a call of an in-place operator writes nothing, such as dropout in inference."""
    own = [renew(value, mode, gradients=False) for value in values]
    before = [version(tensor) for tensor in _tensors(own)]
    return _try(node, own, mode) is not None and before == [version(tensor) for tensor in _tensors(own)]


def _try(node: Node, values: Sequence[Any], mode: FakeTensorMode) -> Any:
    value_of = dict(zip(node.all_input_nodes, values, strict=True)).__getitem__
    try:
        return evaluate(node, node.target, value_of, mode, gradients=False)
    except Exception as error:
        let_through(error)
        return None


def storages_of(value: Any) -> set[int]:
    """Return the storages of all tensors in a value."""
    return {storage_of(tensor) for tensor in _tensors(value)}


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
