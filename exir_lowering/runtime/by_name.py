"""The inputs and outputs of a call by name. ExecuTorch's own files have no names.

Those of inputs are torch.export's, in lower case: what a dict or list holds is called after the argument and the keys,
such as batch_input_ids. Those of outputs are their keys, such as states.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from exir_lowering._upstream.tensors import pytree
from exir_lowering.errors import InputError, did_you_mean, few
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.printing import printable
from exir_lowering.pte.value_kinds import TENSOR
from exir_lowering.runtime.inputs import FLAT, NESTED, as_tensor, describe


def bind(where: str, method: MethodSpec, given: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Return the inputs of a call, flat; InputError if one is missing or surplus. Plain values may be left out."""
    if named or len(given) != len(method.inputs) or any(isinstance(value, NESTED) for value in given):
        given = _match(where, method, given, named)
    return [as_tensor(value) if one.kind == TENSOR else value for one, value in zip(method.inputs, given, strict=True)]


def _match(where: str, method: MethodSpec, given: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    names = [one.name for one in method.signature.inputs]
    places = {form: place for place, name in enumerate(names) for form in (_plain(name), name)}
    flat: list[Any] = []
    for value in given:
        leaves, rest = _leaves(value), names[len(flat) :]
        ends = [max(filter(name.endswith, leaves), key=len, default="") for name in rest[: len(leaves)]]
        flat += map(leaves.__getitem__, ends) if sorted(ends) == sorted(leaves) else [value]
    bound: list[tuple[Any, Any]] = [*enumerate(flat)]  # by place, and by name what is none of them
    for name, value in named.items():
        bound += ((places.get(key, places.get(_plain(key), key)), leaf) for key, leaf in _leaves(value, name).items())
    plain = enumerate(method.signature.inputs)
    found = {place: one.value for place, one in plain if one.shape is None and one.possible}
    found.update(bound)
    if len(dict(bound)) < len(bound) or found.keys() != set(range(len(names))):
        shown, given_at = map(describe, method.inputs), [place for place, _ in bound]
        listed = few((f"{printable(name)}: {what}" for name, what in zip(names, shown, strict=True)), 8)
        hints = [f" {names[place]!r} is given twice." for place in places.values() if given_at.count(place) > 1]
        hints += (f" {key!r} is none of them.{did_you_mean(key, names)}" for key in found if isinstance(key, str))
        hints += (f" There is none for {name!r}." for place, name in enumerate(names) if place not in found)
        hints = hints[:1] + [f" {FLAT}"] * any(isinstance(value, NESTED) for value in (*given, *named.values()))
        count = f"{len(bound)} input{'' if len(bound) == 1 else 's'}, expected {len(names)}"
        raise InputError(f"{where}: got {count}{f' ({listed})' if listed else ''}.{''.join(hints)}")
    return [found[place] for place in range(len(names))]


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Return what a list, tuple or mapping holds, by the names that torch.export makes after that of the whole."""
    if not isinstance(value, NESTED):
        return {name: value}
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {end: leaf for key, one in items for end, leaf in _leaves(one, f"{name}_{_plain(str(key))}").items()}


def _plain(name: str) -> str:
    return re.sub("[^a-zA-Z0-9]", "_", name).lower()


class MissingOutputError(KeyError, AttributeError):
    """An output that is not there, asked for by key or as an attribute."""


class Results(list[Any]):
    """The outputs of a method, flat: a list, whose items have names where the model returns them under keys.

    `results["key"]` and `results.key` are an output, or the results in a list or dict that the model has there; by key
    where a list has a method of that name.
    """

    _names: tuple[str, ...] = ()

    def __init__(self, outputs: Iterable[Any], names: Iterable[str]) -> None:
        super().__init__(outputs)
        self._names = tuple(names)

    def keys(self) -> tuple[str, ...]:
        """Return the names; "output 0" and so on where there is none."""
        return self._names

    def values(self) -> tuple[Any, ...]:
        """Return the outputs."""
        return tuple(self)

    def items(self) -> tuple[tuple[str, Any], ...]:
        """Return each name with its output."""
        return tuple(zip(self._names, self, strict=True))

    def get(self, key: str, default: Any = None) -> Any:
        """Return what is under a key, or the default."""
        try:
            return self[key]
        except MissingOutputError:
            return default

    def __contains__(self, key: Any) -> bool:
        if not isinstance(key, str):
            return super().__contains__(key)
        return any(f"{name}.".startswith(f"{key}.") for name in self._names)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        named = zip(self._names, self, strict=False)  # there are none while it is copied
        found = {name[len(key) + 1 :]: value for name, value in named if f"{name}.".startswith(f"{key}.")}
        if not found:
            known = ", ".join(map(repr, self._names))
            raise MissingOutputError(f"there is no output {key!r}, only {known}.{did_you_mean(key, self._names)}")
        return found[""] if "" in found else Results(found.values(), found)

    __getattr__ = __getitem__


pytree.register_pytree_node(Results, lambda results: ([*results], results.keys()), Results)
