"""The tables of a program's signature, made once: torch makes a table of all parameters for each look-up.

A table is rebuilt when the lists of a signature are replaced, and when anything in any signature has changed.
"""

from __future__ import annotations

from typing import Any

from torch.export import ExportGraphSignature, graph_signature

from exir_lowering._upstream.acceleration.memory import current

_TABLES = (
    "inputs_to_parameters",
    "inputs_to_buffers",
    "inputs_to_lifted_tensor_constants",
    "buffers_to_mutate",
    "parameters",
    "buffers",
    "lifted_tensor_constants",
    "user_inputs",
)

_PARTS = tuple(
    getattr(graph_signature, name)
    for name in ("InputSpec", "OutputSpec", "TensorArgument", "SymIntArgument", "SymFloatArgument", "SymBoolArgument")
)
"""The classes of what the tables are made from: their objects can be changed."""

_MOST = 1000
"""How many tables are kept at most."""


class _Changes:
    """When anything in a signature was last changed: another object each time."""

    last: object = object()


def replacements() -> list[tuple[Any, str, Any]]:
    """Return the properties of signatures that remember their tables, and what notices changes."""
    tables = [(ExportGraphSignature, name, _remembering(name)) for name in _TABLES]
    return [*((kind, "__setattr__", _noticing(kind.__setattr__)) for kind in _PARTS), *tables]


def _noticing(assign: Any) -> Any:
    def noticing(self: Any, name: str, value: Any) -> None:
        assign(self, name, value)
        _Changes.last = object()

    return noticing


def _remembering(name: str) -> property:
    make = vars(ExportGraphSignature)[name].fget

    def table(self: ExportGraphSignature) -> Any:
        work = current()
        if work is None:
            return make(self)
        key, changes = (id(self), name), _Changes.last
        known = work.tables.get(key)
        if known is not None and known[1] is changes and known[2] == self.input_specs and known[3] == self.output_specs:
            return known[4]
        made = make(self)
        if len(work.tables) >= _MOST:
            work.tables.clear()
        # It keeps the signature, so that no other has its identity.
        work.tables[key] = (self, changes, list(self.input_specs), list(self.output_specs), made)
        return made

    return property(table)
