"""The families of methods of a file, as a constant method says them: a text that every client of the runtime can read.

A method `base@tag` belongs to the family `base`. The text has a line for each method of a family, in order of
preference, whose fields are separated by tabs; `docs/guides/variants.md` describes them. The one rule of everything
that chooses: the first line of the family whose backends are all available and whose sizes all fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.value_kinds import Tensor, ValueSpec

METHOD = "get_manifest"
"""The name of the constant method: a part of the file format, as is the text."""

_HEADER = "exir-lowering methods 1"

BUCKET = "exir_lowering.bucket"
"""The key of a graph module's meta under which a program that is given has its `Bucket`."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size that a dimension of an input has in a bucket."""

    input: int  # numbered as the method takes them
    dimension: int
    size: int
    exact: bool = False  # whether the given size has to be this one, as the input is not padded
    least: int = 1  # the smallest size that may be given
    like: tuple[int, int] | None = None  # an input and its dimension, which has to be given with the same size
    fill: float = 0  # what is put behind the end of the input

    def __str__(self) -> str:
        more = f"={self.like[0]}.{self.like[1]}" if self.like is not None else ""
        more += f">={self.least}" if self.least > 1 else ""
        fill = f"~{self.fill:d}" if isinstance(self.fill, int) else f"~{self.fill!r}"
        return f"{self.input}.{self.dimension}{more}={'=' if self.exact else ''}{self.size}{fill if self.fill else ''}"


@dataclass(frozen=True, slots=True)
class Crop:
    """A dimension of an output that is cut to the size that a dimension of an input has as it is given."""

    output: int  # numbered as the method returns them: new values of inputs that it writes to are the first
    dimension: int
    input: int
    input_dimension: int

    def __str__(self) -> str:
        return f"{self.output}.{self.dimension}={self.input}.{self.input_dimension}"


@dataclass(frozen=True, slots=True)
class Bucket:
    """For which sizes a method was specialised; without any it takes what its inputs say."""

    sizes: tuple[Size, ...] = ()
    crops: tuple[Crop, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """A method of a family."""

    method: str
    backends: tuple[str, ...]
    bucket: Bucket = Bucket()

    def __str__(self) -> str:
        parts = (" ".join(map(str, some)) for some in (self.backends, self.bucket.sizes, self.bucket.crops))
        return "\t".join((self.method, *parts))


def split(method: str) -> tuple[str, tuple[str, ...]]:
    """Return the family of a method, "" if it is of none, and its tags."""
    family, *tags = method.split("@")
    return (family, tuple(tags)) if tags else ("", ())


def is_element(number: object, dtype: torch.dtype) -> bool:
    """Return whether a tensor of a type can hold a number, which may be rounded if the type is of floating point."""
    if not isinstance(number, (int, float)):
        return False
    try:
        held = torch.full((), number, dtype=dtype).item()
    except (RuntimeError, OverflowError, ValueError):
        return False
    return held == number or (dtype.is_floating_point and math.isfinite(held) == math.isfinite(number))


def encode(lines: Iterable[Line]) -> str:
    """Return the text that the constant method returns."""
    return "".join(f"{line}\n" for line in (_HEADER, *lines))


def read(methods: Mapping[str, MethodSpec]) -> tuple[Line, ...]:
    """Return the lines of a file with these methods; none if it has no manifest, or one of a later version.

    Raise a CorruptError if the text does not describe these methods.
    """
    method = methods.get(METHOD)
    content = method.outputs[0].content if method is not None and len(method.outputs) == 1 else None
    if not isinstance(content, str) or not content.startswith(f"{_HEADER}\n"):
        return ()
    lines: dict[str, Line] = {}
    text = ""
    try:
        for text in content.rstrip("\n").split("\n")[1:]:
            line = _line(text)
            _check(line, methods)
            if lines.setdefault(line.method, line) is not line:
                raise ValueError("the method has two lines")
    except (ValueError, LookupError) as error:
        raise CorruptError(f"its manifest's line {text[:80]!r} is damaged: {error}") from None
    return tuple(lines.values())


def _line(text: str) -> Line:
    method, backends, sizes, crops = text.split("\t")
    padded = tuple(map(_size, sizes.split()))
    cropped = tuple(Crop(*_numbers(one, 4)) for one in crops.split())
    line = Line(method, tuple(backends.split()), Bucket(padded, cropped))
    if str(line) != text:
        raise ValueError(f"expected {str(line)!r}")
    return line


def _size(text: str) -> Size:
    text, _, fill = text.partition("~")
    like, least = text.count(".") > 1, ">" in text
    index, dimension, *more, size = _numbers(text, 3 + 2 * like + least)
    same = (more[0], more[1]) if like else None
    number = int(fill or 0) if re.fullmatch("-?[0-9]*", fill) else float(fill)
    return Size(index, dimension, size, "==" in text, more[-1] if least else 1, same, number)


def _numbers(text: str, count: int) -> list[Any]:
    found = [int(number) for number in re.findall("[0-9]+", text)]
    if len(found) != count:
        raise ValueError(f"{text!r} has not {count} numbers")
    return found


def _check(line: Line, methods: Mapping[str, MethodSpec]) -> None:
    """Check that a line describes a method of the file: ValueError or LookupError if it does not."""
    method = methods.get(line.method)
    if method is None or not all(split(line.method)):
        raise ValueError("the file has no such method of a family")
    if set(line.backends) != set(method.backends):
        raise ValueError(f"the method needs {', '.join(method.backends) or 'no backend'}")
    for size in line.bucket.sizes:
        if (actual := _sizes(method.inputs[size.input])[size.dimension]) != size.size:
            raise ValueError(f"dimension {size.dimension} has {actual} elements, not {size.size}")
        content = method.inputs[size.input].content
        if not isinstance(content, Tensor) or not is_element(size.fill, content.dtype):
            raise ValueError(f"input {size.input} cannot hold {size.fill}, with which it is padded")
        if size.like is not None:
            _sizes(method.inputs[size.like[0]])[size.like[1]]
    for crop in line.bucket.crops:
        _sizes(method.inputs[crop.input])[crop.input_dimension], _sizes(method.outputs[crop.output])[crop.dimension]


def _sizes(value: ValueSpec) -> tuple[int, ...]:
    return value.content.sizes if isinstance(value.content, Tensor) else ()
