r"""The format of a reference payload: a header of fixed size, then the program as JSON. Weights are named data.

The header, little-endian: 8 bytes magic, b"EXIRREF\0"; 4 bytes version; 4 bytes CRC-32 of the body; 8 bytes length of
the body. The body is UTF-8 JSON, a `Program`.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from exir_lowering import InputError, WeightRef
from exir_lowering.graphs.operators import pure as pure_operators

VERSION = 1
_MAGIC = b"EXIRREF\0"
_HEADER = struct.Struct("<8sIIQ")
_NAMED: dict[str, tuple[type, dict[str, Any]]] = {
    "dtype": (torch.dtype, dict(pure_operators.DTYPES)),
    "layout": (torch.layout, {"strided": torch.strided}),
    "memory_format": (
        torch.memory_format,
        {
            "channels_last": torch.channels_last,
            "channels_last_3d": torch.channels_last_3d,
            "contiguous_format": torch.contiguous_format,
            "preserve_format": torch.preserve_format,
        },
    ),
}
"""Values of torch's own types, by name: only these attributes of torch are allowed."""


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A computed argument: the number of a value of the graph."""

    index: int


@dataclass(frozen=True, slots=True)
class GraphRef:
    """An argument that is a graph: its number in the program."""

    index: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operator call."""

    operator: str  # such as "aten.add.Tensor"
    args: list[Any]  # plain values, `ValueRef`, `GraphRef`, lists of them
    kwargs: dict[str, Any]
    handle: int  # the debug handle of its node, -1 if there is none


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph. Its values are numbered: the inputs, the constants, then the result of each instruction."""

    inputs: int  # how many
    constants: list[int]  # as numbers of the program's tensors
    code: list[Instruction]  # in order
    results: Any  # what it returns, in the form of an argument


@dataclass(frozen=True, slots=True)
class Program:
    """The program in a payload."""

    tensors: list[WeightRef]  # weights, and the initial values of states
    states: list[int]  # the number of the initial tensor of each state that the delegate owns
    inputs: list[list[Any]]  # for each input of the first graph, ["user"], ["tensor", number] or ["state", number]
    # For each result of the first graph, ["user"] if it is returned, or ["state", number] if it is written to a state
    # after the call.
    outputs: list[list[Any]]
    graphs: list[Graph]  # the first one is the program, the others are called by its operators


def events(graph: Graph, first: int) -> list[str]:
    """Return the identifier of each instruction's profile event; debug handles may occur twice.

    `first` is the number of instructions in the graphs before it.
    """
    return [f"{instruction.operator} #{number}" for number, instruction in enumerate(graph.code, first)]


def dump(program: Program) -> bytes:
    """Write a program; equal programs give equal bytes.

    TypeError for an argument of a type that the format does not support.
    """
    operators: dict[str, int] = {}
    tree = {
        "tensors": [ref.to_json() for ref in program.tensors],
        "states": program.states,
        "inputs": program.inputs,
        "outputs": program.outputs,
        "graphs": [
            [
                graph.inputs,
                graph.constants,
                [
                    [operators.setdefault(i.operator, len(operators)), encode(i.args), encode(i.kwargs), i.handle]
                    for i in graph.code
                ],
                encode(graph.results),
            ]
            for graph in program.graphs
        ],
        "operators": list(operators),
    }
    body = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
    return _HEADER.pack(_MAGIC, VERSION, zlib.crc32(body), len(body)) + body


def parse(payload: bytes) -> Program:
    """Read a program; InputError if the bytes are not a reference payload, have another version, or are damaged."""
    body = _body(payload)
    try:
        tree = json.loads(body)
        operators = tree["operators"]
        return Program(
            tensors=[WeightRef.from_json(fields) for fields in tree["tensors"]],
            states=list(tree["states"]),
            inputs=list(tree["inputs"]),
            outputs=list(tree["outputs"]),
            graphs=[
                Graph(
                    inputs,
                    constants,
                    [Instruction(operators[op], decode(a), decode(k), handle) for op, a, k, handle in code],
                    decode(results),
                )
                for inputs, constants, code, results in tree["graphs"]
            ],
        )
    except InputError:  # already has a message
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise InputError(
            f"A reference payload cannot be read: {type(error).__name__}: {error}. Its checksum is right, so it was "
            "not written by this version of the backend. Lower the model again."
        ) from error


def _body(payload: bytes) -> bytes:
    who = "This is not a payload of backend 'reference'"
    if len(payload) < _HEADER.size:
        raise InputError(f"{who}, or a truncated one: got {len(payload)} bytes, expected at least {_HEADER.size}.")
    magic, version, checksum, length = _HEADER.unpack_from(payload)
    if magic != _MAGIC:
        raise InputError(f"{who}: it starts with {bytes(payload[:8])!r}, expected {_MAGIC!r}.")
    if version != VERSION:
        raise InputError(
            f"A reference payload has format version {version}, this delegate reads version {VERSION}. Lower the model "
            f"with this version of exir-lowering, or run it with the version that it was lowered with."
        )
    body = bytes(payload[_HEADER.size :])
    if len(body) != length:
        state = "truncated" if len(body) < length else "followed by other data"
        raise InputError(f"A reference payload is {state}: got a body of {len(body)} bytes, expected {length}.")
    if zlib.crc32(body) != checksum:
        raise InputError("A reference payload is damaged: its checksum is wrong. Get the file from its source again.")
    return body


def encode(value: Any) -> Any:
    """Turn an argument into JSON; a value that JSON cannot express becomes an object whose only key is its type.

    Raises TypeError if the format does not support its type.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"map": {key: encode(item) for key, item in value.items()}}
    if isinstance(value, ValueRef):
        return {"%": value.index}
    if isinstance(value, GraphRef):
        return {"graph": value.index}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, torch.device) and value.type == "cpu":
        return {"device": "cpu"}
    for name, (kind, known) in _NAMED.items():
        if isinstance(value, kind) and (text := str(value).removeprefix("torch.")) in known:
            return {name: text}
    raise TypeError(f"an argument of type {type(value).__name__} ({value!r})")


def decode(tree: Any) -> Any:
    """Turn JSON back into an argument; ValueError if it is not something that `encode` makes."""
    if isinstance(tree, list):
        return [decode(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind in _NAMED:
        known = _NAMED[kind][1]
        if not isinstance(content, str) or content not in known:
            raise ValueError(f"{str(content)[:80]!r} is not a valid {kind}")
        return known[content]
    return _DECODERS[kind](content)


def _device(name: Any) -> torch.device:
    if name != "cpu":
        raise ValueError(f"device {str(name)[:80]!r}; the delegate executes on the CPU")
    return torch.device("cpu")


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "%": ValueRef,
    "graph": GraphRef,
    "float": float,
    "complex": lambda parts: complex(*map(decode, parts)),
    "device": _device,
    "map": lambda items: {key: decode(item) for key, item in items.items()},
}
