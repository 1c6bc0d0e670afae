"""Read flatbuffer tables in place, with each access checked against the bounds of the buffer.

The classes that flatc generates trust the buffer, and the runtime's own check comes after it has the file. This reader
copies nothing but the numbers and strings that are asked for. Fields are given by their numbers, which the `slots`
modules name, and which flatbuffers' rules of compatibility keep for good.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass


class CorruptError(Exception):
    """The buffer does not hold what its format says; the message completes "the file is damaged: "."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table in a buffer; what lies outside of that is a CorruptError."""

    buffer: memoryview  # the flatbuffer, which is not copied
    position: int  # where the table starts
    fields: tuple[int, ...]  # where its fields start, relative to the table; 0 for an absent field

    def has(self, field: int) -> bool:
        """Return whether a field is present; an absent field has its default."""
        return self.place(field) is not None

    def number(self, field: int, code: str, default: int = 0) -> int:
        """Return a number, whose type is a letter of the `struct` module."""
        at = self.place(field)
        return default if at is None else _unpack(self.buffer, at, code)[0]

    def numbers(self, field: int, code: str) -> tuple[int, ...]:
        """Return a vector of integers, () when it is absent."""
        start, length = self._vector(field)
        return _unpack(self.buffer, start, f"{length}{code}")

    def text(self, field: int) -> str:
        """Return a string, "" when it is absent."""
        try:
            return str(self.content(field), "utf-8")
        except UnicodeDecodeError:
            raise CorruptError(f"the text at byte {self._vector(field)[0]} is not UTF-8") from None

    def content(self, field: int) -> memoryview:
        """Return a vector of bytes, which is not copied; empty when it is absent."""
        start, length = self._vector(field)
        _check(self.buffer, start, length)
        return self.buffer[start : start + length]

    def table(self, field: int) -> Table | None:
        """Return a table, or the value of a union; None when it is absent."""
        at = self.place(field)
        return None if at is None else _table(self.buffer, at)

    def tables(self, field: int) -> Iterator[Table]:
        """Return the tables of a vector, one by one."""
        start, length = self._vector(field)
        _check(self.buffer, start, 4 * length)
        for at in range(start, start + 4 * length, 4):
            yield _table(self.buffer, at)

    def count(self, field: int) -> int:
        """Return the length of a vector, 0 when it is absent."""
        return self._vector(field)[1]

    def place(self, field: int) -> int | None:
        """Return where in the buffer a field is, None when it is absent."""
        offset = self.fields[field] if field < len(self.fields) else 0
        return self.position + offset if offset else None

    def _vector(self, field: int) -> tuple[int, int]:
        """Return where the items of a vector start, and how many there are; none when it is absent."""
        at = self.place(field)
        if at is None:
            return 0, 0
        start = at + _unpack(self.buffer, at, "I")[0]
        return start + 4, _unpack(self.buffer, start, "I")[0]


def root(buffer: memoryview) -> Table:
    """Return the table at the root of a flatbuffer."""
    return _table(buffer, 0)


def _table(buffer: memoryview, at: int) -> Table:
    position = at + _unpack(buffer, at, "I")[0]
    start = position - _unpack(buffer, position, "i")[0]
    size = _unpack(buffer, start, "H")[0]
    if size < 4 or size % 2:
        raise CorruptError(f"the table at byte {position} has a description of {size} bytes")
    return Table(buffer, position, _unpack(buffer, start + 4, f"{size // 2 - 2}H"))


def _unpack(buffer: memoryview, at: int, code: str) -> tuple[int, ...]:
    form = f"<{code}"
    _check(buffer, at, struct.calcsize(form))
    return struct.unpack_from(form, buffer, at)


def _check(buffer: memoryview, at: int, size: int) -> None:
    if at < 0 or at + size > len(buffer):
        raise CorruptError(f"{size} bytes at byte {at} are referred to, but its tables end at byte {len(buffer)}")
