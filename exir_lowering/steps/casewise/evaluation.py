"""Operators run on fake tensors, by the rules that hold while torch decomposes, or while ExecuTorch's passes run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from exir_lowering._upstream.conversion import decomposed_call, enable_python_dispatcher
from exir_lowering._upstream.fakes import FakeTensorMode, storage_of
from exir_lowering._upstream.schemas import is_composite
from exir_lowering._upstream.trees import pytree
from exir_lowering.errors.interrupts import let_through
from exir_lowering.steps.casewise.values import renew


def evaluate(node: Node, target: Any, value_of: Callable[[Node], Any], mode: FakeTensorMode, *, gradients: bool) -> Any:
    """Return what a call returns.

    Args:
        node: The call.
        target: Its operator, or the one that it gets.
        value_of: Returns the value of an operand.
        mode: The mode of the values.
        gradients: Whether to run with gradients, as ExecuTorch's passes; decompositions run without, and evaluate
            composite operators by what they consist of.

    Raises:
        Exception: Whatever the operator raises.
    """
    run = target if gradients or not is_composite(target) else decomposed_call(target)
    args, kwargs = map_arg((node.args, dict(node.kwargs)), value_of)
    with mode, enable_python_dispatcher(), torch.set_grad_enabled(gradients):
        return run(*args, **kwargs)


def shared_operands(node: Node, values: Sequence[Any], mode: FakeTensorMode) -> tuple[int, ...]:
    """Return the numbers of the operands whose memory a call's result is in; all if that cannot be found out.

    Args:
        node: The call.
        values: The values of `node.all_input_nodes`.
        mode: The mode of the values.
    """
    operands = node.all_input_nodes
    own = {operand: renew(value, mode) for operand, value in zip(operands, values, strict=True)}
    try:
        result = evaluate(node, node.target, own.__getitem__, mode, gradients=False)
    except Exception as error:
        let_through(error)
        return tuple(range(len(operands)))
    storages = {storage_of(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)}
    return tuple(
        index
        for index, operand in enumerate(operands)
        if any(
            storage_of(leaf) in storages for leaf in pytree.tree_leaves(own[operand]) if isinstance(leaf, torch.Tensor)
        )
    )
