"""What values are like: descriptions that are equal only for values that whoever asks cannot tell apart.

A description that leaves out what decides a result gives a graph that is valid and wrong. So each use describes a
property, or refuses values that have more to them:

| property | `acceleration`: what passes compute | `casewise`: cases of calls | `rewriting`: new nodes, probes |
|---|---|---|---|
| sizes, strides, dtype, device, gradients, lazy bits | described | described | described |
| where a tensor starts in its storage | refused, unless at the start | described | described |
| symbolic sizes | refused | expressions, and `symbolic` | refused; in probes expressions |
| elements that are known | refused | refused; left out of what is remembered | refused; in probes left out |
| other layouts, quantized tensors | refused | refused | refused; probes have each call by itself |
| the fake mode | must be the one given | left out: the program's | left out: the program's |
| numbers | type and digits | type and digits | type and digits |
| lists and tuples | kind and elements | kind and elements | kind and elements |
| nodes | what their values are like | which operand | which operand, or earlier node |
| torch's settings | dtype, gradients, inference | `ambient.switches`, and the stage | `ambient.switches` |
| names, metadata | left out | left out: each call's own | left out; in probes whether it is a weight |

Expressions mean something in one program only. Digits tell 1 from True and 1.0, and 0.0 from -0.0. The keys of the
cache (`steps.cache.keys`) are text that is equal in any process: all of this, the content of memory, what is known of
symbols, and what backends read besides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # distinguishes tensors without memory

PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)
"""What arguments say about tensors."""

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)  # numbers that may be symbolic

_EXACT = frozenset({int, bool, str, NoneType, *PLAIN})
_NUMBERS = (int, float, complex, str, NoneType, *PLAIN)


class Form(NamedTuple):
    """What there is to a tensor besides its elements."""

    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any  # where it starts in its storage
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_conj: bool  # to be conjugated when it is read
    is_neg: bool


def form_of(tensor: torch.Tensor, number: Callable[[Any], Any] | None = None) -> Form:
    """Return the form of a strided tensor; `number` describes its sizes, strides and offset if they are not known."""
    sizes, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    if number is not None:
        sizes, strides, offset = tuple(map(number, sizes)), tuple(map(number, strides)), number(offset)
    facts = tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_conj(), tensor.is_neg()
    return Form(sizes, strides, offset, *facts)


class Likeness:
    """Describes values and arguments by what can be seen of them."""

    def __init__(
        self,
        error: type[Exception],  # raised, with a reason, for what has more to it
        other: Callable[[Any], Hashable] | None = None,  # is asked about what is no value
        *,
        mode: FakeTensorMode | None = None,  # the one whose tensors count, if their sizes are known
        constants: bool = False,  # whether tensors of known content count too
    ) -> None:
        self.symbolic = False  # whether anything so far has symbols, which mean something in one program only
        self._error, self._other, self._mode, self._constants = error, other, mode, constants

    def describe(self, value: Any) -> Hashable:
        """Return what a value is like: a fake tensor, a number, a list or tuple or dict of these."""
        kind = type(value)
        if kind in _EXACT:
            return kind, value
        if kind is FakeTensor:
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return list if isinstance(value, list) else kind, tuple(map(self.describe, value))
        if isinstance(value, dict):
            return dict, tuple((key, self.describe(entry)) for key, entry in value.items())
        if isinstance(value, _NUMBERS):
            return kind, repr(value)  # since 0.0 == -0.0, and nan is not nan
        if self._other is not None:
            return self._other(value)
        if isinstance(value, SYMBOLS):
            return kind, self._number(value)
        raise self._error(f"a value of type {kind.__name__}")

    def _tensor(self, tensor: FakeTensor) -> Form:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise self._error("a tensor that is not a plain fake tensor")
        if tensor.constant is not None and not self._constants:
            raise self._error("a constant whose content is known")
        if not tensor._has_symbolic_sizes_strides and (self._mode is None or self._is_usual(tensor)):
            return form_of(tensor)
        if self._mode is not None:
            raise self._error("a tensor of which more is known, or less")
        return form_of(tensor, self._number)

    def _is_usual(self, tensor: FakeTensor) -> bool:
        return (
            tensor.fake_mode is self._mode
            and tensor.real_tensor is None
            and tensor.storage_offset() == 0
            and not (tensor.is_conj() or tensor.is_neg())
        )

    def _number(self, number: Any) -> Any:
        if type(number) is int:
            return number
        self.symbolic = True
        return number.node.expr
