"""What a case is: small modules, their inputs, and what they give in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

from exir_lowering._upstream import locks
from exir_lowering._upstream.programs import pytree
from exir_lowering.options import LoweringOptions
from exir_lowering.pipeline import lower

CALLS = 3  # of each method; the last one repeats the first one, so that what a call leaves behind is seen


@dataclass(frozen=True, slots=True)
class CaseInput:
    """A tensor to be made."""

    shape: tuple[int | str, ...]  # a name stands for a size that changes from call to call
    dtype: torch.dtype = torch.float32
    # "any", "positive", "unit" (between -0.9 and 0.9), "index" (0 or 1), or "large": integers that 32-bit
    # floating-point numbers cannot hold, of int64 those that int32 cannot hold either
    values: str = "any"
    layout: str = "contiguous"  # or "channels_last", "transposed", or "strided" (every other column of a wider one)

    def make(self, generator: torch.Generator, sizes: Mapping[str, int]) -> torch.Tensor:
        """Make the tensor, with sizes for the names in its shape."""
        shape = [sizes[size] if isinstance(size, str) else size for size in self.shape]
        if self.layout == "transposed":
            return self._make_values([*shape[:-2], shape[-1], shape[-2]], generator).transpose(-1, -2)
        if self.layout == "strided":
            return self._make_values([*shape[:-1], 2 * shape[-1]], generator)[..., ::2]
        made = self._make_values(shape, generator)
        return made.contiguous(memory_format=torch.channels_last) if self.layout == "channels_last" else made

    def _make_values(self, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
        if self.values == "index" or self.dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=generator).to(self.dtype)
        if not self.dtype.is_floating_point:
            if self.values == "large":
                low = 2**33 if self.dtype == torch.int64 else 2**24
                return torch.randint(low, 2 * low, shape, generator=generator, dtype=self.dtype)
            low = 0 if self.dtype == torch.uint8 else -20
            return torch.randint(low, 21, shape, generator=generator).to(self.dtype)
        drawn = torch.float64 if self.dtype == torch.float64 else torch.float32  # which lacks digits of float64
        numbers = torch.rand(shape, generator=generator, dtype=drawn) * 1.8 - 0.9
        if self.values == "positive":
            numbers = numbers.abs() + 0.1
        return (numbers if self.values in ("unit", "positive") else numbers * 3).to(self.dtype)


def tensor(
    *shape: int | str, dtype: torch.dtype = torch.float32, values: str = "any", layout: str = "contiguous"
) -> CaseInput:
    """Describe a tensor to make; see `CaseInput`."""
    return CaseInput(shape, dtype, values, layout)


@dataclass(frozen=True, slots=True)
class CaseMethod:
    """One method of a case."""

    function: Callable[..., Any]  # of the module with what it holds, and of the inputs
    inputs: tuple[CaseInput, ...]
    module: Mapping[str, Any]  # its parameters, buffers, modules; methods may share them
    sizes: Mapping[str, tuple[int, int]]  # for each name in a shape, in the first and the second call
    least: int = 1  # the least size of the names


@dataclass(frozen=True, slots=True)
class Case:
    """One requirement on a backend, and a program that shows whether it is met.

    Attributes:
        name: The feature and the aspect, such as "ops/add-broadcast".
        demand: What must hold, in a sentence.
        build: Makes the methods, always the same.
        check: Which check runs the file, one of those in `exir_lowering.testing.case_checks`.
        host: Operators that stay on the host, so that a program has several partitions.
        partitions: How many partitions the backend must get for the case to show anything.
        stateful: Whether a method writes a buffer that the backend is to own.
        needs: The roles that operators must have, if the case is made of those that the backend takes.
        domains: Where it can be made: the kinds of values, by the operators that work on them; () for all.
        fill: Makes the methods of such operators; None if `build` always makes the same.
    """

    name: str
    demand: str
    build: Callable[[], Mapping[str, CaseMethod]]
    check: str = "numbers"
    host: tuple[str, ...] = ()
    partitions: int = 1
    stateful: bool = False
    needs: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    fill: Callable[[Any], Mapping[str, CaseMethod]] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the method, its inputs, and what it returns in eager PyTorch."""

    method: str
    inputs: tuple[Any, ...]
    expected: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A case that is ready to be lowered."""

    aten: Mapping[str, ExportedProgram]  # from `torch.export`
    edge: Mapping[str, ExportedProgram]  # the same in Edge dialect
    calls: tuple[Call, ...]  # in order, the methods in turn


Hold = Callable[[], Mapping[str, Any]]


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a tensor for a module to hold; the case's seed is set when it is built."""
    if not dtype.is_floating_point:
        return torch.randint(1, 9, shape, dtype=dtype)
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    return (torch.rand(shape, dtype=drawn) * 2 - 1).to(dtype)


def case(
    name: str,
    demand: str,
    function: Callable[..., Any],
    *inputs: CaseInput,
    hold: Hold = dict,
    sizes: Mapping[str, tuple[int, int]] | None = None,
    least: int = 1,
    **rest: Any,
) -> Case:
    """Make a case of one method, whose module holds what `hold` makes; `rest` are further attributes of the case."""
    return Case(name, demand, lambda: {"forward": CaseMethod(function, inputs, hold(), sizes or {}, least)}, **rest)


_made: dict[Callable[[], Mapping[str, CaseMethod]], Sample] = {}


def take_sample(case: Case) -> Sample:
    """Make a case's programs and calls, once in a process: conversion to Edge dialect takes most of the time."""
    if case.build not in _made:
        _made[case.build] = _make_sample(case)
    return _made[case.build]


def forget(case: Case) -> None:
    """Make a case's programs again at the next use: a backend has changed them."""
    _made.pop(case.build, None)


def _make_sample(case: Case) -> Sample:
    generator = torch.Generator().manual_seed(0)
    aten: dict[str, ExportedProgram] = {}
    calls: dict[str, list[Call]] = {}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        methods = case.build()
    for name, method in methods.items():
        module = _Module(method.function, method.module).eval()
        sizes = [{size: both[position] for size, both in method.sizes.items()} for position in range(CALLS - 1)]
        given = [tuple(one.make(generator, some) for one in method.inputs) for some in sizes]
        given.append(given[0])
        eager = copy.deepcopy(module)
        # A layout of the caller's own is not seen by export.
        pairs = zip(method.inputs, given[0], strict=True)
        example = tuple(value if one.layout == "channels_last" else value.contiguous() for one, value in pairs)
        dims = {size: Dim(size, min=method.least, max=8) for size in method.sizes}
        shapes = [{i: dims[size] for i, size in enumerate(one.shape) if isinstance(size, str)} for one in method.inputs]
        with torch.no_grad():
            expected = [copy.deepcopy(pytree.tree_leaves(eager(*copy.deepcopy(inputs)))) for inputs in given]
            calls[name] = [Call(name, inputs, tuple(leaves)) for inputs, leaves in zip(given, expected, strict=True)]
            with locks.conversion():
                aten[name] = export(module, example, dynamic_shapes=(tuple(shapes),) if dims else None)
    turns = tuple(call for turn in zip(*calls.values(), strict=True) for call in turn)
    return Sample(aten, dict(lower(aten, options=LoweringOptions(rewrites="none"))), turns)


class _Module(nn.Module):
    """A function as a module that holds what the function reads."""

    def __init__(self, function: Callable[..., Any], holds: Mapping[str, Any]) -> None:
        super().__init__()
        self.function = function
        for name, value in holds.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)
