"""Call operators of the closed list safely: arguments are checked, and the size of results is predicted first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from exir_lowering._upstream.meta_functions import WITHOUT_COMPILER
from exir_lowering._upstream.operators import Operator
from exir_lowering.errors import let_through
from exir_lowering.graphs.operators import checks as operator_checks
from exir_lowering.graphs.operators.budget import bytes_of

_KEPT = 64
_WIDEST = torch.complex128.itemsize
_MAY_COPY = frozenset(
    {"contiguous", "flatten", "reshape", "reshape_as", "resolve_conj", "resolve_neg", "to", "type_as"}
)
"""Operators whose results are views of their arguments if possible."""
_UNKNOWN = _WIDEST // 2
"""The assumed ratio of results to arguments for operators whose result shapes depend on values."""


class CheckedCall:
    """An operator ("add" for `aten.add`), with checks of what its kernel does not check."""

    __slots__ = ("_check", "_name", "_operator", "_sizes", "_view")

    def __init__(self, name: str, operator: Operator) -> None:
        self._name, self._operator = name, operator
        self._check = operator_checks.CHECKS.get(name)
        self._view = operator.views and name not in _MAY_COPY
        self._sizes: dict[Any, int] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator; ValueError if the arguments would crash the kernel."""
        if self._check is not None:
            self._check(self.by_name(args, kwargs))
        return self._operator.call(*args, **kwargs)

    def by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name."""
        names = (argument.name for argument in self._operator.arguments)
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def needs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Return the approximate size in bytes of the results, without views of arguments."""
        if self._view:
            return 0
        if torch.Tag.pointwise in self._operator.tags:
            return _broadcast((*args, *kwargs.values()))
        if self._name == "repeat_interleave" and (size := _repeated(self.by_name(args, kwargs))) is not None:
            return size
        key = _signature((args, kwargs))
        try:
            known = self._sizes.get(key)
        except TypeError:  # an argument that cannot be a key
            return 0
        if known is None:
            if len(self._sizes) >= _KEPT:
                self._sizes.clear()
            known = self._sizes[key] = self._predicted(args, kwargs)
        return known

    def _predicted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Compute the size of the results with tensors on the meta device, which have no memory."""
        given = {name: _meta(value) for name, value in kwargs.items()}
        names = [argument.name for argument in self._operator.arguments]
        placed = [_meta(value) for value in args]
        if "device" in names:  # otherwise the operator would allocate its result
            place = names.index("device")
            if place < len(placed):
                placed[place] = torch.device("meta")
            else:
                given["device"] = torch.device("meta")
        try:
            with torch.no_grad(), WITHOUT_COMPILER:
                return size_of(self._operator.call(*placed, **given))
        except Exception as error:  # shapes depend on values; or arguments are wrong, which the operator reports
            let_through(error)
            return _UNKNOWN * size_of((args, list(kwargs.values())))


def size_of(value: Any) -> int:
    """Return the size in bytes of the tensors in a value, as if none of them were a view."""
    return sum(map(_size, tensors(value)))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, such as a node's `meta["val"]`."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def _size(tensor: torch.Tensor) -> int:
    return bytes_of(tensor.shape, tensor.dtype.itemsize)


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [_meta(item) for item in value] if isinstance(value, (list, tuple)) else value


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((key, _signature(item)) for key, item in value.items())
    return (type(value), value)


def _broadcast(args: Sequence[Any]) -> int:
    """Return an upper bound for the size in bytes of a pointwise operator's result."""
    extents: list[int] = []
    width = 4  # most of them turn integers into float32
    for tensor in tensors(args):
        width = max(width, tensor.dtype.itemsize)
        shape = tensor.shape
        extents = [1] * (len(shape) - len(extents)) + extents
        for back in range(1, len(shape) + 1):
            if shape[-back] != 1:
                extents[-back] = shape[-back]
    return bytes_of(extents, width)


def _repeated(given: Mapping[str, Any]) -> int | None:
    """Return the size in bytes of repeat_interleave's result, from its repeats; None if they are not a tensor."""
    tensor, repeats = given.get("self"), given.get("repeats")
    if not isinstance(repeats, torch.Tensor):
        return None
    total = int(repeats.sum())
    if not isinstance(tensor, torch.Tensor):
        return max(total, 0) * 8
    dim = given.get("dim")
    rows = tensor.shape[dim] if isinstance(dim, int) else tensor.numel()
    copies = total if repeats.numel() != 1 else total * rows
    return max(copies, 0) * (_size(tensor) // max(rows, 1))
