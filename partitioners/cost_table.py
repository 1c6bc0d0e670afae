"""What operators cost on the host and on backends, as a table.

Keys of a table are operator names such as "aten.add.Tensor", "aten.add" for every overload, or, for certain inputs, a
signature as `signature` writes it: "aten.add.Tensor(float32[1, 8], float32[1, 8])".
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from exir_lowering import InputError, graphs
from exir_lowering.graphs import measures
from exir_lowering.partitioners.supports.predicates import check_operator
from exir_lowering.plugins import HOST, CostModel as CostModel, let_through

_FORMAT, _VERSION = "exir-lowering costs", 1


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs by place and operator, as a `CostModel`; keys are tried from the signature to the name without overload.

    Attributes:
        places: For "host" and each backend, the costs by key.
        per_byte: What it costs to bring one byte from one place to another.
        per_call: For backends, what each call of a partition costs; 0 for those that are missing.
        unit: The unit of all costs.
        default: For places, the cost of an operator that the table does not have there; for places that are missing
            here, the default model is used.
    """

    places: Mapping[str, Mapping[str, float]]
    per_byte: float
    per_call: Mapping[str, float] = field(default_factory=dict)
    unit: str = "seconds"
    default: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the costs and the operator names.

        Raises:
            InputError: A cost is not a finite number of at least 0, an operator does not exist, or the host is missing.
        """
        _check_mapping("places", self.places)
        if HOST not in self.places:
            raise InputError(
                f"A cost table has the places {_join(self.places)}, {HOST!r} is missing: every operator can stay "
                f"there, so its cost there must be known."
            )
        for place, costs in self.places.items():
            _check_costs(f"places[{place!r}]", costs)
        for name in {str(key).partition("(")[0]: None for costs in self.places.values() for key in costs}:
            check_operator(name)
        _check_costs("default", self.default, self.places)
        if not isinstance(self.unit, str):
            raise InputError(f"A cost table's unit is {self.unit!r}, expected a word such as 'seconds'.")
        _check_cost("per_byte", self.per_byte)
        _check_costs("per_call", self.per_call, [place for place in self.places if place != HOST])

    @property
    def byte_cost(self) -> float:
        """What it costs to bring one byte from one place to another."""
        return self.per_byte

    def node_cost(self, node: Node, place: str) -> float | None:
        """Return the table's cost of an operator at a place, None if it has none."""
        costs = self.places.get(place)
        if costs is None:
            return None
        name = graphs.operator_name(node)
        for key in (signature(node), name, name.rpartition(".")[0]):
            if key in costs:
                return costs[key]
        return self.default.get(place)

    def call_cost(self, place: str) -> float:
        """Return what each call of a partition costs."""
        return self.per_call.get(place, 0.0)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostTable:
        """Read a table that `save` wrote.

        Args:
            path: The file.

        Returns:
            The table.

        Raises:
            InputError: The file cannot be read, has another version, or has invalid content.
        """
        where = f"Cost table {os.fspath(path)!r}"
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            let_through(error)
            raise InputError(f"{where} cannot be read as JSON: {error}.") from error
        found = (content.get("format"), content.get("version")) if isinstance(content, dict) else (None, None)
        if found != (_FORMAT, _VERSION):
            raise InputError(
                f"{where} has the format {found[0]!r}, version {found[1]!r}; expected {_FORMAT!r}, version {_VERSION}. "
                f"CostTable.save writes it; make the table again if it comes from another version."
            )
        names = {"places", "per_byte", "per_call", "unit", "default"}
        given = set(content) - {"format", "version"}
        if given - names or {"places", "per_byte"} - given:
            raise InputError(
                f"{where} has the entries {', '.join(sorted(given))}; expected places and per_byte, and no others than "
                f"{', '.join(sorted(names))}."
            )
        try:
            return cls(**{name: content[name] for name in sorted(given)})
        except InputError as error:
            raise InputError(f"{where}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the table as JSON; equal tables give equal bytes.

        Returns:
            The path.

        Raises:
            InputError: The file cannot be written.
        """
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "unit": self.unit,
            "per_byte": self.per_byte,
            "per_call": dict(self.per_call),
            "default": dict(self.default),
            "places": {place: dict(costs) for place, costs in self.places.items()},
        }
        try:
            Path(path).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        except OSError as error:
            let_through(error)
            raise InputError(f"Cost table {os.fspath(path)!r} cannot be written: {error}.") from error
        return Path(path)


def signature(node: Node) -> str:
    """Return an operator with the dtypes and sizes of its tensors, "?" where unknown, and its other arguments."""
    arguments = [_write_argument(argument) for argument in node.args]
    arguments += [f"{name}={_write_argument(node.kwargs[name])}" for name in sorted(node.kwargs)]
    return f"{graphs.operator_name(node)}({', '.join(arguments)})"


def _write_argument(argument: Any) -> str:
    if isinstance(argument, Node):
        return _write_value(argument.meta.get("val"))
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_write_argument, argument))}]"
    return str(argument)


def _write_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = (str(size) if isinstance(size, int) else "?" for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_write_value, value))}]"
    return "?" if value is None or isinstance(value, measures.SYMBOLS) else str(value)


def _check_mapping(name: str, given: Any, known: Any = None) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InputError(f"Costs: {name} is {given!r}, expected a mapping from names.")
    unknown = [key for key in given if known is not None and key not in known]
    if unknown:
        raise InputError(f"Costs: {name} names {_join(unknown)}, expected some of {_join(known)}.")


def _check_costs(name: str, costs: Any, known: Any = None) -> None:
    _check_mapping(name, costs, known)
    for key, value in costs.items():
        _check_cost(f"{name}[{key!r}]", value)


def _check_cost(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= sys.float_info.max:
        raise InputError(f"Costs: {name} is {value!r}, expected a finite number of at least 0.")


def _join(names: Any) -> str:
    return ", ".join(map(repr, names)) or "none"
