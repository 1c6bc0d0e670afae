"""The values of a method and its planned memory, read from their tables and checked against what they refer to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from exir_lowering.graphs.operators.budget import free_memory
from exir_lowering.pte import slots
from exir_lowering.pte.container import Data
from exir_lowering.pte.flatbuffer import CorruptError, Table
from exir_lowering.pte.slots import KernelTypes as K, TensorDataLocation, TensorShapeDynamism
from exir_lowering.pte.value_kinds import KINDS, MemoryLayout, Tensor, ValueSpec, check_index, layout

_LISTS: Mapping[int, str] = MappingProxyType(
    {K.INT_LIST: "q", K.DOUBLE_LIST: "d", K.BOOL_LIST: "B", K.TENSOR_LIST: "i", K.OPTIONAL_TENSOR_LIST: "i"}
)
"""The kinds of lists, with the type of their items."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Where a tensor lies in planned memory."""

    arena: int  # the number of the memory
    offset: int  # the byte where it starts there


def check_arenas(arenas: Sequence[int]) -> None:
    """Raise a CorruptError for sizes that are negative, or in sum more than there is: taking it kills the process."""
    if any(size < 0 for size in arenas):
        raise CorruptError(f"its planned memory has the sizes {list(arenas)}")
    free = free_memory()
    if free is not None and sum(arenas) > free:
        raise CorruptError(f"it plans {sum(arenas)} bytes of memory, but this process can have {free}")


def tensor_table(value: Table) -> Table | None:
    """Return the table of the tensor that a value is, None for a value of another kind."""
    return value.table(slots.EValue.VAL) if value.number(slots.EValue.VAL_TYPE, "B") == K.TENSOR else None


def allocation(tensor: Table) -> Allocation | None:
    """Return where a tensor lies in planned memory, None when it does not."""
    details = tensor.table(slots.Tensor.ALLOCATION_INFO)
    if details is None:
        return None
    low = details.number(slots.AllocationDetails.MEMORY_OFFSET_LOW, "I")
    high = details.number(slots.AllocationDetails.MEMORY_OFFSET_HIGH, "I")
    return Allocation(details.number(slots.AllocationDetails.MEMORY_ID, "I"), low + (high << 32))


def external_name(tensor: Table) -> str | None:
    """Return the name of a tensor's data in a data file, or None; a CorruptError when it is in neither kind of file."""
    extra = tensor.table(slots.Tensor.EXTRA_TENSOR_INFO)
    if extra is None:
        return None
    location = extra.number(slots.ExtraTensorInfo.LOCATION, "b")
    if location not in (TensorDataLocation.SEGMENT, TensorDataLocation.EXTERNAL):
        raise CorruptError(f"a tensor has the unknown location {location}")
    return extra.text(slots.ExtraTensorInfo.FULLY_QUALIFIED_NAME) if location == TensorDataLocation.EXTERNAL else None


def constant_index(tensor: Table) -> int:
    """Return the number of a tensor's content among the file's constants or initial values, 0 when it has none."""
    return tensor.number(slots.Tensor.DATA_BUFFER_IDX, "I")


def stored_content(tensor: Table, data: Data) -> tuple[int, memoryview]:
    """Return where the content of a tensor starts, whose `constant_index` is not 0, and in what; or a CorruptError."""
    constant, planned = constant_index(tensor), tensor.has(slots.Tensor.ALLOCATION_INFO)
    if not planned and data.inline_constants:
        check_index(constant, len(data.inline_constants), "a tensor", "constants")
        return 0, data.inline_constants[constant]
    extra = tensor.table(slots.Tensor.EXTRA_TENSOR_INFO)
    which = extra.number(slots.ExtraTensorInfo.MUTABLE_DATA_SEGMENTS_IDX, "Q") if extra is not None else 0
    if planned:
        check_index(which, min(len(data.initial), 1), "a tensor", "lists of initial values")  # the runtime has one
    offsets = data.initial[which] if planned else data.constants
    check_index(constant, len(offsets), "a tensor", "constants")
    return offsets[constant]


def read_value(
    number: int, table: Table, arenas: Sequence[int], data: Data, external: dict[str, MemoryLayout | int]
) -> ValueSpec:
    """Read a value of a method, and add what its weight in a data file has to be to `external`, by name.

    Raise a CorruptError when it refers to something that does not exist; messages have its number.
    """
    kind = table.number(slots.EValue.VAL_TYPE, "B")
    content = table.table(slots.EValue.VAL)
    if kind not in KINDS or (content is None and kind != K.NULL):
        raise CorruptError(f"value {number} has the unknown type {kind}, or no content")
    if content is None or kind == K.NULL:
        return ValueSpec(K.NULL, None)
    if kind == K.TENSOR:
        try:
            return ValueSpec(kind, _tensor(content, arenas, data, external))
        except CorruptError as error:
            raise CorruptError(f"value {number}: {error}") from None
    # These have no default: the runtime reads them without checking.
    if kind in (K.STRING, *_LISTS) and not content.has(slots.ONLY):
        raise CorruptError(f"value {number} is {KINDS[kind]} without content")
    if kind == K.INT:
        return ValueSpec(kind, content.number(slots.ONLY, "q"))
    if kind == K.BOOL:
        return ValueSpec(kind, bool(content.number(slots.ONLY, "B")))
    if kind == K.DOUBLE:
        return ValueSpec(kind, content.real(slots.ONLY))
    if kind == K.STRING:
        return ValueSpec(kind, content.text(slots.ONLY))
    return ValueSpec(kind, content.numbers(slots.ONLY, _LISTS[kind]))


def _tensor(table: Table, arenas: Sequence[int], data: Data, external: dict[str, MemoryLayout | int]) -> Tensor:
    found = layout(table, slots.Tensor)
    dynamism, offset = table.number(slots.Tensor.SHAPE_DYNAMISM, "b"), table.number(slots.Tensor.STORAGE_OFFSET, "i")
    fixed, unbound = dynamism == TensorShapeDynamism.STATIC, dynamism == TensorShapeDynamism.DYNAMIC_UNBOUND
    if not fixed and not unbound and dynamism != TensorShapeDynamism.DYNAMIC_BOUND:
        raise CorruptError(f"a tensor has the unknown dynamism {dynamism}")
    if offset:
        raise CorruptError(f"a tensor starts at element {offset} of its memory, which is not supported")
    size = 0 if unbound else found.size
    if size >= 1 << 62:
        raise CorruptError(f"a tensor of the shape {list(found.sizes)} has {size} bytes")
    planned, stored = _check_content(table, found, size, arenas, data, external)
    return Tensor(found.dtype, found.sizes, found.dim_order, not fixed, unbound, planned, stored)


def _check_content(
    table: Table,
    what: MemoryLayout,
    size: int,
    arenas: Sequence[int],
    data: Data,
    external: dict[str, MemoryLayout | int],
) -> tuple[bool, bool]:
    """Check that a tensor of a size lies inside the memory, or the part of the file, that it is given.

    Return whether it lies in planned memory, and whether its content is in a file.
    """
    planned = allocation(table)
    if planned is not None:
        memory, offset = planned.arena, planned.offset
        if not 0 < memory < len(arenas) or offset + size > arenas[memory]:
            raise CorruptError(f"a tensor of {size} bytes at byte {offset} of memory {memory} of {list(arenas)}")
        if offset % what.dtype.itemsize:
            raise CorruptError(f"a tensor of {what.dtype} would start at byte {offset} of its memory")
    name, constant = external_name(table), constant_index(table) != 0
    if name is not None:
        if not name:
            raise CorruptError("a tensor in a data file has no name")
        if external.setdefault(name, what) != what:
            raise CorruptError(f"the tensor {name!r} of a data file is both {external[name]} and {what}")
        return planned is not None, True
    if constant:
        start, segment = stored_content(table, data)
        if start + size > len(segment):
            raise CorruptError(f"a tensor of {size} bytes at byte {start} of a segment of {len(segment)} bytes")
    return planned is not None, constant
