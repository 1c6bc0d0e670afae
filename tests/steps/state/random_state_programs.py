"""Random modules with state, as source: what they keep is copied, viewed, sliced, exchanged and written in part.

All numbers are small integers, so that every order of computation gives the same bits.
"""

from __future__ import annotations

import copy
import linecache
import random
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import Any
from unittest import mock

import torch
from many_operators import WHOLE, WHOLE_ROWS
from stateful import Call, Model, eager

Shape = tuple[int, ...]
CALLS = 5
_MOST = 2**20
"""Larger numbers might be rounded; programs that make them are not used."""

_SHAPES: dict[int, list[Shape]] = {
    4: [(4,), (2, 2), (1, 4), (4, 1), (2, 1, 2)],
    6: [(6,), (2, 3), (3, 2), (1, 6), (1, 2, 3)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2), (1, 2, 2, 2), (8, 1)],
}
_MOST_IN_HALF = 2**8
_TYPES = ["float32"] * 6 + ["int64"] * 2 + ["int32", "bool"]
_MANY_TYPES = ["float32", "float16", "bfloat16", "float16", "int64", "int32", "bool"]
_HEADER = """
import torch
from torch import nn

class Over(nn.Module):
    def __init__(self, state):
        super().__init__()
        for name, value in state.named_parameters():
            self.register_parameter(name, value)
        for name, value in state.named_buffers():
            self.register_buffer(name, value, name not in state._non_persistent_buffers_set)

class State(nn.Module):
    def __init__(self):
        super().__init__()
"""


@dataclass(frozen=True)
class Made:
    """Methods over one state, and calls of them.

    Attributes:
        source: The source of the methods' classes, and of `make`, which returns them by name.
        calls: The calls: method and inputs.
        expected: What they return in eager PyTorch, as `eager` says.
    """

    source: str
    calls: Sequence[tuple[str, Call]]
    expected: list[list[torch.Tensor]]

    def models(self) -> dict[str, Model]:
        """Return new modules, which share their state."""
        return models(self.source)

    def __str__(self) -> str:
        calls = [f"    ({name!r}, [{', '.join(map(literal, call))}])," for name, call in self.calls]
        return "\n".join([self.source, "calls = [", *calls, "]"])


def make(seed: int, methods: int = 1, many: bool = False) -> Made:
    """Return the program of a seed: the first one made of it that has small numbers and changes its state.

    Args:
        seed: The seed.
        methods: How many methods share the state.
        many: Whether it draws from many operators and from half precision, where only smaller numbers are exact.
    """
    for attempt in range(100):
        r = random.Random(f"{seed} {methods} {attempt}")
        source, inputs = _Program(r, methods, many).make()
        names = list(inputs)
        order = names if methods == 1 else [*names, *(r.choice(names) for _ in range(2))]
        calls = [(name, [_numbers(r, one) for one in inputs[name]]) for _ in range(CALLS) for name in order][
            : CALLS * methods
        ]
        made = models(source)
        before = _state(made)
        try:
            with plain_branches():
                expected = eager(copy.deepcopy(made), calls)
                _run(made, calls)
        except RuntimeError:  # a write into what overlaps itself
            continue
        after = _state(made)
        values = [value.double().abs().max().item() for value in sum(expected, after)]
        if max(values) <= (_MOST_IN_HALF if many else _MOST) and any(
            not torch.equal(*pair) for pair in zip(before, after, strict=True)
        ):
            return Made(source, calls, expected)
    raise ValueError(f"seed {seed} makes no program")


def _state(made: dict[str, Model]) -> list[torch.Tensor]:
    first = next(iter(made.values()))
    return [value.detach().clone() for value in (*first.buffers(), *first.parameters())]


def _run(made: dict[str, Model], calls: Sequence[tuple[str, Call]]) -> None:
    with torch.no_grad():
        for name, call in calls:
            made[name](*(value.clone() for value in call))


def models(source: str) -> dict[str, Model]:
    """Return the modules of a source. Errors show its lines."""
    name = f"<random state {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names: dict[str, Any] = {}
    exec(compile(source, name, "exec"), names)
    made: dict[str, Model] = names["make"]()
    return made


def plain_branches() -> AbstractContextManager[Any]:
    """Take branches in Python; outside torch.compile, torch.cond compiles its branches in each call."""
    return mock.patch.object(torch, "cond", lambda condition, yes, no, operands: (yes if condition else no)(*operands))


def literal(value: torch.Tensor) -> str:
    """Return a tensor as source."""
    return f"torch.tensor({value.tolist()}, dtype={value.dtype}).reshape({tuple(value.shape)})"


def _numbers(r: random.Random, one: _Value) -> torch.Tensor:
    if one.text == "i":
        return torch.tensor([r.randrange(8)])
    count = prod(one.shape)
    low = 0 if one.kind == "bool" else -4
    numbers = [r.randint(low, 1 if one.kind == "bool" else 9) for _ in range(count)]
    return torch.tensor(numbers, dtype=getattr(torch, one.kind)).reshape(one.shape)


@dataclass(frozen=True)
class _Value:
    """Something that a program can read.

    Attributes:
        text: Its source.
        shape, kind: Its shape, and the name of its type.
        writable: Whether it can be written in place.
        viewable: Whether `view` takes any shape.
    """

    text: str
    shape: Shape
    kind: str
    writable: bool = False
    viewable: bool = False


class _Program:
    """Makes the source of one program."""

    def __init__(self, r: random.Random, methods: int, many: bool) -> None:
        self.r, self.methods, self.many = r, methods, many
        self.size = r.choice([4, 6, 8])
        self.kinds = [r.choice(_TYPES) for _ in range(2)] if r.random() < 0.4 else ["float32"]
        if many:
            self.kinds = [r.choice(_MANY_TYPES) for _ in range(2)]
        self.buffers: list[_Value] = []
        self.values: list[_Value] = []
        self.parameters: set[str] = set()
        self.shares: dict[str, set[str]] = {}
        self.lines: list[str] = []
        self.count = 0
        self.writes_inputs = r.random() < 0.15
        self.branches = r.random() < 0.06

    def make(self) -> tuple[str, dict[str, list[_Value]]]:
        """Return the source, and the inputs of each method."""
        lines = [_HEADER.rstrip("\n"), *("        " + self._state(number) for number in range(self.r.randint(2, 5)))]
        names = ["forward"] if self.methods == 1 else ["first", "second", "third"][: self.methods]
        inputs = {}
        for name in names:
            method, inputs[name] = self._method(name)
            lines += method
        given = ", ".join(f"{name!r}: {name.title()}(state)" for name in names)
        lines += ["", "def make():", "    state = State()", f"    return {{{given}}}", ""]
        return "\n".join(lines), inputs

    def _state(self, number: int) -> str:
        r, name = self.r, "abcde"[number]
        shape, kind = self._shape(), r.choice(self.kinds)
        shape = r.choice([(), (1,)]) if r.random() < 0.08 else shape
        parameter = kind == "float32" and r.random() < 0.04
        last = len(shape) == 4 and r.random() < 0.05  # beside others, ExecuTorch's kernels refuse them
        value = _Value(f"self.{name}", shape, kind, writable=True, viewable=not last)
        text = literal(_numbers(r, value))
        text = f"torch.zeros({shape}, dtype=torch.{kind})" if r.random() < 0.15 else text
        text += ".to(memory_format=torch.channels_last)" * last
        self.buffers.append(value)
        if parameter:
            self.parameters.add(value.text)
            return f"self.{name} = nn.Parameter({text}, requires_grad={r.random() < 0.5})"
        loose = ", persistent=False" * (r.random() < 0.15)
        return f"self.register_buffer({name!r}, {text}{loose})"

    def _method(self, name: str) -> tuple[list[str], list[_Value]]:
        r = self.r
        self.lines, self.count, self.shares = [], 0, {}
        inputs = [
            _Value("x", self._shape(), r.choice(self.kinds), self.writes_inputs, True),
            _Value("y", self._shape(), r.choice(self.kinds), self.writes_inputs, True),
            _Value("i", (1,), "int64"),
        ]
        inputs = inputs[: r.choice([1, 2, 3, 3])] if r.random() < 0.7 else [inputs[0], inputs[2]]
        self.values = [*(one for one in inputs if one.text != "i")]
        self.indexed = any(one.text == "i" for one in inputs)
        for _ in range(r.randint(1, 9)):
            self._statement()
        results = ", ".join(self._result() for _ in range(r.randint(1, 4)))
        shown = [line for one in self.lines for line in one.split("\n")]
        header = [
            "",
            f"class {name.title()}(Over):",
            f"    def forward(self, {', '.join(one.text for one in inputs)}):",
        ]
        return [*header, *("        " + line for line in shown), f"        return {results},"], inputs

    # -- values -------------------------------------------------------------------------------------------------------

    def _shape(self) -> Shape:
        return self.r.choice(_SHAPES[self.size])

    def _source(self) -> _Value:
        return self.r.choice([*self.buffers, *self.buffers, *self.values])

    def _cast(self, text: str, kind: str, to: str) -> str:
        if kind == to:
            return text
        return f"({text} > 1)" if to == "bool" else f"{text}.to(torch.{to})"

    def _as(self, value: _Value, shape: Shape, kind: str) -> str:
        """Return a value in another shape and type: a view if that can be."""
        r, text = self.r, value.text
        if prod(value.shape) != prod(shape):
            if prod(shape) == 1:
                text = f"{text}.reshape(-1)[{r.choice(['0:1', '-1:'])}].reshape({shape})"
            elif prod(value.shape) == 1:
                text = f"{text}.reshape(1).expand({prod(shape)}).reshape({shape})"
            else:
                start = r.randrange(prod(value.shape) - prod(shape) + 1) if prod(value.shape) > prod(shape) else 0
                text = f"{text}.reshape(-1)[{start}:{start + prod(shape)}].reshape({shape})"
        elif value.shape == shape[::-1] and len(shape) == 2 and r.random() < 0.5:
            text = r.choice([f"{text}.t()", f"{text}.permute(1, 0)", f"{text}.transpose(0, 1).contiguous()"])
        elif value.shape != shape or r.random() < 0.1:
            text = f"{text}.{'view' if value.viewable and r.random() < 0.6 else 'reshape'}({shape})"
        return self._cast(text, value.kind, kind)

    def _read(self, shape: Shape, kind: str) -> str:
        r = self.r
        value = self._source()
        while prod(value.shape) < prod(shape) and prod(value.shape) != 1:
            value = self._source()
        text = self._as(value, shape, kind)
        if len(shape) > 1 and r.random() < 0.08:
            text = f"{text}.permute({', '.join(map(str, range(len(shape))))})"
        return text + r.choice(["", "", "", ".clone()", ".contiguous()", ".clone()"])

    def _value(self, shape: Shape, kind: str, depth: int = 2) -> str:
        """Return an expression of a shape and a type."""
        r = self.r
        if depth == 0 or r.random() < 0.35:
            return self._read(shape, kind)
        one = lambda: self._value(shape, kind, depth - 1)  # noqa: E731
        if kind == "bool":
            return r.choice(
                [
                    lambda: f"({one()} {r.choice('&|^')} {one()})",
                    lambda: f"(~{one()})",
                    lambda: f"({self._value(shape, 'float32', depth - 1)} > {r.randint(-2, 5)})",
                ]
            )()
        choices = [
            lambda: f"({one()} + {one()})",
            lambda: f"({one()} + {one()})",
            lambda: f"({one()} - {one()})",
            lambda: f"({one()} + {r.randint(-1, 2)})",
            lambda: f"({one()} * {r.choice([1, 1, -1, 2, 3])})",
            lambda: f"(-{one()})",
            lambda: f"torch.maximum({one()}, {one()})",
            lambda: f"torch.where({self._value(shape, 'bool', 0)}, {one()}, {one()})",
            lambda: f"torch.full({shape}, {r.randint(-3, 3)}, dtype=torch.{kind})",
        ]
        if self.many:
            forms = [*WHOLE, *(WHOLE_ROWS if shape and shape[0] > 1 else ())]
            choices += [lambda: f"({r.choice(forms).format(one(), one())})"] * 8
        if self.branches:
            inner = "torch.cond((a > b).any(), lambda c: c + 1, lambda c: c - torch.tensor(2), (b,))"
            made = "a + torch.tensor(1)", "b * torch.full((), 2).to(b.dtype)"
            yes, no = r.sample(["a + b", "a - b", "b * 2", "a.clone()", "b + 0", "b - a", *made, inner, inner], 2)
            choices += [
                lambda: (
                    f"torch.cond(({self._read((), 'float32')} > 1).reshape(()), lambda a, b: {yes}, "
                    f"lambda a, b: {no}, ({one()}, {one()}))"
                )
            ] * 4
        if shape and shape[0] > 1:
            rest = ", ".join(map(str, shape[1:]))
            choices += [
                lambda: f"{one()}.flip(0)",
                lambda: f"torch.cat([{one()}[1:], {one()}[:1]])",
                lambda: f"torch.roll({one()}, 1, 0)",
                lambda: f"{one()}[:1].expand({shape[0]}{', ' * bool(rest)}{rest})",
                lambda: f"{one()}.sum(0, keepdim=True).expand({shape}).to(torch.{kind})",
            ]
        if len(shape) == 2 and shape[0] == shape[1]:
            choices += [lambda: f"{one()}.t()", lambda: f"{one()}.permute(1, 0).contiguous()"]
        return r.choice(choices)()

    def _result(self) -> str:
        r = self.r
        if r.random() < 0.15:
            return f"({self._value(self._shape(), r.choice(self.kinds))})"
        value = self._source()
        if r.random() < 0.3:
            return value.text
        if r.random() < 0.3 and value.kind != "bool":
            return f"{value.text} + {value.text}"
        shape = self._shape()
        if prod(value.shape) == prod(shape):
            return self._as(value, shape, value.kind)
        return f"{value.text}.clone()"

    # -- statements ---------------------------------------------------------------------------------------------------

    def _statement(self) -> None:
        r = self.r
        if r.random() < 0.3:
            self._local()
            return
        r.choice([self._copy, self._copy, self._copy, self._arithmetic, self._view, self._part, self._rows])() if (
            r.random() < 0.75
        ) else r.choice([self._swap, self._swap, self._shift, self._fill])()

    def _bases(self, text: str) -> set[str]:
        """Return the names whose memory an expression may share."""
        names = re.findall(r"self\.[a-e]\b|\bt\d+|\b[xy]\b", text)
        return {base for name in names for base in self.shares.get(name, {name})}

    def _apart(self, target: _Value, value: str) -> str:
        """Copy what overlaps the memory that it is written to: eager PyTorch would read what it has written."""
        return f"({value}).clone()" if self._bases(target.text) & self._bases(value) else value

    def _write(self, value: _Value, line: str) -> None:
        self.lines.append(f"with torch.no_grad():\n    {line}" if value.text in self.parameters else line)

    def _local(self) -> None:
        r, name = self.r, f"t{self.count}"
        self.count += 1
        source = self._source()
        if r.random() < 0.6:
            shape = self._shape() if prod(source.shape) == self.size else source.shape
            text = source.text
            if shape != source.shape:
                text += f".{'view' if source.viewable else 'reshape'}({shape})"
            copied = r.choice(["", ".clone()", ".clone()", " + 0", ".detach()", ".contiguous()"])
            copied = ".clone()" if copied == " + 0" and source.kind == "bool" else copied
            made = _Value(name, shape, source.kind, source.writable or "clone" in copied, source.viewable)
            self.shares[name] = {name} if "clone" in copied or "+" in copied else self._bases(text)
            self.lines.append(f"{name} = {text}{copied}")
        else:
            made = _Value(name, self._shape(), r.choice(self.kinds))
            text = self._value(made.shape, made.kind)
            self.shares[name] = self._bases(text)
            self.lines.append(f"{name} = {text}")
        self.values.append(made)

    def _target(self) -> _Value:
        r = self.r
        writable = [value for value in self.values if value.writable]
        return r.choice(writable) if writable and r.random() < 0.12 else r.choice(self.buffers)

    def _copy(self) -> None:
        r, target = self.r, self._target()
        kind = target.kind if r.random() < 0.85 else r.choice(self.kinds)
        shape = target.shape
        if len(shape) > 1 and r.random() < 0.1:
            shape = (1, *shape[1:]) if r.random() < 0.5 else shape[1:]
        depth = r.choice([0, 0, 0, 1, 2])
        self._write(target, f"{target.text}.copy_({self._apart(target, self._value(shape, kind, depth))})")

    def _arithmetic(self) -> None:
        r, target = self.r, self._target()
        if target.kind == "bool":
            self._write(
                target, f"{target.text}.logical_{r.choice(['or', 'and', 'xor'])}_({self._read(target.shape, 'bool')})"
            )
            return
        text = r.choice(
            [
                lambda: f".add_({self._apart(target, self._value(target.shape, target.kind, 1))})",
                lambda: f".add_({r.randint(1, 3)})",
                lambda: f".sub_({self._apart(target, self._read(target.shape, target.kind))})",
                lambda: f".mul_({r.choice([-1, 2, 1])})",
                lambda: ".neg_()",
            ]
        )()
        self._write(target, target.text + text)

    def _view(self) -> None:
        """Write all of a buffer through a view."""
        target = self._target()
        shape = self._shape()
        if prod(target.shape) != self.size or not target.viewable:
            return self._copy()
        text = f"{target.text}.view({shape})"
        if len(shape) == 2 and self.r.random() < 0.4:
            shape, text = shape[::-1], f"{text}.t()"
        write = "copy_" if target.kind == "bool" or self.r.random() < 0.7 else "add_"
        return self._write(target, f"{text}.{write}({self._apart(target, self._value(shape, target.kind, 1))})")

    def _part(self) -> None:
        """Write a slice or a row of a buffer."""
        r, target = self.r, self._target()
        shape = target.shape
        if not shape or shape[0] < 2:
            return self._copy()
        dim = int(len(shape) > 1 and r.random() < 0.3)
        part = r.choice([":1", "1:", "::2", "-1:", f"{shape[dim] // 2}:"])
        start, _, rest = part.partition(":")
        bounds = [int(one) if one else None for one in (start, *(rest.split(":") if rest else [""]))]
        what = (*shape[:dim], len(range(shape[dim])[slice(*bounds)]), *shape[dim + 1 :])
        part = ":, " * dim + part
        value = self._apart(target, self._value(what, target.kind, r.choice([0, 0, 1]))) if prod(what) else "0"
        write = r.choice([f"{target.text}[{part}] = {value}", f"{target.text}[{part}].copy_({value})"])
        return self._write(target, write)

    def _rows(self) -> None:
        """Write rows by index."""
        r, target = self.r, self._target()
        shape = target.shape
        if not shape:
            return self._fill()
        if r.random() < 0.2:
            mask = self._apart(target, self._value(shape, "bool", 1))
            return self._write(target, f"{target.text}.masked_fill_({mask}, {r.randint(0, 3)})")
        if self.indexed and r.random() < 0.6:
            index, rows = f"torch.remainder(i, {shape[0]})", 1
        else:
            rows = r.randint(1, shape[0])
            index = f"torch.tensor({r.sample(range(shape[0]), rows)})"
        value = self._apart(target, self._value((rows, *shape[1:]), target.kind, r.choice([0, 0, 1])))
        forms = [
            f"{target.text}.index_put_(({index},), {value})",
            f"{target.text}[{index}] = {value}",
            f"{target.text}.index_copy_(0, {index}, {value})",
        ]
        if target.kind != "bool":
            forms.append(f"{target.text}.index_put_(({index},), {value}, accumulate=True)")
        return self._write(target, r.choice(forms))

    def _swap(self) -> None:
        r = self.r
        names = r.sample(self.buffers, r.randint(2, min(3, len(self.buffers))))
        name = f"t{self.count}"
        self.count += 1
        self.shares[name] = {name}
        keep = r.choice([".clone()", " + 0"]) if names[0].kind != "bool" else ".clone()"
        self.lines.append(f"{name} = {names[0].text}{keep}")
        self.values.append(_Value(name, names[0].shape, names[0].kind, True, names[0].viewable))
        sources = [*names[1:], self.values[-1]]
        for target, source in zip(names, sources, strict=True):
            if prod(source.shape) >= prod(target.shape) or prod(source.shape) == 1:
                self._write(target, f"{target.text}.copy_({self._as(source, target.shape, target.kind)})")

    def _shift(self) -> None:
        line = self.r.sample(self.buffers, self.r.randint(2, len(self.buffers)))
        line = [one for one in line if prod(one.shape) == self.size]
        for target, source in zip(line, [*line[1:], self.values[0]], strict=False):
            self._write(target, f"{target.text}.copy_({self._as(source, target.shape, target.kind)})")

    def _fill(self) -> None:
        target = self._target()
        self._write(target, f"{target.text}.{self.r.choice(['zero_()', 'fill_(1)'])}")
