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
from exir_lowering.errors import InputError, exception_text
from exir_lowering.graphs import treespecs
from exir_lowering.lowered_module.convention import Convention, Fixed
from exir_lowering.pte.digests import digest_of
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.value_kinds import CODES, DTYPES, TENSOR

VERSION = 1
_HEAD = struct.Struct("<Q16s")

Cases = tuple[list[Any], ...]  # the values of each of several calls


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What a lowered module has besides its program."""

    conventions: Mapping[str, Convention]  # how each method is called
    attributes: Mapping[str, Any]  # what was set on it
    bundled: Mapping[str, Cases]  # the values in the arguments of the bundled inputs, by method


def write(record: Record) -> list[bytes | memoryview]:
    """Return a record as its file keeps it, in pieces; InputError if a value or structure cannot be stored."""
    tensors: list[torch.Tensor] = []
    content = {
        "version": VERSION,
        "methods": [_write_convention(one) for one in record.conventions.values()],
        "attributes": {
            name: encode(f"The attribute {name!r}", one, tensors) for name, one in record.attributes.items()
        },
        "bundled": {
            name: [encode(f"A bundled input of {name!r}", case, tensors) for case in cases]
            for name, cases in record.bundled.items()
        },
        "expected": {},  # outputs for these, which older versions read
    }
    content["tensors"] = [[CODES[one.dtype], list(one.shape)] for one in tensors]
    try:
        text = json.dumps(content)
    except ValueError as error:  # Python converts only so many digits of an int
        raise InputError(f"A value cannot be stored: {error}. Store a large int as hex(...).") from error
    return pack(text, [one.reshape(-1).view(torch.uint8).numpy().data for one in tensors])


def pack(text: str, tensors: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return JSON, and the content of the tensors that it describes, as a file keeps them."""
    encoded = text.encode()
    return [_HEAD.pack(len(encoded), digest_of(encoded)), encoded, *tensors]


def unpack(kept: memoryview) -> tuple[Any, memoryview]:
    """Return the JSON in what `pack` returned, and the content of the tensors; ValueError or struct.error otherwise."""
    length, digest = _HEAD.unpack_from(kept)
    text, rest = kept[_HEAD.size : _HEAD.size + length], kept[_HEAD.size + length :]
    if digest_of(text) != digest:
        raise ValueError("its digest differs")
    return json.loads(str(text, "utf-8")), rest


def read(where: str, methods: Mapping[str, MethodSpec], kept: memoryview | None) -> Record:
    """Return the record in the file `where`; InputError if it is missing, newer, damaged, or of unknown types."""
    if kept is None:
        raise InputError(
            f"{where} was not saved by LoweredModule.save: it does not say how its methods are called. Use "
            "exir_lowering.load, which takes flat inputs, or save lowered.module() instead of lowered.emit()."
        )
    try:
        stored, rest = unpack(kept)
        if stored["version"] != VERSION:
            raise InputError(
                f"{where} has version {stored['version']}, but this exir-lowering reads {VERSION}. Install a newer one."
            )
        return _read(stored, methods, rest)
    except InputError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError, struct.error) as error:
        raise InputError(
            f"{where} cannot be loaded: its record of methods and attributes is damaged: {exception_text(error)}. "
            "Make or copy it again."
        ) from error


def _read(stored: Any, methods: Mapping[str, MethodSpec], rest: memoryview) -> Record:
    tensors, start = [], 0
    for code, shape in stored["tensors"]:
        dtype, size = DTYPES[code], math.prod(shape) * DTYPES[code].itemsize
        memory = bytearray(rest[start : start + size])  # a copy, which may be written to
        flat = torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype)
        tensors.append(flat.reshape(shape))
        start += size
    conventions = {one["name"]: _read_convention(one) for one in stored["methods"]}
    bundled = {name: tuple(decode(case, tensors) for case in cases) for name, cases in stored["bundled"].items()}
    for name, one in conventions.items():
        method = methods[name]
        if (len(one.inputs), len(one.written) + len(one.outputs)) != (len(method.inputs), len(method.outputs)):
            raise ValueError(f"method {name!r} has a different number of inputs or outputs in the program")
        if not all(one.inputs[index] is None and method.inputs[index].kind == TENSOR for index in one.written):
            raise ValueError(f"method {name!r} writes into an input that is not a tensor")
    for name, cases in bundled.items():
        count = len(conventions[name].inputs)
        if any(len(case) != count for case in cases):
            raise ValueError(f"a bundled input of method {name!r} has the wrong number of values")
    attributes = {name: decode(one, tensors) for name, one in stored["attributes"].items()}
    return Record(conventions, attributes, bundled)


def _write_convention(convention: Convention) -> dict[str, Any]:
    """Return a convention as JSON; InputError if torch.utils._pytree cannot serialize a type in a structure."""
    inputs, outputs = (
        [None if leaf is None else [encode("a fixed value", leaf.value, [])] for leaf in leaves]
        for leaves in (convention.inputs, convention.outputs)
    )
    return {
        "name": convention.method,
        "positional": list(convention.positional),
        "keywords": list(convention.keywords),
        "in_spec": _dump(convention.method, "arguments", convention.in_spec),
        "out_spec": _dump(convention.method, "outputs", convention.out_spec),
        "inputs": inputs,
        "outputs": outputs,
        "written": list(convention.written),
    }


def _read_convention(stored: Mapping[str, Any]) -> Convention:
    """Return what was written; InputError for an unknown type, for other JSON any error that `read` catches."""
    method, specs = stored["name"], []
    for part in ("in_spec", "out_spec"):
        try:
            specs.append(treespecs.loads(stored[part]))
        except treespecs.UnknownTypeError as error:
            raise InputError(
                f"Method {method!r} takes or returns a type that is not known here: {error} Import the module that "
                "registers it with torch.utils._pytree, then load the file."
            ) from None
        except InputError as error:
            raise ValueError(f"the structure of method {method!r} cannot be read: {error}") from None
    if specs[0].type is not tuple or [part.type for part in specs[0].children()] != [tuple, dict]:
        raise ValueError("the arguments of a method are a tuple and a dict")
    inputs, outputs = (
        tuple(None if leaf is None else Fixed(decode(leaf[0], ())) for leaf in stored[part])
        for part in ("inputs", "outputs")
    )
    positional, keywords, written = (tuple(stored.get(part, ())) for part in ("positional", "keywords", "written"))
    return Convention(method, positional, keywords, specs[0], specs[1], inputs, outputs, written)


def _dump(method: str, what: str, spec: Any) -> str:
    reason = "it changes when it is written and read back"
    try:
        text: str = pytree.treespec_dumps(spec)
        if treespecs.loads(text) == spec:
            return text
    except MemoryError:
        raise
    except Exception as error:
        reason = exception_text(error)
    types = sorted({f"{kind.__module__}.{kind.__qualname__}" for kind in _types(spec) if kind.__module__ != "builtins"})
    raise InputError(
        f"Method {method!r} cannot be saved: its {what}' structure ({', '.join(types) or spec}) cannot be "
        f"serialized: {reason}. Register the type with serialized_type_name, to_dumpable_context and "
        "from_dumpable_context, or use lists, tuples and dicts with str keys."
    )


def _types(spec: Any) -> list[type]:
    own = [kind for kind in (spec.type, spec.context) if isinstance(kind, type)]  # the context is a named tuple's type
    return own + [kind for child in spec.children() for kind in _types(child)]


DEEPEST = 300  # how deep a value may be nested; Python's own limit is a setting of the process, which torch raises
STORABLE = "None, bool, int, float, str, torch.Tensor, and lists, tuples and dicts of these"


def encode(where: str, value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a value as JSON, with numbers for its tensors, which are added; InputError if it cannot be stored."""
    try:
        return _encode(where, value, tensors, 0)
    except RecursionError:
        raise InputError(f"{where} contains itself, or is nested too deeply to be stored.") from None


def _encode(where: str, value: Any, tensors: list[torch.Tensor], depth: int) -> Any:
    if depth > DEEPEST:
        raise RecursionError
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind in (list, tuple):
        items = [_encode(f"{where}[{index}]", item, tensors, depth + 1) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind is dict:
        keys = [_encode(f"a key of {where}", key, tensors, depth + 1) for key in value]
        items = [_encode(f"{where}[{key!r}]", item, tensors, depth + 1) for key, item in value.items()]
        return {"dict": [list(pair) for pair in zip(keys, items, strict=True)]}
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(value, torch.Tensor):
        raise InputError(f"{where} is a {name}, which cannot be stored. Storable: {STORABLE}.")
    if kind is not torch.Tensor or isinstance(value, FakeTensor):
        raise InputError(f"{where} is a {name}; store its plain tensor: .detach().clone().")
    if value.device.type != "cpu" or value.layout != torch.strided or value.is_quantized:
        found = f"{where} is a {value.layout} tensor on {value.device}"
        raise InputError(f"{found}; only dense tensors on the CPU can be stored.")
    if value.dtype not in CODES:
        raise InputError(f"{where} has the dtype {value.dtype}, which ExecuTorch does not know.")
    tensors.append(value.detach().resolve_conj().resolve_neg().contiguous())
    return {"tensor": len(tensors) - 1}


def decode(stored: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value that `encode` made JSON of; for other JSON, any error that `read` catches."""
    if stored is None or isinstance(stored, (bool, int, float, str)):
        return stored
    if isinstance(stored, list):
        return [decode(item, tensors) for item in stored]
    ((kind, content),) = stored.items()
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in content)
    if kind == "dict":
        return {decode(key, tensors): decode(item, tensors) for key, item in content}
    readers: dict[str, Any] = {"float": float, "tensor": tensors.__getitem__}
    return readers[kind](content)
