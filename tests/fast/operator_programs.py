"""Programs of one operator, from the samples that torch tests its operators with."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from operator_samples import sample_inputs
from torch import nn
from torch.export import ExportedProgram, export
from torch.utils import _pytree as pytree

DTYPES = (torch.float32, torch.float16, torch.int64, torch.bool)
VARIANTS = (
    "inputs",
    "strided",
    "stored",
    "in place",
    "in place on input",
    "numbers as tensors",
    "twice",
    "through views",
)


@functools.cache
def operators() -> Sequence[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return sorted(op_db, key=lambda op: op.full_name)


class One(nn.Module):
    """Calls a function on tensors, some of which are its parameters and buffers."""

    def __init__(self, function: Callable[..., Any], leaves: Sequence[Any], spec: Any, variant: str) -> None:
        super().__init__()
        self.function, self.spec, self.variant = function, spec, variant
        self.others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.stored: dict[int, str] = {}
        for index in self.places if variant == "stored" else ():
            self.stored[index] = f"stored{index}"
            if leaves[index].is_floating_point() and index % 3 == 0:
                self.register_parameter(f"stored{index}", nn.Parameter(leaves[index].detach().clone()))
            else:
                self.register_buffer(f"stored{index}", leaves[index])

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = [self._constant(leaf) for leaf in self.others]
        for index, tensor in zip([i for i in self.places if i not in self.stored], tensors, strict=False):
            leaves[index] = tensor
        for index, name in self.stored.items():
            leaves[index] = getattr(self, name)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        if self.variant in ("in place", "through views"):
            args = (args[0] + 0 if args[0].dtype is not torch.bool else args[0].clone(), *args[1:])
        if self.variant == "through views":
            self.function(args[0].view_as(args[0]), *args[1:], **kwargs)
            return args[0], args[0].reshape(-1)
        result = self.function(*args, **kwargs)
        if self.variant == "twice":
            return result, self.function(*args, **kwargs)
        return (result, args[0].sum()) if "in place" in self.variant else (result,)

    def _constant(self, leaf: Any) -> Any:
        if self.variant == "numbers as tensors" and type(leaf) in (int, float, bool):
            return torch.tensor(leaf)
        return leaf


class Many(nn.Module):
    """Calls several modules, each on inputs of its own."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.modules_ = nn.ModuleList(modules)

    def forward(self, *inputs: Sequence[torch.Tensor]) -> Any:
        return tuple(module(*own) for module, own in zip(self.modules_, inputs, strict=True))


@dataclass(frozen=True)
class Call:
    """A call of an operator.

    Attributes:
        name: The operator, its dtype, and what is special about the call.
        module: Calls it.
        inputs: Its tensors.
    """

    name: str
    module: One
    inputs: tuple[torch.Tensor, ...]

    @property
    def writes(self) -> bool:
        return self.module.variant in ("in place", "in place on input", "through views")


def call(seed: int) -> Call | None:
    """Make the call of a seed: each operator comes once in as many seeds as there are; None if it has no sample."""
    random_ = random.Random(seed)
    torch.manual_seed(seed)
    op = operators()[seed % len(operators())]
    dtypes = [dtype for dtype in DTYPES if dtype in op.dtypes]
    if not dtypes:
        return None
    dtype, variant = random_.choice(dtypes[:1] * 3 + dtypes), random_.choice(VARIANTS)
    function = op.inplace_variant if variant in ("in place", "in place on input", "through views") else op.op
    if function is None:
        function, variant = op.op, "inputs"
    samples = list(itertools.islice(sample_inputs(op, dtype), 40))
    if not samples:
        return None
    sample = random_.choice(samples)
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)) > 100_000:
        return None
    if variant == "strided":
        leaves = [_strided(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    module = One(function, leaves, spec, variant)
    inputs = tuple(leaves[index] for index in module.places if index not in module.stored)
    return Call(f"{op.full_name} {dtype} {variant}", module, inputs or (torch.randn(2),))


def export_calls(calls: Sequence[Call]) -> ExportedProgram:
    """Make one program of several calls."""
    return export(Many([one.module for one in calls]), tuple(one.inputs for one in calls), strict=False)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same content that is not contiguous."""
    if tensor.dim() < 2:
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    return tensor.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
