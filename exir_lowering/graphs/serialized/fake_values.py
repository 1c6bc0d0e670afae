"""What nodes know about their values: fake tensors and symbolic numbers, with the modes and environments they share.

Only functions of a closed table are called, with few and small arguments: sympy simplifies what it is given.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

from exir_lowering._upstream import serializing
from exir_lowering._upstream.serializing import int_oo, sympy_functions
from exir_lowering.graphs.serialized.plain import NotSerialisableError, pick
from exir_lowering.graphs.serialized.tensors import DTYPES, TensorReader, TensorWriter, name_dtype

DEEPEST, MOST, LARGEST, STEEPEST = 24, 256, 1 << 63, 8
"""How deep an expression nests, how many parts it has, its largest number, and its largest exponent."""

ASSUMPTIONS: tuple[Mapping[str, bool], ...] = tuple(
    dict.fromkeys(names.split(), True)
    for names in ("integer positive", "integer nonnegative", "integer", "real", "real positive", "")
)
"""What torch assumes about symbols, by number."""

_OF_SYMPY = "Add Mul Pow Rational Mod floor ceiling Abs Eq Ne Lt Le Gt Ge And Or Not"
_OF_TORCH = """
    FloorDiv ModularIndexing Where PythonMod Mod CleanDiv CeilToInt FloorToInt CeilDiv Max Min FloatPow FloatTrueDiv
    IntTrueDiv TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat
"""
_FUNCTIONS: Mapping[str, Any] = {
    **{name: getattr(sympy, name) for name in _OF_SYMPY.split()},
    **{f"torch.{name}": getattr(sympy_functions, name) for name in _OF_TORCH.split()},
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_INFINITIES = {"int_oo": int_oo, "-int_oo": -int_oo, "oo": sympy.oo, "-oo": -sympy.oo}


def write(expression: Any, symbols: dict[str, sympy.Symbol]) -> Any:
    """Write an expression, and note its symbols; NotSerialisableError if reading would not give an equal one."""
    tree = _write(expression, symbols)
    try:
        same = read(tree, symbols) == expression
    except MemoryError:
        raise
    except Exception as error:
        raise NotSerialisableError(f"the size {str(expression)[:200]!r} ({error})") from error
    if not same:
        raise NotSerialisableError(f"the size {str(expression)[:200]!r}: it would be read differently")
    return tree


def _write(expression: Any, symbols: dict[str, sympy.Symbol]) -> Any:
    for name, infinity in _INFINITIES.items():
        if expression is infinity or expression == infinity:
            return [name]
    if isinstance(expression, (bool, sympy.logic.boolalg.BooleanAtom)):
        return bool(expression)
    if isinstance(expression, (int, sympy.Integer)):
        return int(expression)
    if isinstance(expression, sympy.Rational):
        return ["Rational", int(expression.p), int(expression.q)]
    if isinstance(expression, (float, sympy.Float)):
        return ["Float", repr(float(expression))]
    if isinstance(expression, sympy.Symbol):
        if symbols.setdefault(expression.name, expression) != expression:
            raise NotSerialisableError(f"two symbols have the name {expression.name!r}")
        return expression.name
    name = _NAMES.get(type(expression), "")
    if not name:
        raise NotSerialisableError(f"the size {str(expression)[:200]!r} has {type(expression).__name__}")
    return [name, *(_write(part, symbols) for part in expression.args)]


def read(tree: Any, symbols: Mapping[str, sympy.Symbol]) -> Any:
    """Read an expression; ValueError if `write` does not make it, LookupError if a symbol or function is not known."""
    return _read(tree, symbols, 0, itertools.count(1))


def _read(tree: Any, symbols: Mapping[str, sympy.Symbol], depth: int, parts_so_far: Iterator[int]) -> Any:
    if depth > DEEPEST or next(parts_so_far) > MOST:
        raise ValueError(f"a size of more than {MOST} parts, or that nests more than {DEEPEST} deep")
    if isinstance(tree, bool):
        return sympy.true if tree else sympy.false
    if isinstance(tree, int):
        if abs(tree) > LARGEST:
            raise ValueError("a size beyond 64 bits")
        return sympy.Integer(tree)
    if isinstance(tree, str):
        return symbols[tree]
    name, *parts = tree
    if name in _INFINITIES and not parts:
        return _INFINITIES[name]
    if name == "Float":
        (text,) = parts
        return sympy.Float(float(text))
    function = _FUNCTIONS[name]
    arguments = [_read(part, symbols, depth + 1, parts_so_far) for part in parts]
    if name in ("Pow", "torch.FloatPow"):
        _check_power(*arguments)
    return function(*arguments)


def _check_power(base: Any, exponent: Any) -> None:
    """Refuse powers of numbers, which are computed at once and may be of any size, and large exponents."""
    if base.is_number or not exponent.is_number or not abs(exponent) <= STEEPEST or base.has(sympy.Pow):
        raise ValueError("a power of a number or of a power, or with a large exponent")


def find_assumptions(symbol: sympy.Symbol) -> int:
    """Return the number of what torch assumes about a symbol; NotSerialisableError if it is something else."""
    for number, assumed in enumerate(ASSUMPTIONS):
        if sympy.Symbol(symbol.name, **assumed) == symbol:
            return number
    raise NotSerialisableError(f"the symbol {symbol.name!r} has other assumptions than torch's symbols")


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
            tree = write(expression, self.symbols)
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
                write(one, self.symbols)
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
            "symbols": [[name, find_assumptions(symbol)] for name, symbol in self.symbols.items()],
            "environments": environments,
            "modes": self.modes,
            "numbers": self.numbers,
            "fakes": self.fakes,
        }

    def bounds(self, bounds: Any) -> list[Any]:
        """Write the least and the greatest value of a range."""
        return [write(bounds.lower, self.symbols), write(bounds.upper, self.symbols)]


class FakeReader:
    """Makes fake tensors and symbolic numbers from the tables of `FakeWriter.finish`."""

    def __init__(self, tables: Mapping[str, Any], tensors: TensorReader) -> None:
        self.symbols = {
            name: sympy.Symbol(_check_symbol(name), **ASSUMPTIONS[number]) for name, number in tables["symbols"]
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
        return read(tree, self.symbols)

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
