"""What nodes know about their values: fake tensors and symbolic numbers, with the modes and environments they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from exir_lowering._upstream import serializing
from exir_lowering.graphs.serialized import expressions
from exir_lowering.graphs.serialized.container import NotSerialisableError, pick
from exir_lowering.graphs.serialized.tensors import DTYPES, TensorReader, TensorWriter, name_dtype

_KINDS: Mapping[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_DEVICES = ("cpu", "meta")
_MOST = 1 << 62


class FakeWriter:
    """Collects the fake tensors and symbolic numbers of a program; each object is written once."""

    def __init__(self, tensors: TensorWriter) -> None:
        self.fakes: list[Any] = []  # descriptions of fake tensors
        self.numbers: list[Any] = []  # those of symbolic numbers
        self.modes: list[Any] = []  # those of fake tensor modes
        self.symbols: dict[str, sympy.Symbol] = {}  # by name
        self._tensors = tensors
        self._known: dict[int, int] = {}  # by id; the program keeps the objects alive
        self._environments: dict[int, tuple[int, Any]] = {}
        self._devices: dict[torch.device, str] = {}

    def write(self, tensor: Any) -> int:
        """Return the number of a fake tensor; NotSerialisableError if not plain, not dense, or of unwritable sizes."""
        number = self._known.get(id(tensor))
        if number is None:
            described = self._describe(tensor)
            number = self._known[id(tensor)] = len(self.fakes)
            self.fakes.append(described)
        return number

    def _describe(self, tensor: Any) -> list[Any]:
        if type(tensor) is not serializing.FakeTensor or tensor.layout is not torch.strided:
            raise NotSerialisableError(f"a fake tensor of the class {type(tensor).__name__}, {tensor.layout}")
        if tensor.real_tensor is not None or tensor.is_conj() or tensor.is_neg():
            raise NotSerialisableError("a fake tensor with a real one, or that is a conjugate or negative view")
        device = tensor.fake_device
        if device.type not in _DEVICES:
            raise NotSerialisableError(f"a value on the device {device}")
        constant = tensor.constant
        return [
            self._mode(tensor.fake_mode),
            name_dtype(tensor.dtype),
            [self._size(size) for size in tensor.shape],
            [self._size(size) for size in tensor.stride()],
            self._size(tensor.storage_offset()),
            device.type,
            tensor.requires_grad,
            isinstance(tensor, torch.nn.Parameter),
            None if constant is None else self._tensors.write(constant),
        ]

    def _size(self, size: Any) -> Any:
        return size if type(size) is int else self.write_number(size)

    def write_number(self, number: Any) -> Any:
        """Return a reference to a symbolic number, or its value; NotSerialisableError if it depends on data."""
        node = number.node
        known = self._known.get(id(node))
        if known is None:
            expression = node.expr
            if expression.is_Integer or expression.is_Boolean:
                return _KINDS[type(number)](expression)
            if node.shape_env is None or serializing.free_unbacked_symbols(expression):
                raise NotSerialisableError(f"the size {expression} depends on data")
            tree = expressions.write(expression, self.symbols)
            hint = None if type(number) is torch.SymBool else node.hint
            known = self._known[id(node)] = len(self.numbers)
            self.numbers.append([self._environment(node.shape_env), _KINDS[type(number)].__name__, tree, hint])
        return {"number": known}

    def _mode(self, mode: Any) -> int:
        number = self._known.get(id(mode))
        if number is None:
            environment = None if mode.shape_env is None else self._environment(mode.shape_env)
            number = self._known[id(mode)] = len(self.modes)
            self.modes.append([environment, serializing.mode_facts(mode)])
        return number

    def _environment(self, environment: Any) -> int:
        return self._environments.setdefault(id(environment), (len(self._environments), environment))[0]

    def finish(self) -> dict[str, Any]:
        """Return the tables."""
        environments = []
        for _, environment in self._environments.values():
            divisible = [
                expressions.write(one, self.symbols)
                for one in sorted(environment.divisible, key=str)
                if {symbol.name for symbol in one.free_symbols} <= set(self.symbols)
            ]
            known = [
                [name, int(environment.backed_var_to_val[symbol]), *self.bounds(environment.var_to_range[symbol])]
                for name, symbol in self.symbols.items()
                if symbol in environment.backed_var_to_val
            ]
            environments.append([serializing.environment_facts(environment), known, divisible])
        return {
            "symbols": [[name, expressions.find_assumptions(symbol)] for name, symbol in self.symbols.items()],
            "environments": environments,
            "modes": self.modes,
            "numbers": self.numbers,
            "fakes": self.fakes,
        }

    def bounds(self, bounds: Any) -> list[Any]:
        """Write the least and the greatest value of a range."""
        return [expressions.write(bounds.lower, self.symbols), expressions.write(bounds.upper, self.symbols)]


class FakeReader:
    """Makes fake tensors and symbolic numbers from the tables of `FakeWriter.finish`."""

    def __init__(self, tables: Mapping[str, Any], tensors: TensorReader) -> None:
        self.symbols = {
            name: sympy.Symbol(_check_symbol(name), **expressions.ASSUMPTIONS[number])
            for name, number in tables["symbols"]
        }
        self._tensors = tensors
        self._environments = [self._environment(*fields) for fields in tables["environments"]]
        self._modes = [self._mode(*fields) for fields in tables["modes"]]
        self._numbers, self._fakes = tables["numbers"], tables["fakes"]
        self._made_numbers: dict[int, Any] = {}
        self._made: dict[int, Any] = {}

    def _environment(self, facts: Sequence[bool], known: Sequence[Any], divisible: Sequence[Any]) -> Any:
        symbols = [
            (self.symbols[name], _check_int(hint), self.expression(lower), self.expression(upper))
            for name, hint, lower, upper in known
        ]
        return serializing.make_environment(list(map(bool, facts)), symbols, list(map(self.expression, divisible)))

    def _mode(self, environment: int | None, facts: Sequence[bool]) -> Any:
        shared = None if environment is None else pick(self._environments, environment)
        return serializing.make_mode(list(map(bool, facts)), shared)

    def expression(self, tree: Any) -> Any:
        """Read an expression of the symbols."""
        return expressions.read(tree, self.symbols)

    def read_number(self, number: int) -> Any:
        """Return a symbolic number, the same object each time."""
        if number not in self._made_numbers:
            environment, kind, tree, hint = pick(self._numbers, number)
            if not isinstance(hint, (int, float, type(None))):
                raise ValueError("the hint of a size is a number")
            types = {kind.__name__: symbolic for symbolic, kind in _KINDS.items()}
            self._made_numbers[number] = serializing.make_number(
                pick(self._environments, environment), types[kind], self.expression(tree), hint
            )
        return self._made_numbers[number]

    def read(self, number: int) -> Any:
        """Return a fake tensor, the same object each time."""
        made = self._made.get(number)
        if made is None:
            made = self._made[number] = self._make(pick(self._fakes, number))
        return made

    def _make(self, fields: Sequence[Any]) -> Any:
        mode, dtype, shape, stride, offset, device, gradient, parameter, constant = fields
        if device not in _DEVICES:
            raise ValueError(f"a value on the device {device[:80]!r}")
        return serializing.fake_tensor(
            pick(self._modes, mode),
            list(map(self._size, shape)),
            list(map(self._size, stride)),
            self._size(offset),
            DTYPES[dtype],
            torch.device(device),
            gradient is True,
            parameter is True,
            None if constant is None else self._tensors.read(constant),
        )

    def _size(self, size: Any) -> Any:
        if type(size) is int:
            if not 0 <= size < _MOST:
                raise ValueError(f"the size {size}")
            return size
        ((kind, number),) = size.items()
        if kind != "number":
            raise ValueError(f"a size is a number, got {kind[:80]!r}")
        return self.read_number(number)


def _check_symbol(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier() or len(name) > 64:
        raise ValueError(f"{str(name)[:80]!r} is not the name of a symbol")
    return name


def _check_int(value: Any) -> int:
    if type(value) is not int or abs(value) >= _MOST:
        raise ValueError("the hint of a symbol is a number of at most 62 bits")
    return value
