"""What a `.pte` file says about how it was made: a named datum that nothing reads when the file runs.

It is compact JSON with sorted keys. It has no path, no time and no name of a user: nothing that two lowerings of the
same programs do not have in common. It is a claim of the file: what can be seen in the tables is taken from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from exir_lowering.pte.flatbuffer import CorruptError

KEY = "exir_lowering.provenance"
"""The key among a `.pte` file's named data: a part of the file format."""

RESERVED = b"exir_lowering: reserved for provenance"
"""What is emitted in its place."""

VERSION = 1
"""Increased when a field changes its meaning or is removed."""

Bounds: TypeAlias = tuple[tuple[int, int | None], ...]
"""The least and the greatest size of each dimension; None where nothing bounds it."""


@dataclass(frozen=True, slots=True)
class NamedValue:
    """What the file calls an input or an output of a method."""

    name: str
    bounds: Bounds | None = None  # None where no dimension is dynamic, or nothing is known


@dataclass(frozen=True, slots=True)
class Dimension:
    """What a `torch.export.Dim` says: which dimensions of inputs have one size, and how small it may be."""

    name: str  # of the Dim, "" if that is not known
    least: int
    places: tuple[tuple[int, int, int, int], ...]  # an input, its dimension, and factor and summand of its size there


@dataclass(frozen=True, slots=True)
class MethodProvenance:
    """How a method was made."""

    partitioners: tuple[str, ...] = ()  # in priority order
    rewrites: Mapping[str, int] = field(default_factory=dict)  # how often each of them changed something
    inputs: tuple[NamedValue, ...] = ()  # in the order of the file, as are the outputs
    outputs: tuple[NamedValue, ...] = ()
    values: Mapping[int, str] = field(default_factory=dict)  # the model's names of weights and state, by value
    results: tuple[int, ...] = ()  # how many results each delegate has, which the tables do not say
    dimensions: tuple[Dimension, ...] = ()  # of inputs
    joint: bool = False  # whether sizes are bounded together: dimensions may be larger than the tables say, not all


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
        known: dict[str, Any] = asdict(self)
        for method in known["methods"].values():
            if not method["dimensions"]:
                del method["dimensions"]
            if not method["joint"]:
                del method["joint"]
        known.update(version=VERSION, plan="")  # earlier releases read a plan's digest
        return json.dumps(known, sort_keys=True, separators=(",", ":")).encode()


def read(named: Mapping[str, memoryview]) -> Provenance | None:
    """Return a file's provenance; None if it has none, or one of a later version; a CorruptError when it is damaged."""
    content = named.get(KEY)
    if content is None:
        return None
    try:
        tree = json.loads(str(content, "utf-8"))
        if int(tree["version"]) != VERSION:
            return None
        parts = {name: tree[name] for name in ("versions", "options", "backends", "weights")}
        if not all(isinstance(one, dict) for one in parts.values()):
            raise TypeError("got something else where names and their values are")
        return Provenance(**parts, methods={name: _method(part) for name, part in tree["methods"].items()})
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CorruptError(f"its provenance is damaged: {type(error).__name__}: {error}") from None


def _method(tree: Any) -> MethodProvenance:
    inputs, outputs = (tuple(map(_named, tree[name])) for name in ("inputs", "outputs"))
    values = {int(number): name for number, name in tree["values"].items()}
    results, dimensions = map(int, tree.get("results", ())), map(_dimension, tree.get("dimensions", ()))
    made = tuple(tree["partitioners"]), tree["rewrites"]
    return MethodProvenance(*made, inputs, outputs, values, tuple(results), tuple(dimensions), bool(tree.get("joint")))


def _dimension(tree: Any) -> Dimension:
    places = tuple((int(index), int(at), int(factor), int(more)) for index, at, factor, more in tree["places"])
    if any(index < 0 or at < 0 or factor < 1 for index, at, factor, _ in places):
        raise ValueError(f"a size of inputs is at {places}")
    return Dimension(str(tree["name"]), int(tree["least"]), places)


def _named(tree: Any) -> NamedValue:
    for least, greatest in tree["bounds"] or ():
        if least < 0 or (greatest is not None and greatest < least):
            raise ValueError(f"a dimension is from {least} to {greatest}")
    if not isinstance(tree["name"], str):
        raise TypeError(f"got the name {tree['name']!r}")
    return NamedValue(tree["name"], tree["bounds"] and tuple(map(tuple, tree["bounds"])))
