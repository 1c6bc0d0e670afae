"""Write flatbuffer tables; `flatbuffer` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import flatbuffers
from flatbuffers import number_types

REFERENCE: Final = number_types.UOffsetTFlags
"""What a field is that refers to a text, a vector or a table."""

INT8: Final = number_types.Int8Flags
UINT8: Final = number_types.Uint8Flags
INT32: Final = number_types.Int32Flags
UINT32: Final = number_types.Uint32Flags
INT64: Final = number_types.Int64Flags
UINT64: Final = number_types.Uint64Flags
"""What a field is that has a number."""


class FlatbufferWriter:
    """A flatbuffer under construction; what a table refers to is added before the table.

    What is added is referred to by the number that is returned.
    """

    def __init__(self) -> None:
        self._builder = flatbuffers.Builder(1024)

    def add_text(self, text: str) -> int:
        """Add a string."""
        return int(self._builder.CreateString(text))

    def add_bytes(self, content: bytes) -> int:
        """Add a vector of bytes."""
        return int(self._builder.CreateByteVector(content))

    def add_numbers(self, kind: Any, numbers: Sequence[int]) -> int:
        """Add a vector of numbers of a kind."""
        self._builder.StartVector(kind.bytewidth, len(numbers), kind.bytewidth)
        for number in reversed(numbers):
            self._builder.Prepend(kind, number)
        return int(self._builder.EndVector())

    def add_references(self, references: Sequence[int]) -> int:
        """Add a vector of tables that were added before."""
        self._builder.StartVector(REFERENCE.bytewidth, len(references), REFERENCE.bytewidth)
        for reference in reversed(references):
            self._builder.PrependUOffsetTRelative(reference)
        return int(self._builder.EndVector())

    def add_table(self, fields: Mapping[int, tuple[Any, int]]) -> int:
        """Add a table of fields by their position in the schema, each with its kind.

        One that is 0 is left out, so 0 has to be its default.
        """
        self._builder.StartObject(max(fields, default=-1) + 1)
        for slot, (kind, value) in fields.items():
            if not value:
                continue
            if kind is REFERENCE:
                self._builder.PrependUOffsetTRelative(value)
            else:
                self._builder.Prepend(kind, value)
            self._builder.Slot(slot)
        return int(self._builder.EndObject())

    def finish(self, root: int, identifier: bytes) -> bytes:
        """Return the flatbuffer with a root table; the identifier is the four bytes that tell its format."""
        self._builder.Finish(root, file_identifier=identifier)
        return bytes(self._builder.Output())
