"""The values of a method and its planned memory, read from their tables and checked against what they refer to."""

from __future__ import annotations

from collections.abc import Sequence

from exir_lowering.graphs.operators.budget import free_memory
from exir_lowering.pte.container import Data
from exir_lowering.pte.flatbuffer import CorruptError, Table
from exir_lowering.pte.value_kinds import (
    BOOL,
    BOOL_LIST,
    DOUBLE,
    DOUBLE_LIST,
    INT,
    INT_LIST,
    KINDS,
    NULL,
    STRING,
    TENSOR,
    Layout,
    Tensor,
    Value,
    check_index,
    layout,
)


def check_arenas(arenas: Sequence[int]) -> None:
    """Refuse planned memory that this process cannot have: it would be killed when it takes it.

    Args:
        arenas: The sizes of a method's planned memory.

    Raises:
        CorruptError: A size is negative, or all of them are more than there is.
    """
    if any(size < 0 for size in arenas):
        raise CorruptError(f"its planned memory has the sizes {list(arenas)}")
    free = free_memory()
    if free is not None and sum(arenas) > free:
        raise CorruptError(f"it plans {sum(arenas)} bytes of memory, this process can have {free}")


def read_value(
    number: int, table: Table, arenas: Sequence[int], data: Data, external: dict[str, Layout | int]
) -> Value:
    """Read a value of a method.

    Args:
        number: Its number, for messages.
        table: Its table.
        arenas: The sizes of the method's planned memory.
        data: What it may refer to.
        external: What weights that are in a data file have to be, by name, to which it is added.

    Raises:
        CorruptError: It refers to what is not there.
    """
    kind = table.number(0, "B")
    content = table.table(1)
    if kind not in KINDS or (content is None and kind != NULL):
        raise CorruptError(f"value {number} has the unknown type {kind}, or no content")
    if content is None or kind == NULL:
        return Value(NULL, None)
    if kind == TENSOR:
        try:
            return Value(kind, _tensor(content, arenas, data, external))
        except CorruptError as error:
            raise CorruptError(f"value {number}: {error}") from None
    if kind in _NEEDED and not content.has(0):
        raise CorruptError(f"value {number} is {KINDS[kind]} without content")
    if kind == INT:
        return Value(kind, content.number(0, "q"))
    if kind == BOOL:
        return Value(kind, bool(content.number(0, "B")))
    if kind == DOUBLE:
        return Value(kind, content.real(0))
    if kind == STRING:
        return Value(kind, content.text(0))
    return Value(kind, content.numbers(0, {INT_LIST: "q", DOUBLE_LIST: "d", BOOL_LIST: "B"}.get(kind, "i")))


_NEEDED = frozenset(KINDS) - {NULL, INT, BOOL, DOUBLE, TENSOR}
"""What has no default: the runtime reads it without a look."""


def _tensor(table: Table, arenas: Sequence[int], data: Data, external: dict[str, Layout | int]) -> Tensor:
    found, dynamism = layout(table, 0, 2, 3), table.number(8, "b")
    if dynamism not in (0, 1, 2):
        raise CorruptError(f"a tensor has the unknown dynamism {dynamism}")
    if table.number(1, "i"):
        raise CorruptError(f"a tensor starts at element {table.number(1, 'i')} of its memory, which nobody supports")
    size = found.size if dynamism != 2 else 0
    if size >= 1 << 62:
        raise CorruptError(f"a tensor of the shape {list(found.sizes)} has {size} bytes")
    planned, stored = _check_place(table, found, size, arenas, data, external)
    return Tensor(found.dtype, found.sizes, found.dim_order, dynamism != 0, dynamism == 2, planned, stored)


def _check_place(
    table: Table, what: Layout, size: int, arenas: Sequence[int], data: Data, external: dict[str, Layout | int]
) -> tuple[bool, bool]:
    """Check that a tensor of a size lies inside of the memory, or the part of the file, that it is given.

    Returns:
        Whether it lies in planned memory, and whether its content is in a file.
    """
    place, extra, constant = table.table(6), table.table(9), table.number(5, "I")
    if place is not None:
        memory, low, high = (place.number(field, "I") for field in range(3))
        offset = low + (high << 32)
        if not 0 < memory < len(arenas) or offset + size > arenas[memory]:
            raise CorruptError(f"a tensor of {size} bytes at byte {offset} of memory {memory} of {list(arenas)}")
        if offset % what.dtype.itemsize:
            raise CorruptError(f"a tensor of {what.dtype} would start at byte {offset} of its memory")
    if extra is not None and extra.number(2, "b") not in (0, 1):
        raise CorruptError(f"a tensor is in the unknown place {extra.number(2, 'b')}")
    if extra is not None and extra.number(2, "b") == 1:
        name = extra.text(1)
        if not name:
            raise CorruptError("a tensor is in a data file without a name")
        if external.setdefault(name, what) != what:
            raise CorruptError(f"the tensor {name!r} of a data file is {external[name]} and {what}")
        return place is not None, True
    if constant:
        start, segment = _content(constant, place is not None, extra, data)
        if start + size > len(segment):
            raise CorruptError(f"a tensor of {size} bytes at byte {start} of a segment of {len(segment)} bytes")
    return place is not None, constant != 0


def _content(constant: int, planned: bool, extra: Table | None, data: Data) -> tuple[int, memoryview]:
    """Return where the content of a tensor starts, and in what."""
    if not planned and data.inline_constants:
        check_index(constant, len(data.inline_constants), "a tensor", "constants")
        return 0, data.inline_constants[constant]
    which = extra.number(0, "Q") if extra is not None else 0
    if planned:
        check_index(which, min(len(data.initial), 1), "a tensor", "lists of initial values")  # the runtime has one
    offsets = data.initial[which] if planned else data.constants
    check_index(constant, len(offsets), "a tensor", "constants")
    return offsets[constant]
