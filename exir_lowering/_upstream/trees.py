"""How torch describes nested inputs and outputs: pytree, and the types registered with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# An ExportedProgram describes its inputs and outputs by pytree specs.
from torch.utils import _pytree

pytree = _pytree

# Reads the context of a named tuple, which distinguishes such types from others.
namedtuple_context = pytree._namedtuple_deserialize


def find_registered_type(name: str) -> Any:
    """Return the type that pytree knows by a serialized name, without importing what it names; None if unknown."""
    kind = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    # Types without such a name share a key.
    own = name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND and kind in pytree.SUPPORTED_SERIALIZED_TYPES
    return kind if own else None


def namedtuple_fields(kind: Any) -> tuple[str, ...] | None:
    """Return the fields of a named tuple's class; None for other types."""
    return tuple(kind._fields) if pytree.is_namedtuple_class(kind) else None


def context_reader(kind: Any) -> Callable[[Any], Any] | None:
    """Return what reads a registered type's context in a serialized structure; None if that is plain JSON."""
    reader: Callable[[Any], Any] | None = pytree.SUPPORTED_SERIALIZED_TYPES[kind].from_dumpable_context
    return reader


def list_registered_types() -> list[Any]:
    """Return the types registered with pytree."""
    return list(pytree.SUPPORTED_NODES)
