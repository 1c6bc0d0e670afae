"""What a lowered module keeps in its `.pte` file besides the methods: JSON, and the content of its tensors after it.

It is named data of the file. It starts with the length of the JSON and its digest.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exir_lowering.errors import InputError
from exir_lowering.lowered_module import convention, json_values as plain
from exir_lowering.lowered_module.convention import Convention
from exir_lowering.pte.digests import XXH3
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.value_kinds import CODES, DTYPES, MAX_RANK, TENSOR

VERSION = 1
_HEAD = struct.Struct("<Q16s")

Cases = tuple[list[Any], ...]
"""The values of each of several calls."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What a lowered module has besides its program."""

    conventions: Mapping[str, Convention]  # how each method is called
    attributes: Mapping[str, Any]  # what was set on it
    bundled: Mapping[str, Cases]  # the values in the arguments of the bundled inputs, by method
    expected: Mapping[str, Cases]  # the outputs for them, flat, by method


def write(record: Record) -> list[bytes | memoryview]:
    """Return a record as its file keeps it, in pieces; InputError if a value or structure cannot be stored."""
    tensors: list[torch.Tensor] = []
    content = {
        "version": VERSION,
        "methods": [convention.to_json(one) for one in record.conventions.values()],
        "attributes": {
            name: plain.encode(f"The attribute {name!r}", value, tensors) for name, value in record.attributes.items()
        },
        "bundled": _cases("A bundled input", record.bundled, tensors),
        "expected": _cases("The output for a bundled input", record.expected, tensors),
    }
    content["tensors"] = [[CODES[one.dtype], list(one.shape)] for one in tensors]
    return pack(json.dumps(content), [one.reshape(-1).view(torch.uint8).numpy().data for one in tensors])


def pack(text: str, tensors: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return JSON, and the content of the tensors that it describes, as a file keeps them."""
    encoded = text.encode()
    return [_HEAD.pack(len(encoded), XXH3.of(encoded)), encoded, *tensors]


def read(where: str, methods: Mapping[str, MethodSpec], kept: memoryview | None) -> Record:
    """Return the record in the file `where`; InputError if it is missing, newer, damaged, or of unknown types."""
    if kept is None:
        raise InputError(
            f"{where} was not saved by LoweredModule.save: it does not say how its methods are called. Use "
            "exir_lowering.load, which takes flat inputs, or save lowered.module() instead of lowered.emit()."
        )
    try:
        stored, rest = unpack(kept)
        if type(stored["version"]) is not int:
            raise TypeError(f"its version is {stored['version']!r}")
        if stored["version"] != VERSION:
            raise InputError(
                f"{where} has version {stored['version']}, but this exir-lowering reads {VERSION}. Install a newer one."
            )
        return _read(stored, methods, rest)
    except InputError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError, struct.error) as error:
        raise InputError(
            f"{where} cannot be loaded: its record of methods and attributes is damaged: "
            f"{type(error).__name__}: {error}. Make or copy it again."
        ) from error


def unpack(kept: memoryview) -> tuple[Any, memoryview]:
    """Return the JSON in what `pack` returned, and the content of the tensors; ValueError or struct.error otherwise."""
    length, digest = _HEAD.unpack_from(kept)
    text, rest = kept[_HEAD.size : _HEAD.size + length], kept[_HEAD.size + length :]
    if XXH3.of(text) != digest:
        raise ValueError("its digest differs")
    return json.loads(str(text, "utf-8")), rest


def _read(stored: Any, methods: Mapping[str, MethodSpec], rest: memoryview) -> Record:
    tensors = plain.Tensors(_tensors(_a(list, stored["tensors"]), rest))
    read = [convention.from_json(one) for one in _a(list, stored["methods"])]
    conventions = {one.method: one for one in read}
    if len(conventions) != len(read):
        raise ValueError("a method occurs twice")
    for one in read:
        _check_convention(one, methods[one.method])
    attributes = _a(dict, stored["attributes"])
    for name in attributes:
        if not name or name.startswith("_") or name in conventions:
            raise ValueError(f"{name!r} is not a valid attribute name")
    bundled = _read_cases(stored["bundled"], tensors)
    expected = _read_cases(stored["expected"], tensors)
    _check_cases(conventions, bundled, expected)
    return Record(
        conventions, {name: plain.decode(one, tensors) for name, one in attributes.items()}, bundled, expected
    )


def _tensors(described: Sequence[Any], content: memoryview) -> list[torch.Tensor]:
    """Return copies of the tensors, which lie one after the other in the content."""
    made, start = [], 0
    for code, shape in described:
        if len(_a(list, shape)) > MAX_RANK or not all(type(size) is int and 0 <= size < 1 << 31 for size in shape):
            raise ValueError(f"a tensor has the shape {shape}")
        dtype = DTYPES[code]
        memory = bytearray(content[start : start + math.prod(shape) * dtype.itemsize])
        start += math.prod(shape) * dtype.itemsize
        if start > len(content):
            raise ValueError("a tensor is not inside of the file")
        made.append((torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype)).reshape(shape))
    return made


def _a(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"got a {type(value).__name__}, expected a {kind.__name__}")
    return value


def _check_convention(one: Convention, method: MethodSpec) -> None:
    if (len(one.inputs), len(one.written) + len(one.outputs)) != (len(method.inputs), len(method.outputs)):
        raise ValueError(f"method {one.method!r} has a different number of inputs or outputs in the program")
    if not all(one.inputs[index] is None and method.inputs[index].kind == TENSOR for index in one.written):
        raise ValueError(f"method {one.method!r} writes into an input that is not a tensor")


def _check_cases(
    conventions: Mapping[str, Convention], bundled: Mapping[str, Cases], expected: Mapping[str, Cases]
) -> None:
    for name, cases in bundled.items():
        one = conventions[name]
        if any(len(case) != len(one.inputs) for case in cases):
            raise ValueError(f"a bundled input of method {name!r} has the wrong number of values")
    for name, cases in expected.items():
        one = conventions[name]
        if len(cases) != len(bundled[name]) or any(len(case) != len(one.written) + len(one.outputs) for case in cases):
            raise ValueError(f"the number of outputs for the bundled inputs of method {name!r} is wrong")


def _cases(where: str, methods: Mapping[str, Cases], tensors: list[torch.Tensor]) -> dict[str, Any]:
    return {
        name: [plain.encode(f"{where} of {name!r}", case, tensors) for case in cases] for name, cases in methods.items()
    }


def _read_cases(stored: Any, tensors: plain.Tensors) -> dict[str, Cases]:
    decoded = {
        name: [plain.decode(case, tensors) for case in _a(list, cases)] for name, cases in _a(dict, stored).items()
    }
    return {name: tuple(_a(list, case) for case in cases) for name, cases in decoded.items()}
