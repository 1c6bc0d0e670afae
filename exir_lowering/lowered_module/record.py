"""What a lowered module writes into its `.pte` file beside the methods, as constant methods.

An attribute that is a number, bool, str or tensor is a constant method of its name, so that an application in C++ can
call it. All else is JSON in one constant method, and tensors that the JSON refers to are the outputs of another one.
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
from exir_lowering.runtime.format import BOOL, DOUBLE, INT, STRING, TENSOR, Method, Value

RECORD = "__exir_lowering__"
TENSORS = "__exir_lowering_tensors__"
VERSION = 1

Cases = tuple[list[Any], ...]
"""The values of each of several calls."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What a lowered module is, beside its program.

    Attributes:
        conventions: How each method is called.
        attributes: What was set on it.
        bundled: The values in the arguments of the bundled inputs, by method.
        expected: The outputs for them, flat, by method.
    """

    conventions: Mapping[str, Convention]
    attributes: Mapping[str, Any]
    bundled: Mapping[str, Cases]
    expected: Mapping[str, Cases]


def constant_methods(record: Record) -> dict[str, list[Any]]:
    """Return the constant methods that a record is stored in.

    Raises:
        InputError: A value or the structure of a method's arguments cannot be stored.
    """
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


def read(where: str, methods: Mapping[str, Method], run: Callable[[str], Sequence[Any]]) -> Record:
    """Return the record that is stored in a file.

    Args:
        where: The file, to begin messages with.
        methods: What the file says about its methods.
        run: Runs a constant method.

    Raises:
        InputError: There is no record, it is of a newer version, is damaged, or has a type that is not known here.
    """
    content = constant(methods[RECORD]) if RECORD in methods else None
    if not isinstance(content, str):
        raise InputError(
            f"{where} was not saved by LoweredModule.save: it does not say how its methods are called. Use "
            "exir_lowering.load, which takes flat inputs, or save lowered.module() instead of lowered.emit()."
        )
    try:
        stored = json.loads(content)
        if stored["version"] != VERSION:
            raise InputError(
                f"{where} is of version {stored['version']}, this exir-lowering reads {VERSION}. Install a newer one."
            )
        tensors = run(TENSORS) if TENSORS in methods else ()
        conventions = [convention.from_json(one) for one in stored["methods"]]
        return Record(
            {one.method: one for one in conventions if _matches(one, methods[one.method])},
            {name: _attribute(name, stored["nested"], methods, run, tensors) for name in stored["attributes"]},
            _read_cases(stored["bundled"], tensors),
            _read_cases(stored["expected"], tensors),
        )
    except InputError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise InputError(
            f"{where} cannot be loaded: what it says about its methods and attributes is damaged: "
            f"{type(error).__name__}: {error}. Make or copy it again."
        ) from error


def constant(method: Method) -> Any:
    """Return what a constant method returns, None when it is a tensor."""
    (value,) = method.outputs
    return value.content if value.kind in (INT, BOOL, DOUBLE, STRING) else None


def _matches(one: Convention, method: Method) -> bool:
    if (len(one.inputs), len(one.written) + len(one.outputs)) != (len(method.inputs), len(method.outputs)):
        raise ValueError(f"method {one.method!r} has another number of inputs or outputs")
    return True


def _attribute(
    name: str,
    nested: Mapping[str, Any],
    methods: Mapping[str, Method],
    run: Callable[[str], Sequence[Any]],
    tensors: Sequence[torch.Tensor],
) -> Any:
    if name in nested:
        return values.decode(nested[name], tensors)
    method = methods[name]
    if _is_tensor(method.outputs[0]):
        (tensor,) = run(name)
        return tensor
    return constant(method)


def _is_tensor(value: Value) -> bool:
    return value.kind == TENSOR


def _is_scalar(value: Any) -> bool:
    """Tell whether ExecuTorch has a value of its own for it."""
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


def _read_cases(stored: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> dict[str, Cases]:
    return {name: tuple(values.decode(case, tensors) for case in cases) for name, cases in stored.items()}
