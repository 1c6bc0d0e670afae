"""Digests in a `.pte` file and its `.ptd` data files, which show that they are intact and belong together.

A `.pte` file keeps a `Seal` as named data, in a separate segment that is the last one: the digests of all that comes
before the first segment (header and tables), of each segment up to the start of the next, of each data file, and of the
seal itself. A segment inside another one, such as named data that is a constant too, has none of its own.

A `.ptd` file keeps the digests of its segments in the same way. Its own digest is that of the tables and of these, so a
file is identified without reading its weights. It is in the key of the digests; when it is computed, its digits are
taken as zeros.

To ExecuTorch both are named data that nothing reads. They are computed with XXH3, at the speed of memory, for damage
and mistakes, not against forgery.
"""

from __future__ import annotations

import io
import itertools
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import xxhash

from exir_lowering.errors import InputError
from exir_lowering.pte import container
from exir_lowering.pte.files import DATA_KEY as DATA_KEY, DataFile, DataFiles, MappedFile
from exir_lowering.pte.flatbuffer import CorruptError, root
from exir_lowering.pte.slots import FlatTensor, Program

KEY = "exir_lowering.digests"
"""The key of the seal among a `.pte` file's named data: a part of the file format, not the name of a module."""

END = b"EXLSEAL2"
"""What digests, and so a sealed file, end with: it reveals damage that hides them from the tables."""

SIZE = 16
"""The bytes of a digest."""

ZEROS = "0" * (2 * SIZE)
"""The digits that stand for a data file's own digest when it is computed."""

RESERVED = b"exir_lowering: reserved for digests " + END
"""Stands for the seal until the file is complete; no other named data is equal to it."""

_HEAD = struct.Struct("<II")
_NAME = struct.Struct("<H")


def digest_of(content: Any) -> bytes:
    """Return the digest of content."""
    return bytes(xxhash.xxh3_128(content).digest())


@dataclass(frozen=True, slots=True)
class Seal:
    """The digests that a `.pte` file keeps."""

    tables: bytes  # of the header and the tables, up to the first segment
    segments: tuple[bytes, ...]  # of each part but the seal's own, up to the start of the next: see `container.parts`
    # Of each data file, by the name that it was emitted with, in hexadecimal.
    data: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the seal as a file keeps it."""
        parts = [_HEAD.pack(len(self.segments), len(self.data)), self.tables, *self.segments]
        for name, digest in sorted(self.data.items()):
            encoded = name.encode(errors="surrogateescape")
            parts += [bytes.fromhex(digest), _NAME.pack(len(encoded)), encoded]
        body = b"".join(parts)
        return body + digest_of(body) + END


def size(segments: int, names: Iterable[str]) -> int:
    """Return how many bytes a seal has: for so many other segments, and data files of these names."""
    return len(Seal(bytes(SIZE), (bytes(SIZE),) * segments, dict.fromkeys(names, ZEROS)).encode())


def is_sealed(content: bytes | memoryview) -> bool:
    """Return whether content ends with digests."""
    return bytes(content[-len(END) :]) == END


def identity(file: bytes | memoryview) -> str:
    """Return what identifies a program's file, in hexadecimal: its seal's digest, which covers all, or its own."""
    end = len(file) - len(END)
    return (bytes(file[max(end - SIZE, 0) : end]) if is_sealed(file) else digest_of(file)).hex()


def decode(content: bytes | memoryview) -> Seal:
    """Read a seal; raise a CorruptError when it is damaged, or of another version."""
    whole, end = bytes(content), len(content) - len(END) - SIZE
    if not is_sealed(whole) or end < _HEAD.size:
        raise CorruptError("its digests are damaged, or of another version of exir-lowering")
    body = whole[:end]
    if digest_of(body) != whole[end : -len(END)]:
        raise CorruptError("its digests are damaged")
    count, files = _HEAD.unpack_from(body)
    at = _HEAD.size + SIZE * (count + 1)
    if at > len(body):
        raise CorruptError(f"its digests are said to cover {count} segments, but are too short for that")
    tables, *segments = [body[start : start + SIZE] for start in range(_HEAD.size, at, SIZE)]
    data = {}
    try:
        for _ in range(files):
            digest, (length,) = body[at : at + SIZE].hex(), _NAME.unpack_from(body, at + SIZE)
            at += SIZE + _NAME.size + length
            data[body[at - length : at].decode(errors="surrogateescape")] = digest
    except struct.error as error:
        raise CorruptError(f"its digests cannot be read: {error}") from None
    return Seal(tables, tuple(segments), data)


class Hash(io.BufferedIOBase):
    """A file that keeps the digest of what is written, and nothing else."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def write(self, data: Any, /) -> int:
        """Take the next piece."""
        self._state.update(data)
        return len(memoryview(data))

    def digest(self) -> bytes:
        """Return the digest."""
        return bytes(self._state.digest())


def data_key(digest: str = ZEROS) -> str:
    """Return the key of a data file's digests, with the file's own digest in it once it is known."""
    return DATA_KEY + digest


def find_data_digest(keys: Iterable[str]) -> str | None:
    """Return a data file's digest, in hexadecimal, or None; a CorruptError when it has several, or an invalid one."""
    found = [key.removeprefix(DATA_KEY) for key in keys if key.startswith(DATA_KEY)]
    if len(found) > 1 or any(len(digest) != len(ZEROS) for digest in found):
        raise CorruptError(f"its digest is damaged: {', '.join(map(repr, found))}")
    return found[0] if found else None


def data_digest(tables: bytes | memoryview, digest: str, segments: bytes | memoryview) -> str:
    """Return a data file's own digest, from what is before its segments, the digits in there, and their digests."""
    made = xxhash.xxh3_128(with_data_digest(tables, digest, ZEROS))
    made.update(segments)
    return str(made.hexdigest())


def with_data_digest(tables: bytes | memoryview, old: str, new: str) -> bytes:
    """Return a data file's tables with other digits in the key of its digests, which has to be there once."""
    content, wanted = bytes(tables), data_key(old).encode()
    if content.count(wanted) != 1:
        raise CorruptError(f"its tables have the key of its digests {content.count(wanted)} times")
    return content.replace(wanted, data_key(new).encode())


Verify: TypeAlias = "bool | Literal['full']"

LIMIT = 32_000_000
"""How many bytes of a program and its data files are read to verify them by default."""


def check_program(file: MappedFile, verify: Verify) -> Seal | None:
    """Check a program's tables, and return its digests, None without any; `verify` is as for `check_all`."""
    try:
        sealed = container.open_program(file.content)[1].named.get(KEY)
        if sealed is None and is_sealed(file.content):
            raise CorruptError("it ends with digests that its tables do not mention")
        seal = None if sealed is None else decode(sealed)
    except CorruptError as error:
        raise _damage_error(file, str(error)) from None
    if seal is not None and verify:
        base, parts = _parts(file.content)
        if len(parts) != len(seal.segments) + 1 or digest_of(file.content[:base]) != seal.tables:
            raise _change_error(file, "what its tables say")
    return seal


def check_all(file: MappedFile, seal: Seal | None, data: DataFiles, needed: frozenset[str], verify: Verify) -> None:
    """Check that a program's data files belong to it, and that all of them are intact; else raise an InputError.

    `needed` are the weights that it looks for in them. `verify` False checks that the data files are those that were
    emitted with the program; True also all tables, and the rest if it is not larger than `LIMIT`; "full" everything.
    """
    whole = verify == "full" or len(file.content) + sum(len(one.file.content) for one in data.files) <= LIMIT
    listed: list[tuple[DataFile, str]] = []
    for one in data.files:
        try:
            digest = find_data_digest(one.weights)
        except CorruptError as error:
            raise _damage_error(one.file, str(error)) from None
        if digest is not None:
            listed.append((one, digest))
        # Else it was emitted with the program, or the program does not read it.
        if seal is not None and digest not in seal.data.values() and not needed.isdisjoint(one.weights):
            known = ", ".join(f"{name!r} ({known[:12]}...)" for name, known in seal.data.items()) or "no data file"
            found = f"the digest {digest[:12]}..." if digest is not None else "no digest"
            raise InputError(
                f"{file.name} cannot be loaded with {one.file.name}: the data file belongs to another program, or to "
                f"this one before it was emitted again. It has {found}; the program was emitted with {known}. Give the "
                "data file that was saved with it, or save the artifact again."
            )
    for one, digest in listed if verify else ():
        _check_data(one, digest, whole=whole)
    if seal is not None and verify and whole:
        base, parts = _parts(file.content)
        for expected, ((start, number), (end, _)) in zip(seal.segments, itertools.pairwise(parts), strict=True):
            if digest_of(file.content[base + start : base + end]) != expected:
                raise _change_error(file, _segment(number, base + start, base + end))


def _damage_error(file: MappedFile, what: str) -> InputError:
    return InputError(f"{file.name} cannot be loaded: {what}. It was damaged. Make or copy it again.")


def _change_error(file: MappedFile, what: str) -> InputError:
    return InputError(
        f"{file.name} cannot be loaded: {what} is not what was emitted: its digest differs. It was damaged, or changed "
        "after it was emitted. Make or copy it again; verify=False loads what was changed on purpose."
    )


def _parts(content: memoryview) -> tuple[int, list[tuple[int, int]]]:
    """Return where the first segment of a `.pte` file starts, and the parts that its segments are in."""
    extent = container.read_pte(content)
    ranges = list(container.segment_ranges(root(content[: extent.tables]).tables(Program.SEGMENTS)))
    return extent.base, container.parts(ranges)


def _segment(number: int, start: int, end: int) -> str:
    return f"its segment {number}, bytes {start} to {end},"


def _check_data(one: DataFile, digest: str, *, whole: bool) -> None:
    """Check the tables of a data file, and its segments if wanted."""
    content, listed = one.file.content, one.weights[data_key(digest)].content
    try:
        extent = container.read_ptd(content)
        base = extent.base
        if data_digest(content[:base], digest, listed) != digest:
            raise _change_error(one.file, "what its tables say")
        if not whole:
            return
        body = bytes(listed[: -len(END)])
        if not is_sealed(listed) or len(body) % SIZE:
            raise CorruptError("its digests are damaged, or of another version of exir-lowering")
        expected = [body[start : start + SIZE] for start in range(0, len(body), SIZE)]
        tables = root(content[: extent.tables]).tables(FlatTensor.SEGMENTS)
        ranges = [(base + offset, size) for offset, size in container.segment_ranges(tables)]
    except CorruptError as error:
        raise _damage_error(one.file, str(error)) from None
    if len(ranges) != len(expected) + 1:
        raise _damage_error(one.file, f"it has {len(ranges)} segments, but digests of {len(expected)}")
    end = base
    for number, (start, size) in enumerate(ranges):
        if any(content[end:start]):
            raise _change_error(one.file, f"bytes {end} to {start}, between two segments,")
        end = start + size
        if number < len(expected) and digest_of(content[start:end]) != expected[number]:
            raise _change_error(one.file, _segment(number, start, end))
