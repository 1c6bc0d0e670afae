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

from exir_lowering._upstream.fakes import FakeTensor
from exir_lowering._upstream.programs import pytree
from exir_lowering.errors import InputError
from exir_lowering.graphs import treespecs
from exir_lowering.lowered_module.convention import Convention, Fixed, Leaf
from exir_lowering.pte.digests import digest_of
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.value_kinds import CODES, DTYPES, MAX_RANK, TENSOR

VERSION = 1
_HEAD = struct.Struct("<Q16s")

Cases = tuple[list[Any], ...]  # the values of each of several calls


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
        "methods": [_write_convention(one) for one in record.conventions.values()],
        "attributes": {
            name: encode(f"The attribute {name!r}", value, tensors) for name, value in record.attributes.items()
        },
        "bundled": _cases("A bundled input", record.bundled, tensors),
        "expected": _cases("The output for a bundled input", record.expected, tensors),
    }
    content["tensors"] = [[CODES[one.dtype], list(one.shape)] for one in tensors]
    return pack(json.dumps(content), [one.reshape(-1).view(torch.uint8).numpy().data for one in tensors])


def pack(text: str, tensors: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return JSON, and the content of the tensors that it describes, as a file keeps them."""
    encoded = text.encode()
    return [_HEAD.pack(len(encoded), digest_of(encoded)), encoded, *tensors]


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
    if digest_of(text) != digest:
        raise ValueError("its digest differs")
    return json.loads(str(text, "utf-8")), rest


def _read(stored: Any, methods: Mapping[str, MethodSpec], rest: memoryview) -> Record:
    tensors = Tensors(_tensors(_a(list, stored["tensors"]), rest))
    read = [_read_convention(one) for one in _a(list, stored["methods"])]
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
    return Record(conventions, {name: decode(one, tensors) for name, one in attributes.items()}, bundled, expected)


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
    return {name: [encode(f"{where} of {name!r}", case, tensors) for case in cases] for name, cases in methods.items()}


def _read_cases(stored: Any, tensors: Tensors) -> dict[str, Cases]:
    decoded = {name: [decode(case, tensors) for case in _a(list, cases)] for name, cases in _a(dict, stored).items()}
    return {name: tuple(_a(list, case) for case in cases) for name, cases in decoded.items()}


def _write_convention(convention: Convention) -> dict[str, Any]:
    """Return a convention as JSON; InputError if torch.utils._pytree cannot serialize a type in a structure."""
    return {
        "name": convention.method,
        "positional": list(convention.positional),
        "keywords": list(convention.keywords),
        "in_spec": _dump(convention.method, "arguments", convention.in_spec),
        "out_spec": _dump(convention.method, "outputs", convention.out_spec),
        "inputs": [_leaf_json(leaf) for leaf in convention.inputs],
        "outputs": [_leaf_json(leaf) for leaf in convention.outputs],
        "written": list(convention.written),
    }


def _read_convention(json: Mapping[str, Any]) -> Convention:
    """Return what was written; InputError for an unknown type, for other JSON as `decode`."""
    method = json["name"]
    if not isinstance(method, str):
        raise TypeError(f"{method!r} is not the name of a method")
    specs = [_load(method, json[part]) for part in ("in_spec", "out_spec")]
    parts = specs[0].children()
    if specs[0].type is not tuple or [part.type for part in parts] != [tuple, dict]:
        raise ValueError("the arguments of a method are a tuple and a dict")
    if list(parts[1].context) != json["keywords"]:
        raise ValueError("its arguments by name are not its keyword parameters")
    inputs, outputs = (tuple(map(_read_leaf, json[part])) for part in ("inputs", "outputs"))
    positional, keywords = (_names(json[part]) for part in ("positional", "keywords"))
    written = json.get("written", [])
    if not isinstance(written, list) or len(set(written)) != len(written):
        raise ValueError(f"it writes into inputs {written!r}")
    return Convention(method, positional, keywords, specs[0], specs[1], inputs, outputs, tuple(written))


def _load(method: str, text: Any) -> Any:
    try:
        return treespecs.loads(text)
    except treespecs.UnknownTypeError as error:
        raise InputError(
            f"Method {method!r} takes or returns a type that is not known here: {error} Import the module that "
            "registers it with torch.utils._pytree, then load the file."
        ) from None
    except InputError as error:
        raise ValueError(f"the structure of method {method!r} cannot be read: {error}") from None


def _names(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"{given!r} is not a list of parameter names")
    return tuple(given)


def _read_leaf(json: Any) -> Leaf:
    if json is None:
        return None
    (content,) = json
    value = decode(content, Tensors(()))
    if value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(f"a fixed value is a {type(value).__name__}")
    return Fixed(value)


def _dump(method: str, what: str, spec: Any) -> str:
    reason = "it changes when it is written and read back"
    try:
        text: str = pytree.treespec_dumps(spec)
        if treespecs.loads(text) == spec:
            return text
    except MemoryError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    types = sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in _types(spec) if kind.__module__ != "builtins"})
    raise InputError(
        f"Method {method!r} cannot be saved: its {what}' structure ({', '.join(types) or spec}) cannot be "
        f"serialized: {reason}. Register the type with serialized_type_name, to_dumpable_context and "
        "from_dumpable_context, or use lists, tuples and dicts with str keys."
    )


def _types(spec: Any) -> list[type]:
    own = [spec.type] if isinstance(spec.type, type) else []
    if isinstance(spec.context, type):  # of a named tuple
        own.append(spec.context)
    return own + [kind for child in spec.children() for kind in _types(child)]


def _leaf_json(leaf: Leaf) -> Any:
    return None if leaf is None else [encode("a fixed value", leaf.value, [])]


_DIGITS = 4300  # the most that Python converts by default
_TOO_LARGE = 10**_DIGITS
DEEPEST = 300  # how deep a value may be nested; Python's own limit is a setting of the process, which torch raises
STORABLE = "None, bool, int, float, str, torch.Tensor, and lists, tuples and dicts of these"


def encode(where: str, value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a value as JSON, with numbers for its tensors, which are added; InputError if it cannot be stored."""
    try:
        return _encode(where, value, tensors)
    except RecursionError:
        raise InputError(f"{where} contains itself, or is nested too deeply to be stored.") from None


class Tensors:
    """The tensors that JSON refers to, each once: a small file cannot ask for many copies of a large one."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._left = dict(enumerate(tensors))

    def take(self, number: Any) -> torch.Tensor:
        """Return a tensor by its number, once; TypeError or LookupError if there is none or it was already taken."""
        if type(number) is not int:
            raise TypeError(f"{number!r} is not the number of a tensor")
        return self._left.pop(number)


def decode(json: Any, tensors: Tensors, depth: int = 0) -> Any:
    """Return the value that `encode` made JSON of; for other JSON, any error that `record.read` catches."""
    if depth > DEEPEST:
        raise ValueError(f"a value that is nested more than {DEEPEST} deep")
    if json is None or isinstance(json, (bool, int, float, str)):
        return json
    if isinstance(json, list):
        return [decode(item, tensors, depth + 1) for item in json]
    ((kind, content),) = json.items()
    if kind == "float":
        if not isinstance(content, str):
            raise TypeError(f"{content!r} is not the text of a float")
        return float(content)
    if kind == "tuple":
        return tuple(decode(item, tensors, depth + 1) for item in content)
    if kind == "dict":
        return {decode(key, tensors, depth + 1): decode(item, tensors, depth + 1) for key, item in content}
    if kind == "tensor":
        return tensors.take(content)
    raise ValueError(f"unknown kind {kind!r}")


def storable(where: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is stored, in the default order; InputError if its kind or type cannot be stored."""
    problem = None
    if type(tensor) is not torch.Tensor or isinstance(tensor, FakeTensor):
        problem = (
            f"is a {type(tensor).__module__}.{type(tensor).__qualname__}; store its plain tensor: .detach().clone()"
        )
    elif tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        problem = f"is a {tensor.layout} tensor on {tensor.device}; only dense tensors on the CPU can be stored"
    elif tensor.dtype not in CODES:
        problem = f"has the dtype {tensor.dtype}, which ExecuTorch does not know"
    if problem is not None:
        raise InputError(f"{where} {problem}.")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _encode(where: str, value: Any, tensors: list[torch.Tensor], depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise RecursionError
    kind = type(value)
    if kind is int and abs(value) >= _TOO_LARGE:
        raise InputError(
            f"{where} is an int of more than {_DIGITS} digits, which cannot be stored. Store it as hex(...)."
        )
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind in (list, tuple):
        items = [_encode(f"{where}[{index}]", item, tensors, depth + 1) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind is dict:
        pairs = [
            [
                _encode(f"a key of {where}", key, tensors, depth + 1),
                _encode(f"{where}[{key!r}]", item, tensors, depth + 1),
            ]
            for key, item in value.items()
        ]
        return {"dict": pairs}
    if isinstance(value, torch.Tensor):
        tensors.append(storable(where, value))
        return {"tensor": len(tensors) - 1}
    raise InputError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored. Storable: {STORABLE}."
    )
