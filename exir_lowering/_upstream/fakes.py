"""Fake tensors and symbolic numbers: sizes and their names, shape environments, copies, and what these decide."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sympy
import torch

# Distinguishes tensors without memory; what a mode has made from real tensors belongs to it.
from torch._subclasses.fake_tensor import (
    FakeTensor as FakeTensor,
    FakeTensorConverter,
    FakeTensorMode as FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # symbols belong to an environment; no public name
from torch.utils._sympy.symbol import SymT, symbol_is_type  # what a symbol stands for is in its name
from torch.utils._sympy.value_ranges import (
    ValueRanges,  # what an environment knows of a symbol
    bound_sympy,  # what an expression of sizes can be
)

from exir_lowering._upstream.tensors import SYMBOLS

DECISIONS = "exir_lowering_decisions"  # where the copies of an environment are listed, if it is one of `Decisions`
LIMITS = "exir_lowering_limits"  # where an environment has what was declared of the largest inputs


class Decisions:
    """What symbolic sizes decide in copies of a shape environment of Dynamo's, which does not see their guards."""

    def __init__(self, original: Any, copied: Any) -> None:
        self._original = original
        self._copies = [(copied, len(copied.guards))]  # with the number of guards that each had at first
        vars(copied)[DECISIONS] = (self._copies,)  # copies of the copy have it too: a tuple is not copied

    def repeat(self) -> str:
        """Decide the same in the original, so that it holds for these sizes only; return "", or a clause why not."""
        copies = [*self._copies]
        found = {guard.expr: None for environment, before in copies for guard in environment.guards[before:]}
        replaced = [item for environment, _ in copies for item in environment.replacements.items()]
        fixed = {symbol for symbol, value in replaced if value.is_number} - set(self._original.replacements)
        self._copies.clear()  # they may live shorter than the programs that have them
        new = [fact for fact in found if not self._original._maybe_evaluate_static(fact)]
        if not new:
            return ""
        text = ", ".join(sorted(map(str, new)))
        if any(not fact.free_symbols <= set(self._original.backed_var_to_val) for fact in new):
            return f"its lowering branches on sizes that it introduced: {text}"
        if self._original.frozen:
            return f"its lowering branches on sizes, too late to recompile it for other sizes: {text}"
        if fixed & _marked(self._original):
            return f"its lowering fixes a size that was marked as dynamic: {text}"
        for fact in new:
            self._original.evaluate_expr(fact)
        return ""


def _marked(environment: Any) -> set[Any]:
    """Return the symbols of sizes that the user has marked as dynamic, for which one value is an error."""
    found: set[Any] = set()
    for tracked in environment.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for size, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            if isinstance(size, torch.SymInt) and constraint is not None and not getattr(constraint, "warn_only", True):
                found |= size.node.expr.free_symbols
    return found


def size_hint(size: Any) -> int:
    """Return a size: that of the example inputs if it is symbolic, 1 if it depends on data."""
    known = known_size(size)
    return 1 if known is None else known


def magnitude(stride: Any) -> int:
    """Return a number to order a stride by: that of the example, where sizes that depend on data are large."""
    if isinstance(stride, int):
        return stride
    backed = stride.node.shape_env.backed_var_to_val
    return int(stride.node.expr.xreplace({size: backed.get(size, 1 << 20) for size in stride.node.expr.free_symbols}))


def known_size(size: Any) -> int | None:
    """Return a size: that of the example inputs if it is symbolic, None if it depends on data or is not known."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return None if hint is None else int(hint)


def shape_env_of(value: Any) -> Any:
    """Return the shape environment of a symbolic number, or of the mode of any fake tensor; None if there is none."""
    if isinstance(value, SYMBOLS):
        return value.node.shape_env
    return value.fake_mode.shape_env if isinstance(value, FakeTensor) else None


def has_symbols(shape_env: Any, *, unbacked: bool) -> bool:
    """Return whether a shape environment has symbols; with `unbacked`, whether any depends on data."""
    made = shape_env.unbacked_symint_counter + shape_env.unbacked_symfloat_counter
    return made > 0 or (not unbacked and bool(shape_env.var_to_range))


class FakeCopies:
    """Copies of fake tensors and symbolic numbers, in modes and environments that they share as the originals do."""

    # Symbols of `shape_env` for which `sizes` has numbers are replaced by these.
    def __init__(self, sizes: Mapping[Any, int | float] = MappingProxyType({}), shape_env: Any = None) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}  # with the original, so that its id is not reused
        self._sizes = {symbol: sympy.sympify(size) for symbol, size in sizes.items()}
        if sizes and not has_symbols(shape_env, unbacked=True):
            self._made[id(shape_env)] = (shape_env, ShapeEnv())  # no symbol is left

    @staticmethod
    def possible(value: Any) -> bool:
        """Return whether a value can be copied, or needs no copy."""
        return not isinstance(value, torch.Tensor) or (type(value) is FakeTensor and value.layout is torch.strided)

    def copied_environment(self, shape_env: Any) -> Any:
        """Return the copy of a shape environment, which copies of values in it share; None for none."""
        return None if shape_env is None else self._of(shape_env, _copy_shape_env)

    def copy(self, value: Any) -> Any:
        """Return the copy of a value; the value itself if it is neither a tensor nor symbolic."""
        if isinstance(value, SYMBOLS):
            number = self._number(value)
            if number is not None or value.node.shape_env is None:
                return value if number is None else number
            return type(value)(self._of(value.node, self._node))
        return self._of(value, self._tensor) if isinstance(value, FakeTensor) else value

    def _of(self, original: Any, make: Callable[[Any], Any]) -> Any:
        if id(original) not in self._made:
            self._made[id(original)] = (original, make(original))
        return self._made[id(original)][1]

    def _number(self, value: Any) -> int | float | bool | None:
        """Return the number that a symbolic one is with these sizes, None if it is none yet."""
        if not self._sizes:
            return None
        found = value.node.expr.xreplace(self._sizes)
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
        return None if found.free_symbols else kind(found)

    def _node(self, node: Any) -> Any:
        copied = copy.copy(node)
        copied.shape_env = self._of(node.shape_env, _copy_shape_env)
        if self._sizes:
            copied._expr = node.expr.xreplace(self._sizes)
        return copied

    def _mode(self, mode: FakeTensorMode) -> FakeTensorMode:
        copied: FakeTensorMode = copy.copy(mode)
        copied.enter_stack = []
        converter = mode.fake_tensor_converter
        copies_data = converter.meta_converter.copy_data
        copied.fake_tensor_converter = FakeTensorConverter(copy_data=copies_data, export=converter.export)
        copied.shape_env = self.copied_environment(mode.shape_env)
        return copied

    def _tensor(self, tensor: FakeTensor) -> FakeTensor:
        mode = self._of(tensor.fake_mode, self._mode)
        size, stride = [*map(self.copy, tensor.size())], [*map(self.copy, tensor.stride())]
        offset, count = self.copy(tensor.storage_offset()), self.copy(_symbolic_count(tensor))
        copied = FakeTensor(
            mode,
            make_meta(size, stride, offset, tensor.dtype, count),
            tensor.fake_device,
            constant=tensor.constant,
            real_tensor=tensor.real_tensor,
            pytype=tensor.pytype,
            dispatch_keys=tensor.dispatch_keys,
            requires_grad=tensor.requires_grad,
            _is_param=isinstance(tensor, torch.nn.Parameter),
        )
        if tensor.constant is not None:
            mode.fake_tensor_converter.add_constant_storage_mapping(copied)
        return copied


_VERSIONS = itertools.count(1 << 32, 1 << 32)  # the first version of each copy; torch counts up from there


def _copy_shape_env(shape_env: Any) -> Any:
    """Return a shape environment with the same symbols and the same facts about them; nothing is pending in it."""
    copied = copy.copy(shape_env)
    for name, value in vars(shape_env).items():
        if hasattr(value, "copy"):  # the containers: lists, dicts, sets, counters
            table = value.copy()
            for key, entry in table.items() if isinstance(table, dict) else ():
                if isinstance(entry, (list, set)):
                    table[key] = entry.copy()
            setattr(copied, name, table)
    copied.pending_fresh_unbacked_symbols = []
    copied.ignorable_fresh_unbacked_symbols = []
    copied.fake_tensor_cache = {}  # results with symbols of the other environment
    # torch's caches of an environment's facts keep the environment alive until they see another version.
    copied._version_counter = next(_VERSIONS)
    for copies in vars(copied).get(DECISIONS, ()):
        copies.append((copied, len(copied.guards)))
    return copied


def dim_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a fake tensor's dimensions from outer to inner in memory; as they come where sizes leave it open."""
    strides, sizes = [*map(magnitude, tensor.stride())], [*map(size_hint, tensor.shape)]
    moved = [strides[dim] for dim in range(len(sizes)) if sizes[dim] != 1]
    if 0 in sizes or 0 in moved or moved == sorted(moved, reverse=True):
        return tuple(range(len(sizes)))
    return tuple(sorted(range(len(sizes)), key=lambda dim: -strides[dim]))


def storage_of(tensor: torch.Tensor) -> int:
    """Return what identifies the storage of a tensor, which may have no memory."""
    return int(tensor.untyped_storage()._cdata)


def make_meta(size: Any, stride: Any, offset: Any, dtype: torch.dtype, count: Any = None) -> torch.Tensor:
    """Return a tensor without memory of a layout, in a storage of its own; `count` is what `_symbolic_count` found."""
    if count is not None:  # torch would compute the bytes again, for ten times as long
        return torch.empty(count, dtype=dtype, device="meta").as_strided(size, stride, offset)
    made = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    if isinstance(offset, int) and not offset:
        return made
    elements = offset + made.untyped_storage().nbytes() // made.element_size()
    return torch.empty(elements, dtype=dtype, device="meta").as_strided(size, stride, offset)


def _symbolic_count(tensor: FakeTensor) -> Any:
    """Return the number of elements of a tensor if it is symbolic and they fill its storage; else None."""
    count, size = tensor.numel(), tensor.element_size()
    symbolic = isinstance(count, torch.SymInt)
    return count if symbolic and expression(tensor.untyped_storage().nbytes()) == size * expression(count) else None


def make_fake(like: FakeTensor, mode: FakeTensorMode, *, requires_grad: bool) -> FakeTensor:
    """Return a fake tensor of a mode, with its own storage, like another one of it or one whose sizes are known."""
    meta = make_meta(like.size(), like.stride(), like.storage_offset(), like.dtype, _symbolic_count(like))
    constant = None if like.constant is None else like.constant.clone()
    return FakeTensor(mode, meta, like.fake_device, constant=constant, requires_grad=requires_grad)


def symbols_of(number: Any) -> dict[str, Any]:
    """Return the symbols of a symbolic number by name."""
    return {str(symbol): symbol for symbol in number.node.expr.free_symbols}


def describe_symbols(shape_env: Any, symbols: dict[str, Any]) -> list[str]:
    """Return what an environment knows of symbols: kinds, ranges, values, conditions, and the others in these."""
    conditions = {str(guard.expr): guard.expr for guard in shape_env.guards}
    conditions |= {str(one.expr): one.expr for known in shape_env.deferred_runtime_asserts.values() for one in known}
    conditions |= {str(one): one for one in shape_env.divisible}
    named = set(symbols.values())
    kept = sorted(text for text, one in conditions.items() if getattr(one, "free_symbols", set()) & named)
    lines = [f"if {text}" for text in kept]
    for symbol in sorted({*named, *(one for text in kept for one in conditions[text].free_symbols)}, key=str):
        value = shape_env.backed_var_to_val.get(symbol), shape_env.var_to_hint_override.get(symbol)
        kind = symbol.is_integer, symbol.is_positive, symbol.is_nonnegative, symbol in shape_env.size_like
        lines.append(
            f"{symbol}: {kind} {shape_env.var_to_range.get(symbol)} {value} {shape_env.replacements.get(symbol)}"
        )
    return lines


def expression(size: Any) -> Any:
    """Return the expression of a symbolic size, or other number; of a number, that number."""
    return size.node.expr if isinstance(size, SYMBOLS) else sympy.Integer(size)


def linear_in(size: Any) -> tuple[Any, int, int] | None:
    """Return the symbol of a symbolic size, and by what it is multiplied and what is added; None for other ones."""
    whole = size.node.expr
    for symbol in whole.free_symbols:
        factor = whole.coeff(symbol)
        more = whole - factor * symbol
        if factor.is_Integer and more.is_Integer and factor > 0:
            return symbol, int(factor), int(more)
    return None


def is_unbounded(size: Any) -> bool:
    """Return whether a symbolic size may be larger than any memory."""
    upper = bound_sympy(size.node.expr, size.node.shape_env.var_to_range).upper
    return not upper.is_number or bool(upper >= 1 << 62)


def decided(shape_env: Any) -> Any:
    """Return what symbolic sizes have been decided to be so far, for `undecide`."""
    if shape_env is None:
        return None
    return len(shape_env.guards), dict(shape_env.replacements), dict(shape_env.var_to_range), set(shape_env.divisible)


def undecide(shape_env: Any, before: Any) -> bool:
    """Forget what was decided since; return whether there was anything."""
    if decided(shape_env) == before:
        return False
    count, *tables = before
    del shape_env.guards[count:]
    now = shape_env.replacements, shape_env.var_to_range, shape_env.divisible
    for current, table in zip(now, tables, strict=True):
        current.clear()
        current.update(table)
    shape_env._version_counter = next(_VERSIONS)
    return True


def may_be_negative(number: torch.SymInt) -> bool:
    """Return whether a number depends on data, and its range has negative ones."""
    by_data = any(symbol_is_type(symbol, SymT.UNBACKED_INT) for symbol in number.node.expr.free_symbols)
    return by_data and bool(number.node.shape_env.bound_sympy(number.node.expr).lower < 0)


def make_sized(mode: FakeTensorMode, sizes: Sequence[torch.SymInt]) -> torch.Tensor:
    """Return a fake tensor of symbolic numbers; those that depend on data are not taken to be sizes by that."""
    env: Any = mode.shape_env
    before = set(env.size_like)
    with mode:
        made = torch.empty(tuple(sizes))
    env.size_like.intersection_update(before)
    return made


def names_of_symbols(shape_env: Any) -> dict[str, Any]:
    """Return the symbols by the names of the `torch.export.Dim`s that they stand for; a file does not have them."""
    names = shape_env.source_name_to_debug_name
    found = {}
    for symbol, sources in shape_env.var_to_sources.items():
        for source in sources:
            # A Dim that is only a part of other ones, such as d of 2*d, is a source of its own.
            name = names.get(source.name, source.name)
            if name.isidentifier():
                found[name] = shape_env.replacements.get(symbol, symbol)
    return {name: each for name, each in found.items() if each.is_Symbol}


def data_dependent(shape_env: Any) -> dict[str, Any]:
    """Return the symbols of whole numbers that depend on data, by name."""
    ranges = {} if shape_env is None else shape_env.var_to_range
    return {
        str(symbol): symbol
        for symbol in ranges
        if symbol_is_type(symbol, SymT.UNBACKED_INT) and symbol not in shape_env.replacements
    }


def unbounded_sizes(shape_env: Any, size: Any) -> list[str]:
    """Return the symbols of a size that have no bound, or all that have none: conversion has symbols of its own."""
    known = data_dependent(shape_env)
    found = [name for name, one in known.items() if not isinstance(shape_env.var_to_range[one].upper, sympy.Integer)]
    return sorted(set(found).intersection(symbols_of(size)) or found)


def narrow(shape_env: Any, constraints: dict[Any, Any], greatest: Mapping[Any, Any], limits: Any) -> None:
    """Bound symbols in a program's environment and constraints, and keep what else limits them, for `limits_of`."""
    for ranges in (shape_env.var_to_range, constraints):
        for one in filter(ranges.__contains__, greatest):  # the environment has a least size of 2
            ranges[one] = ValueRanges(ranges[one].lower, max(ranges[one].lower, greatest[one]))
    vars(shape_env)[LIMITS] = limits
    shape_env._version_counter = next(_VERSIONS)


def limits_of(shape_env: Any) -> Any:
    """Return what `narrow` has kept in an environment, or in the one that it was copied from; () if nothing."""
    return vars(shape_env).get(LIMITS, ()) if shape_env is not None else ()


def ranges_in_file(shape_env: Any) -> dict[Any, Any]:
    """Return the ranges of symbols; files have a greatest number: that of the example for those that have none."""
    found = {} if shape_env is None else dict(shape_env.var_to_range)
    for symbol, known in found.items():
        example = shape_env.backed_var_to_val.get(symbol)
        if example is not None and not isinstance(known.upper, sympy.Integer):
            found[symbol] = ValueRanges(known.lower, max(known.lower, example))
    return found
