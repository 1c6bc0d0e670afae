"""Calls of single operators, in every type."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_LARGEST = 20_000
_RANDOM = frozenset(
    {
        *("bernoulli", "empty", "empty_like", "empty_permuted", "empty_strided", "multinomial", "new_empty"),
        *("new_empty_strided", "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d"),
        *("nn.functional.dropout3d", "nn.functional.feature_alpha_dropout.with_train", "nn.functional.rrelu"),
        *("normal", "normal.in_place", "normal.number_mean", "rand_like", "randint", "randint_like", "randn"),
        *(
            "randn_like",
            "uniform",
            "exponential",
            "geometric",
            "cauchy",
            "log_normal",
            "nn.functional.fractional_max_pool2d",
        ),
        "nn.functional.fractional_max_pool3d",
    }
)


class Calls(nn.Module):
    """Calls a function; tensors among its arguments are inputs."""

    def __init__(self, function: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> None:
        super().__init__()
        self.function, self.spec = function, spec
        self.others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.others)
        for index, tensor in zip(self.places, tensors, strict=False):
            leaves[index] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        # Not torch's named tuples, which torch.export does not serialize.
        return tuple(pytree.tree_leaves(self.function(*args, **kwargs)))


@dataclass(frozen=True)
class Call:
    """A call of an operator: what it is, and what calls it, with its tensors."""

    name: str
    module: nn.Module | None
    inputs: tuple[torch.Tensor, ...]


def make_call(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """Make the call of a function."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    leaves = [leaf.detach().contiguous() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    module = Calls(function, leaves, spec)
    inputs = tuple(leaves[index] for index in module.places)
    shown = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs)
    others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    return Call(f"{name}({shown}; {str(others)[1:-1]})", module, inputs)


@functools.cache
def operators() -> Sequence[Any]:
    """Return torch's own tests of operators, each operator once."""
    from torch.testing._internal.common_methods_invocations import op_db

    return sorted((op for op in op_db if op.full_name not in _RANDOM), key=lambda op: op.full_name)


def sample_calls(op: Any, each: int, mixed: int, empty: int) -> Iterator[Call]:
    """Return calls of an operator with torch's own samples: of each type, of mixed types, and without elements."""
    chosen = random.Random(op.full_name)
    kept: list[tuple[list[Any], Any]] = []
    for dtype in (dtype for dtype in DTYPES if dtype in op.dtypes):
        torch.manual_seed(0)
        found: dict[Any, tuple[list[Any], Any]] = {}
        try:
            samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 80))
        except Exception:  # torch's samples do not cover each type that it supports
            continue
        for sample in chosen.sample(samples, len(samples)):
            leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if sum(tensor.numel() for tensor in tensors) <= _LARGEST:
                shapes = [min(tensor.dim(), 1) - 2 * (tensor.numel() == 0) for tensor in tensors]
                found.setdefault((str(shapes), str(spec)), (leaves, spec))
        for leaves, spec in itertools.islice(found.values(), each):
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            yield make_call(op.full_name, op.op, *args, **kwargs)
        kept += list(found.values())[: each + 2]
    for _ in range(mixed if kept else 0):
        leaves, spec = chosen.choice(kept)
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if len(places) > 1:
            other = list(leaves)
            place = chosen.choice(places)
            other[place] = leaves[place].detach().to(chosen.choice(DTYPES))
            args, kwargs = pytree.tree_unflatten(other, spec)
            yield make_call(op.full_name, op.op, *args, **kwargs)
    for _ in range(empty if kept else 0):
        leaves, spec = chosen.choice(kept)
        sizes = sorted({size for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape})
        if sizes:
            gone = chosen.choice(sizes)
            args, kwargs = pytree.tree_unflatten([_without(leaf, gone) for leaf in leaves], spec)
            yield make_call(op.full_name, op.op, *args, **kwargs)


def _without(leaf: Any, gone: int) -> Any:
    """Return a tensor whose dimensions of a size are empty."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().new_empty([0 if size == gone else size for size in leaf.shape])
