"""Keys of values and calls, equal only where whoever asks cannot tell them apart; and what was found out by them.

A key that leaves out what decides a result gives a graph that is valid and wrong. So each use describes a property, or
refuses values that have more to them:

| property | passes (`fast.fake_results`) | conversion (`fast.calls`) | rewrites, rules of `legalize` |
|---|---|---|---|
| sizes, strides, dtype, device, gradients, lazy bits | in the key | in the key | in the key |
| where a tensor starts in its storage | refused, unless at the start | in the key | in the key |
| symbolic sizes | expressions, and the mode | expressions, and `symbolic` | refused; in probes expressions |
| elements that are known | refused | refused; left out of what is remembered | refused; in probes left out |
| other layouts, quantized tensors | refused | refused | refused; probes have each call by itself |
| the fake mode | must be the one given | left out: the program's | left out: the program's |
| nodes | the keys of their values | which operand | which operand, or earlier node |
| torch's settings | dtype, gradients, inference | `ambient.switches`, and the stage | `ambient.switches` |

Expressions mean something in one program only. Type and digits tell 1 from True and 1.0, and 0.0 from -0.0.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch._dispatch.python import (
    enable_python_dispatcher as enable_python_dispatcher,  # runs torch's kernels in Python on fake tensors
)
from torch.fx import Node
from torch.fx.node import map_arg

from exir_lowering._upstream.ambient import switches
from exir_lowering._upstream.fakes import FakeTensor, FakeTensorMode, make_fake
from exir_lowering._upstream.guards import without_guards
from exir_lowering._upstream.operators import is_composite
from exir_lowering._upstream.programs import pytree
from exir_lowering._upstream.tensors import SYMBOLS

PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)  # what arguments say about tensors

_EXACT = frozenset({int, bool, str, NoneType, torch._ops.OpOverload, *PLAIN})
_NUMBERS = (int, float, complex, str, NoneType, *PLAIN)


class NotCoveredError(Exception):
    """A value or an operator that the conversion of `fast` does not cover; its text is the reason for the report."""


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


class KeyMaker:
    """Makes keys of values and arguments from what can be seen of them."""

    def __init__(
        self,
        error: type[Exception] = NotCoveredError,  # raised, with a reason, for what has more to it
        other: Callable[[Any], Hashable] | None = None,  # is asked about what is no value
        *,
        mode: FakeTensorMode | None = None,  # the one whose tensors count
        symbols: dict[Any, Any] | None = None,  # sizes of a mode that are not known, by key, to add to; else refused
        constants: bool = False,  # whether tensors of known content count too
    ) -> None:
        self.symbolic = False  # whether anything so far has symbols, which mean something in one program only
        self._error, self._other, self._mode, self._constants, self._symbols = error, other, mode, constants, symbols

    def key(self, value: Any) -> Hashable:
        """Return the key of a value: a fake tensor, a number, a list or tuple or dict of these."""
        kind = type(value)
        if kind in _EXACT:
            return kind, value
        if kind is FakeTensor:
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return list if isinstance(value, list) else kind, tuple(map(self.key, value))
        if isinstance(value, dict):
            return dict, tuple((key, self.key(entry)) for key, entry in value.items())
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
        symbolic = tensor._has_symbolic_sizes_strides
        if self._mode is None:
            return form_of(tensor, self._number if symbolic else None)
        more = (symbolic and self._symbols is None) or str(tensor.storage_offset()) != "0" or tensor.is_conj()
        if more or tensor.is_neg() or tensor.real_tensor is not None or tensor.fake_mode is not self._mode:
            raise self._error("a tensor of which more is known, or less")
        return form_of(tensor, self._number if symbolic else None)

    def _number(self, number: Any) -> Any:
        if type(number) is int:
            return number
        self.symbolic = True
        expression = number.node.expr
        if self._symbols is None:
            return expression
        if not expression.free_symbols <= number.node.shape_env.backed_var_to_val.keys():
            raise self._error("a size that depends on data")
        self._symbols[key := (expression, self._mode)] = number
        return key


def arguments_key(arguments: Any, number: Callable[[Node], int]) -> Hashable:
    """Return the key of a call's arguments, with nodes as numbers; NotCoveredError for a type not expected there."""

    def other(value: Any) -> Hashable:
        if isinstance(value, Node):
            return Node, number(value)
        if isinstance(value, SYMBOLS):
            raise NotCoveredError("a symbolic size that no node stands for")
        raise NotCoveredError(f"an argument of type {type(value).__name__}")

    return KeyMaker(other=other).key(arguments)


def call_key(node: Node) -> Hashable:
    """Return what equal calls have in common; None where that is not known, or means something in one program only."""
    maker, operands = KeyMaker(), node.all_input_nodes
    try:
        arguments = arguments_key((node.args, node.kwargs), operands.index)
        values = maker.key([operand.meta["val"] for operand in operands])
    except NotCoveredError:
        return None
    return None if maker.symbolic else (node.target, arguments, values, switches())


_REMEMBERED = 20_000  # how many calls of earlier programs a process remembers; one takes a few kilobytes


class Memory(OrderedDict[Hashable, Any]):
    """What has been found out about calls, the most recently used ones. Threads take turns: conversions have a lock."""

    state: Hashable = ()

    def keep_for(self, state: Hashable) -> None:
        """Forget what has been found out while something else was the case."""
        if state != self.state:
            self.clear()
            self.state = state

    def find(self, key: Hashable) -> Any:
        """Return what is known of a call, None if nothing is."""
        found = self.get(key)
        if found is not None:
            self.move_to_end(key)
        return found

    def put(self, key: Hashable, found: Any) -> None:
        """Remember what was found."""
        self[key] = found
        if len(self) > _REMEMBERED:
            self.popitem(last=False)


MEMORY = Memory()  # what this process knows of calls without symbols; those with symbols belong to one program


def renew(value: Any, mode: FakeTensorMode | None, *, gradients: bool = True) -> Any:
    """Return equal fake tensors that share nothing with the given ones, of a mode, or of theirs if that is None."""
    if isinstance(value, FakeTensor):
        return make_fake(value, mode or value.fake_mode, requires_grad=gradients and value.requires_grad)
    if isinstance(value, (list, tuple)):
        return pytree.tree_map_only(torch.Tensor, lambda tensor: renew(tensor, mode, gradients=gradients), value)
    return value


_NO_PROGRAM = FakeTensorMode()  # of what a process remembers: the mode of a program would keep all of it alive


def without_program(value: Any) -> Any:
    """Return a value that keeps no program alive; NotCoveredError if it has symbols: they depend on data."""
    maker = KeyMaker(constants=True)
    maker.key(value)
    if maker.symbolic:
        raise NotCoveredError("an operator whose result depends on data")
    return renew(value, _NO_PROGRAM)


def evaluate(node: Node, target: Any, value_of: Callable[[Node], Any], mode: FakeTensorMode, *, gradients: bool) -> Any:
    """Return what a call returns with an operator; without gradients, composite ones are decomposed, as torch does."""
    run = target
    if not gradients and is_composite(target):
        from torch._export.utils import _get_decomp_for_cia  # what it consists of

        run = _get_decomp_for_cia(target)
    args, kwargs = map_arg((node.args, dict(node.kwargs)), value_of)
    # The example's sizes decide nothing: a guard would narrow what export said.
    with mode, enable_python_dispatcher(), torch.set_grad_enabled(gradients), without_guards(mode.shape_env):
        return run(*args, **kwargs)
