"""The values of a method and its planned memory, read from their tables and checked against what they refer to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exir_lowering.graphs.operators.budget import free_memory
from exir_lowering.pte import slots
from exir_lowering.pte.container import Data
from exir_lowering.pte.flatbuffer import CorruptError, Table
from exir_lowering.pte.slots import KernelTypes as K, TensorDataLocation, TensorShapeDynamism
from exir_lowering.pte.value_kinds import KINDS, MemoryLayout, Tensor, ValueSpec, check_index, layout

_LISTS: Mapping[int, str] = {
    K.INT_LIST: "q",
    K.DOUBLE_LIST: "d",
    K.BOOL_LIST: "B",
    K.TENSOR_LIST: "i",
    K.OPTIONAL_TENSOR_LIST: "i",
}
"""The kinds of lists, with the type of their items."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Where a tensor lies in planned memory."""

    arena: int  # the number of the memory
    offset: int  # the byte where it starts there


@dataclass(frozen=True, slots=True)
class Storage:
    """Where the content of a tensor is."""

    planned: Allocation | None  # None when it does not lie in planned memory
    content: memoryview | None = None  # in the file; the initial one when it lies in planned memory; None for none
    name: str | None = None  # of the content in a data file; None when it is in none
    label: str | None = None  # what the model calls it, where the file says so; of what a data file has: its name


def check_memory(arenas: Sequence[int]) -> None:
    """Raise a CorruptError for planned memory that is more than there is: taking it kills the process."""
    free = free_memory()
    if free is not None and sum(arenas) > free:
        raise CorruptError(f"it plans {sum(arenas)} bytes of memory, but this process can have {free}")


def _allocation(tensor: Table) -> Allocation | None:
    """Return where a tensor lies in planned memory, None when it does not."""
    details = tensor.table(slots.Tensor.ALLOCATION_INFO)
    if details is None:
        return None
    low = details.number(slots.AllocationDetails.MEMORY_OFFSET_LOW, "I")
    high = details.number(slots.AllocationDetails.MEMORY_OFFSET_HIGH, "I")
    return Allocation(details.number(slots.AllocationDetails.MEMORY_ID, "I"), low + (high << 32))


def _names(tensor: Table) -> tuple[str | None, str | None]:
    """Return the name of a tensor's data in a data file, and its own, None for none; or a CorruptError."""
    extra = tensor.table(slots.Tensor.EXTRA_TENSOR_INFO)
    if extra is None:
        return None, None
    location = extra.number(slots.ExtraTensorInfo.LOCATION, "b")
    if location not in (TensorDataLocation.SEGMENT, TensorDataLocation.EXTERNAL):
        raise CorruptError(f"a tensor has the unknown location {location}")
    label = extra.text(slots.ExtraTensorInfo.FULLY_QUALIFIED_NAME)
    return label if location == TensorDataLocation.EXTERNAL else None, label or None


def _stored_content(tensor: Table, constant: int, data: Data) -> tuple[int, memoryview]:
    """Return where the content of a tensor, the constant of a number, starts, and in what; or a CorruptError."""
    planned = tensor.has(slots.Tensor.ALLOCATION_INFO)
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
    number: int, table: Table, arenas: Sequence[int], data: Data, external: dict[str, MemoryLayout]
) -> tuple[ValueSpec, Storage | None]:
    """Read a value, and where its content is if it is a tensor; one in a data file is added to `external`, by name."""
    kind = table.number(slots.EValue.VAL_TYPE, "B")
    content = table.table(slots.EValue.VAL)
    if kind not in KINDS or (content is None and kind != K.NULL):
        raise CorruptError(f"value {number} has the unknown type {kind}, or no content")
    if content is None or kind == K.NULL:
        return ValueSpec(K.NULL, None), None
    if kind == K.TENSOR:
        try:
            tensor, storage = _tensor(content, arenas, data, external)
        except CorruptError as error:
            raise CorruptError(f"value {number}: {error}") from None
        return ValueSpec(kind, tensor), storage
    # These have no default: the runtime reads them without checking.
    if kind in (K.STRING, *_LISTS) and not content.has(slots.ONLY):
        raise CorruptError(f"value {number} is {KINDS[kind]} without content")
    return ValueSpec(kind, _plain(kind, content)), None


def _plain(kind: int, content: Table) -> int | float | bool | str | tuple[int, ...]:
    if kind == K.INT:
        return content.number(slots.ONLY, "q")
    if kind == K.BOOL:
        return bool(content.number(slots.ONLY, "B"))
    if kind == K.DOUBLE:
        return float(content.number(slots.ONLY, "d"))
    return content.text(slots.ONLY) if kind == K.STRING else content.numbers(slots.ONLY, _LISTS[kind])


def _tensor(
    table: Table, arenas: Sequence[int], data: Data, external: dict[str, MemoryLayout]
) -> tuple[Tensor, Storage]:
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
    storage = _storage(table, found, size, arenas, data)
    if storage.name is not None and external.setdefault(storage.name, found) != found:
        raise CorruptError(f"the tensor {storage.name!r} of a data file is both {external[storage.name]} and {found}")
    planned, stored = storage.planned is not None, not (storage.content is None and storage.name is None)
    return Tensor(found.dtype, found.sizes, found.dim_order, not fixed, unbound, planned, stored), storage


def _storage(table: Table, what: MemoryLayout, size: int, arenas: Sequence[int], data: Data) -> Storage:
    """Return where the content of a tensor of a size is; CorruptError when that is beyond the memory, or the file."""
    planned = _allocation(table)
    if planned is not None:
        memory, offset = planned.arena, planned.offset
        if not 0 < memory < len(arenas) or offset + size > arenas[memory]:
            raise CorruptError(f"a tensor of {size} bytes at byte {offset} of memory {memory} of {list(arenas)}")
        if offset % what.dtype.itemsize:
            raise CorruptError(f"a tensor of {what.dtype} would start at byte {offset} of its memory")
    (name, label), constant = _names(table), table.number(slots.Tensor.DATA_BUFFER_IDX, "I")
    if name is not None:
        if not name:
            raise CorruptError("a tensor in a data file has no name")
        return Storage(planned, name=name, label=label)
    if not constant:
        return Storage(planned, label=label)
    start, segment = _stored_content(table, constant, data)
    if start + size > len(segment):
        raise CorruptError(f"a tensor of {size} bytes at byte {start} of a segment of {len(segment)} bytes")
    return Storage(planned, segment[start:], label=label)
