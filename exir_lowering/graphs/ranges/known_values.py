"""Values that are known when a program is lowered."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from exir_lowering._upstream.ambient import neutral
from exir_lowering._upstream.tensors import is_dense
from exir_lowering.errors import ignoring_errors
from exir_lowering.graphs.copies import LIFTED_ORDER, lifted_value, written_state
from exir_lowering.graphs.operators.names import argument
from exir_lowering.graphs.operators.purity import only_computes
from exir_lowering.graphs.ranges.intervals import TOP, Range, whole
from exir_lowering.graphs.ranges.nodes import compute_for, name_of, product
from exir_lowering.graphs.walking import is_getitem

_LARGEST = 1 << 20
"""The number of elements up to which a value is computed."""

_BUDGET = 1 << 24
"""The number of elements that are computed in all."""

PIECES: Mapping[str, Any] = {
    "aten.split_copy.Tensor": torch.ops.aten.split.Tensor,
    "aten.split_with_sizes_copy.default": torch.ops.aten.split_with_sizes.default,
    "aten.unbind_copy.int": torch.ops.aten.unbind.int,
}
"""Operators that cut a tensor into pieces, with those that make views of it, for any number of elements."""


class Constants:
    """The values of a program, which may be edited meanwhile, that depend on its weights but not on `volatile` ones."""

    def __init__(self, program: ExportedProgram, volatile: Collection[str]) -> None:
        self._program, self._volatile = program, frozenset(volatile)
        self._specs = -1
        self._targets: dict[str, str | None] = {}
        self._written: frozenset[str] = frozenset()
        self._values: dict[Node, Any] = {}
        self._extremes: dict[Any, tuple[torch.Tensor, Range]] = {}
        self._left = _BUDGET

    def stored(self, node: Node) -> torch.Tensor | None:
        """Return the tensor of a placeholder, also if the program mutates it; None if it is an input."""
        target = self._target(node)
        found = lifted_value(self._program, target) if target is not None else None
        return found if is_dense(found) else None

    def mutated(self, node: Node) -> str | None:
        """Return the name of the state that a placeholder stands for, if the program, or someone else, mutates it."""
        target = self._target(node)
        return target if target in self._written else None  # a parameter, too: another method may write it

    def _target(self, node: Node) -> str | None:
        specs = self._program.graph_signature.input_specs
        if len(specs) != self._specs:
            self._specs, self._written = len(specs), self._volatile | written_state(self._program)
            self._targets = {spec.arg.name: spec.target for spec in specs if spec.kind in LIFTED_ORDER}
        return self._targets.get(node.name) if node.op == "placeholder" else None

    def value(self, node: Node) -> torch.Tensor | None:
        """Return the content of a value, None if it is not known, or large and not stored."""
        found = compute_for(node, self._values, lambda each: each.all_input_nodes, self._evaluate)
        return found if isinstance(found, torch.Tensor) else None

    def extremes(self, tensor: torch.Tensor) -> Range:
        """Return the range of a tensor's elements; each tensor is read once."""
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        found = self._extremes.get(key)
        if found is None:
            found = self._extremes[key] = (tensor, _extremes(tensor))  # the tensor keeps its address
        return found[1]

    def _evaluate(self, node: Node) -> Any:
        """Compute a value from those of its operands; None if it is not known."""
        if node.op == "placeholder":
            return None if self.mutated(node) is not None else self.stored(node)
        if not only_computes(node) or any(self._values[each] is None for each in node.all_input_nodes):
            return None
        target: Any = PIECES.get(name_of(node), node.target)
        if not is_getitem(node) and target is node.target:
            fakes = node.meta.get("val")
            fakes = fakes if isinstance(fakes, (tuple, list)) else [fakes]
            elements = sum(product(each.shape) if isinstance(each, torch.Tensor) else _BUDGET for each in fakes)
            if elements > min(_LARGEST, self._left):
                return None
            self._left -= int(elements)
        args: Any = map_arg(node.args, self._values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, self._values.__getitem__)
        with ignoring_errors(), neutral():  # it will raise in the runtime too, or there is no kernel in this process
            return target(*args, **kwargs)
        return None


def _extremes(tensor: torch.Tensor) -> Range:
    """Return the least and the largest element that is a number, in one thread: torch's would wait for each other."""
    if tensor.numel() == 0 or tensor.is_complex():
        return TOP if tensor.is_complex() else Range(0.0, 0.0)
    try:
        with neutral():
            array = tensor.detach().numpy()
            low, high = float(np.fmin.reduce(array, axis=None)), float(np.fmax.reduce(array, axis=None))
    except (RuntimeError, TypeError):  # a type that numpy does not have
        if tensor.dtype is not torch.bfloat16:
            return whole(tensor.dtype)
        low, high = map(float, torch.aminmax(tensor.detach()))
    exact = low == low and (tensor.is_floating_point() or max(-low, high) < 2.0**52)
    return Range(low, high) if exact else whole(tensor.dtype)


FILLED: Mapping[str, str | float] = {
    **dict.fromkeys(("aten.full.default", "aten.full_like.default"), "fill_value"),
    "aten.scalar_tensor.default": "s",
    **dict.fromkeys(("aten.zeros.default", "aten.zeros_like.default"), 0.0),
    **dict.fromkeys(("aten.ones.default", "aten.ones_like.default"), 1.0),
}
"""Generator operators, with the number that fills the result, or the argument that it is."""


def filling(node: Node, dtype: torch.dtype | None) -> float | None:
    """Return the number with which a generator operator fills its result of a type; None for other nodes."""
    value: Any = FILLED.get(name_of(node))
    value = argument(node, value) if isinstance(value, str) else value
    known = isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 52)
    if not known or dtype is None or dtype.is_complex:
        return None
    try:
        return float(torch.tensor(value, dtype=dtype, device="cpu").item())
    except (RuntimeError, OverflowError, ValueError):
        return None
