"""What a lowered module writes into its `.pte` file besides the methods, as constant methods.

An attribute that is a number, bool, str or tensor is a constant method of its name, so that an application in C++ can
call it. Everything else is JSON in one constant method; the tensors that the JSON refers to are the outputs of another
one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exir_lowering.errors import InputError
from exir_lowering.lowered_module import convention, values
from exir_lowering.lowered_module.convention import Convention
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.value_kinds import BOOL, DOUBLE, INT, STRING, TENSOR, ValueSpec

RECORD = "__exir_lowering__"
TENSORS = "__exir_lowering_tensors__"
VERSION = 1

Cases = tuple[list[Any], ...]
"""The values of each of several calls."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What a lowered module has besides its program."""

    conventions: Mapping[str, Convention]  # how each method is called
    attributes: Mapping[str, Any]  # what was set on it
    bundled: Mapping[str, Cases]  # the values in the arguments of the bundled inputs, by method
    expected: Mapping[str, Cases]  # the outputs for them, flat, by method


def constant_methods(record: Record) -> dict[str, list[Any]]:
    """Return the constant methods that a record is stored in; InputError if a value or structure cannot be stored."""
    tensors: list[torch.Tensor] = []
    methods: dict[str, list[Any]] = {}
    nested: dict[str, Any] = {}
    for name, value in record.attributes.items():
        where = f"The attribute {name!r}"
        if isinstance(value, torch.Tensor):
            methods[name] = [values.storable(where, value)]
        elif _is_scalar(value):
            methods[name] = [value]
        else:
            nested[name] = values.encode(where, value, tensors)
    content = {
        "version": VERSION,
        "methods": [convention.to_json(one) for one in record.conventions.values()],
        "attributes": list(record.attributes),
        "nested": nested,
        "bundled": _cases("A bundled input", record.bundled, tensors),
        "expected": _cases("The output for a bundled input", record.expected, tensors),
    }
    methods[RECORD] = [json.dumps(content)]
    if tensors:
        methods[TENSORS] = list(tensors)
    return methods


def read(where: str, methods: Mapping[str, MethodSpec], run: Callable[[str], Sequence[Any]]) -> Record:
    """Return the record that is stored in the file `where`, as messages call it; `run` runs a constant method.

    InputError: There is no record, it has a newer version, is damaged, or contains a type that is not known here.
    """
    try:
        content = read_constant(methods[RECORD]) if RECORD in methods else None
        if not isinstance(content, str):
            raise InputError(
                f"{where} was not saved by LoweredModule.save: it does not say how its methods are called. Use "
                "exir_lowering.load, which takes flat inputs, or save lowered.module() instead of lowered.emit()."
            )
        stored = json.loads(content)
        if type(stored["version"]) is not int:
            raise TypeError(f"its version is {stored['version']!r}")
        if stored["version"] != VERSION:
            raise InputError(
                f"{where} has version {stored['version']}, but this exir-lowering reads {VERSION}. Install a newer one."
            )
        return _read(stored, methods, run)
    except InputError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        raise InputError(
            f"{where} cannot be loaded: what it says about its methods and attributes is damaged: "
            f"{type(error).__name__}: {error}. Make or copy it again."
        ) from error


def _read(stored: Any, methods: Mapping[str, MethodSpec], run: Callable[[str], Sequence[Any]]) -> Record:
    tensors = values.Tensors(_constants(TENSORS, methods, run) if TENSORS in methods else ())
    read = [convention.from_json(one) for one in _a(list, stored["methods"])]
    conventions = {one.method: one for one in read}
    if len(conventions) != len(read):
        raise ValueError("a method occurs twice")
    for one in read:
        _check_convention(one, methods[one.method])
    names = _a(list, stored["attributes"])
    if len(set(names)) != len(names):
        raise ValueError("an attribute occurs twice")
    for name in names:
        if not isinstance(name, str) or not name or name.startswith("_") or name in conventions:
            raise ValueError(f"{name!r} is not a valid attribute name")
    nested = _a(dict, stored["nested"])
    attributes = {name: _attribute(name, nested, methods, run, tensors) for name in names}
    bundled = _read_cases(stored["bundled"], tensors)
    expected = _read_cases(stored["expected"], tensors)
    _check_cases(conventions, bundled, expected)
    return Record(conventions, attributes, bundled, expected)


def _a(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"got a {type(value).__name__}, expected a {kind.__name__}")
    return value


def read_constant(method: MethodSpec) -> Any:
    """Return the value of a constant method, None for a tensor; ValueError if it does not return exactly one value."""
    (value,) = method.outputs
    return value.content if value.kind in (INT, BOOL, DOUBLE, STRING) else None


def _constants(name: str, methods: Mapping[str, MethodSpec], run: Callable[[str], Sequence[Any]]) -> Sequence[Any]:
    """Return the tensors of a constant method; one that computes is not run."""
    method = methods[name]
    if method.inputs or method.operators or method.delegations or not all(map(_is_tensor, method.outputs)):
        raise ValueError(f"the method {name!r} is not a constant")
    return run(name)


def _check_convention(one: Convention, method: MethodSpec) -> None:
    if (len(one.inputs), len(one.written) + len(one.outputs)) != (len(method.inputs), len(method.outputs)):
        raise ValueError(f"method {one.method!r} has a different number of inputs or outputs in the program")
    if not all(one.inputs[index] is None and _is_tensor(method.inputs[index]) for index in one.written):
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


def _attribute(
    name: str,
    nested: Mapping[str, Any],
    methods: Mapping[str, MethodSpec],
    run: Callable[[str], Sequence[Any]],
    tensors: values.Tensors,
) -> Any:
    if name in nested:
        return values.decode(nested[name], tensors)
    method = methods[name]
    (value,) = method.outputs
    if _is_tensor(value):
        (tensor,) = _constants(name, methods, run)
        return tensor
    return read_constant(method)


def _is_tensor(value: ValueSpec) -> bool:
    return value.kind == TENSOR


def _is_scalar(value: Any) -> bool:
    """Return whether ExecuTorch can represent a value as a scalar or string."""
    if type(value) is str:
        try:
            value.encode()
            return True
        except UnicodeEncodeError:
            return False
    return type(value) in (bool, float) or (type(value) is int and -(2**63) <= value < 2**63)


def _cases(where: str, methods: Mapping[str, Cases], tensors: list[torch.Tensor]) -> dict[str, Any]:
    return {
        name: [values.encode(f"{where} of {name!r}", case, tensors) for case in cases]
        for name, cases in methods.items()
    }


def _read_cases(stored: Any, tensors: values.Tensors) -> dict[str, Cases]:
    decoded = {
        name: [values.decode(case, tensors) for case in _a(list, cases)] for name, cases in _a(dict, stored).items()
    }
    return {name: tuple(_a(list, case) for case in cases) for name, cases in decoded.items()}
