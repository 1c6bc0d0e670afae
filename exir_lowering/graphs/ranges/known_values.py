"""Values that are known when a program is lowered."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from exir_lowering._upstream.ambient import neutral
from exir_lowering._upstream.operators import mutates_arguments, wrapped_operator
from exir_lowering._upstream.tensors import is_dense
from exir_lowering.graphs.copies import LIFTED_ORDER, lifted_value, written_state
from exir_lowering.graphs.operators.names import argument, target_name
from exir_lowering.graphs.ranges.intervals import TOP, Range, whole
from exir_lowering.graphs.ranges.transfers import Found, name_of, product, shape_of
from exir_lowering.graphs.walking import is_getitem

_LARGEST = 1 << 20
"""The number of elements up to which a value is computed."""

_BUDGET = 1 << 24
"""The number of elements that are computed in all."""

_NAMESPACES = ("aten.", "dim_order_ops.", "quantized_decomposed.")


class Constants:
    """The values of a program that depend on nothing but its weights.

    The program may be edited while this is used. Someone else may write to the state that `volatile` names.
    """

    def __init__(self, program: ExportedProgram, volatile: Collection[str] = ()) -> None:
        self._program, self._volatile = program, frozenset(volatile)
        self._specs = -1
        self._targets: dict[str, str] = {}
        self._mutated: dict[str, str] = {}
        self._values: Found[Any] = Found()
        self._known: Found[bool] = Found()
        self._extremes: dict[Any, tuple[torch.Tensor, Range]] = {}
        self._left = _BUDGET

    def stored(self, node: Node) -> torch.Tensor | None:
        """Return the tensor of a placeholder, also if the program mutates it; None if it is an input."""
        self._read_signature()
        target = self._targets.get(node.name) if node.op == "placeholder" else None
        if target is None:
            return None
        found = lifted_value(self._program, target)
        return found if is_dense(found) else None

    def mutated(self, node: Node) -> str | None:
        """Return the name of the state that a placeholder stands for, if the program, or someone else, mutates it."""
        self._read_signature()
        return self._mutated.get(node.name) if node.op == "placeholder" else None

    def value(self, node: Node) -> torch.Tensor | None:
        """Return the content of a value, None if it is not known, or large and not stored."""
        if node.op == "placeholder":
            return None if self.mutated(node) is not None else self.stored(node)
        if not self._known.of(node, self._is_known):
            return None
        found = self._values.of(node, self._evaluate)
        return found if isinstance(found, torch.Tensor) else None

    def extremes(self, tensor: torch.Tensor) -> Range:
        """Return the range of a tensor's elements; each tensor is read once."""
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        found = self._extremes.get(key)
        if found is None:
            found = self._extremes[key] = (tensor, _extremes(tensor))  # the tensor keeps its address
        return found[1]

    def _read_signature(self) -> None:
        specs = self._program.graph_signature.input_specs
        if len(specs) == self._specs:
            return
        self._specs = len(specs)
        mutated = self._volatile | written_state(self._program)
        for spec in specs:
            name, target = getattr(spec.arg, "name", None), spec.target
            if spec.kind in LIFTED_ORDER and isinstance(name, str) and target is not None:
                self._targets[name] = target
                if target in mutated:  # a parameter, too: another method may write it
                    self._mutated[name] = target

    def _is_known(self, node: Node) -> bool:
        """Return whether a value depends on constants only, given that of its operands."""
        if node.op == "placeholder":
            return self.value(node) is not None
        if node.op != "call_function" or not all(self._known[each] for each in node.all_input_nodes):
            return False
        return is_getitem(node) or _is_deterministic(node.target)

    def _evaluate(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self.value(node)
        if any(self._values[each] is None for each in node.all_input_nodes):
            return None
        if not is_getitem(node):
            fakes = node.meta.get("val")
            fakes = fakes if isinstance(fakes, (tuple, list)) else [fakes]
            elements = sum(product(each.shape) if isinstance(each, torch.Tensor) else _BUDGET for each in fakes)
            if elements > _LARGEST or elements > self._left:
                return None
            self._left -= int(elements)
        args: Any = map_arg(node.args, self._values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, self._values.__getitem__)
        try:
            with neutral():
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except MemoryError:
            raise
        except Exception:
            return None  # it will raise in the runtime too, or there is no kernel in this process


def _is_deterministic(target: Any) -> bool:
    name = target_name(target)
    operator_ = wrapped_operator(target)
    return (
        name.startswith(_NAMESPACES)
        and "empty" not in name
        and not mutates_arguments(target)
        and torch.Tag.nondeterministic_seeded not in getattr(operator_, "tags", (torch.Tag.nondeterministic_seeded,))
    )


def _extremes(tensor: torch.Tensor) -> Range:
    if tensor.numel() == 0:
        return Range(0.0, 0.0, False)
    if tensor.is_complex():
        return TOP
    try:
        with neutral():
            low, high = _least_and_most(tensor.detach())
            if low == low:
                exact = tensor.is_floating_point() or max(-low, high) < 2.0**52
                return Range(low, high, False) if exact else whole(tensor.dtype)
            numbers = tensor.detach()[~torch.isnan(tensor.detach())]
            if numbers.numel() == 0:
                return TOP
            low, high = _least_and_most(numbers)
            return Range(low, high, True)
    except MemoryError:
        raise
    except Exception:
        return whole(tensor.dtype)


def _least_and_most(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the least and the largest element, NaN if there is any, in one thread: torch's would wait for each other.

    numpy does not have all of torch's types.
    """
    try:
        array = tensor.numpy()
    except (RuntimeError, TypeError):
        low, high = torch.aminmax(tensor)
        return float(low), float(high)
    return float(array.min()), float(array.max())


FILLED: Mapping[str, str | float] = {
    **dict.fromkeys(("aten.full.default", "aten.full_like.default"), "fill_value"),
    "aten.scalar_tensor.default": "s",
    **dict.fromkeys(("aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default"), 0.0),
    **dict.fromkeys(("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default"), 1.0),
}
"""Generator operators, with the number that fills the result, or the argument that it is."""


def filling(node: Node) -> float | None:
    """Return the number with which a generator operator fills its result, before rounding; None for other nodes."""
    value: Any = FILLED.get(name_of(node))
    value = argument(node, value) if isinstance(value, str) else value
    known = isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 52)
    return float(value) if known else None


def rounded(value: float, dtype: torch.dtype | None) -> float | None:
    """Return a number as an element of a type has it, None if it cannot be one."""
    if dtype is None or dtype.is_complex:
        return None
    try:
        return float(torch.tensor(value, dtype=dtype, device="cpu").item())
    except (RuntimeError, OverflowError, ValueError):
        return None


def is_small(node: Node) -> bool:
    """Return whether a value has so few elements that computing it costs next to nothing."""
    shape = shape_of(node)
    return shape is not None and product(shape) <= 1 << 14
