"""What a `.pte` file says about how it was made: a named datum that nothing reads when the file runs.

It is compact JSON with sorted keys. It has no path, no time and no name of a user: nothing that two lowerings of the
same programs do not have in common. It is a claim of the file: what can be seen in the tables is taken from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from exir_lowering.pte.flatbuffer import CorruptError

KEY = "exir_lowering.provenance"
"""The key among a `.pte` file's named data: a part of the file format."""

RESERVED = b"exir_lowering: reserved for provenance"
"""What is emitted in its place."""

VERSION = 1
"""Increased when a field changes its meaning or is removed."""

_LONGEST = 1 << 26

Bounds: TypeAlias = tuple[tuple[int, int | None], ...]
"""The least and the greatest size of each dimension; None where nothing bounds it."""


@dataclass(frozen=True, slots=True)
class NamedValue:
    """What the file calls an input or an output of a method."""

    name: str
    bounds: Bounds | None = None  # None where no dimension is dynamic, or nothing is known


@dataclass(frozen=True, slots=True)
class MethodProvenance:
    """How a method was made."""

    partitioners: tuple[str, ...] = ()  # in priority order
    rewrites: Mapping[str, int] = field(default_factory=dict)  # how often each of them changed something
    inputs: tuple[NamedValue, ...] = ()  # in the order of the file, as are the outputs
    outputs: tuple[NamedValue, ...] = ()
    values: Mapping[int, str] = field(default_factory=dict)  # the model's names of weights and state, by value
    results: tuple[int, ...] = ()  # how many results each delegate has, which the tables do not say


@dataclass(frozen=True, slots=True)
class Provenance:
    """How a file was made."""

    versions: Mapping[str, str] = field(default_factory=dict)  # of exir-lowering, torch and executorch
    options: Mapping[str, Any] = field(default_factory=dict)  # those that are not the default
    backends: Mapping[str, str] = field(default_factory=dict)  # their versions, by id
    weights: Mapping[str, str] = field(default_factory=dict)  # the model's names of named data, by key
    methods: Mapping[str, MethodProvenance] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return it as a file keeps it."""
        known = {"version": VERSION, "plan": "", **asdict(self)}  # earlier releases read a plan's digest
        return json.dumps(known, sort_keys=True, separators=(",", ":")).encode()


def read(named: Mapping[str, memoryview]) -> Provenance | None:
    """Return a file's provenance; None if it has none, or one of a later version; a CorruptError when it is damaged."""
    content = named.get(KEY)
    if content is None:
        return None
    try:
        if len(content) > _LONGEST:
            raise ValueError(f"it has {len(content)} bytes")
        tree = json.loads(str(content, "utf-8"))
        return _read(tree) if _a(int, tree["version"]) == VERSION else None
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise CorruptError(f"its provenance is damaged: {type(error).__name__}: {error}") from None


def _read(tree: Any) -> Provenance:
    methods = {_a(str, name): _method(part) for name, part in _a(dict, tree["methods"]).items()}
    versions, backends, weights = (_texts(tree[name]) for name in ("versions", "backends", "weights"))
    return Provenance(versions, _a(dict, tree["options"]), backends, weights, methods)


def _method(tree: Any) -> MethodProvenance:
    return MethodProvenance(
        tuple(_a(str, name) for name in _a(list, tree["partitioners"])),
        {_a(str, name): _a(int, count) for name, count in _a(dict, tree["rewrites"]).items()},
        tuple(map(_named, _a(list, tree["inputs"]))),
        tuple(map(_named, _a(list, tree["outputs"]))),
        {int(number): _a(str, name) for number, name in _a(dict, tree["values"]).items()},
        tuple(_a(int, count) for count in _a(list, tree.get("results", []))),
    )


def _named(tree: Any) -> NamedValue:
    bounds = tree["bounds"]
    return NamedValue(_a(str, tree["name"]), None if bounds is None else tuple(map(_bound, _a(list, bounds))))


def _bound(pair: Sequence[Any]) -> tuple[int, int | None]:
    least, greatest = pair
    if _a(int, least) < 0 or (greatest is not None and _a(int, greatest) < least):
        raise ValueError(f"a dimension is from {least} to {greatest}")
    return least, greatest


def _texts(tree: Any) -> dict[str, str]:
    return {key: _a(str, value) for key, value in _a(dict, tree).items()}


def _a(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"got a {type(value).__name__}, expected a {kind.__name__}")
    return value
