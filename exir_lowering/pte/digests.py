"""Digests in a `.pte` file and its `.ptd` data files, which show that they are intact and belong together.

A `.pte` file keeps a `Seal` as named data, in a separate segment that is the last one: the digests of all that comes
before the first segment (header and tables), of each segment up to the start of the next, of each data file, and of the
seal itself. A segment inside another one, such as named data that is a constant too, has none of its own.

A `.ptd` file keeps the digests of its segments in the same way. Its own digest is that of the tables and of these, so a
file is identified without reading its weights. It is in the key of the digests; when it is computed, its digits are
taken as zeros.

To ExecuTorch both are named data that nothing reads. The end of the digests tells how they were computed: today with
XXH3, at the speed of memory. They are for damage and mistakes, not against forgery: nor did SHA-256 prevent that.
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

KEY = "exir_lowering.digests"
"""The key of the seal among a `.pte` file's named data: a part of the file format, not the name of a module."""

DATA_KEY = "exir_lowering.digest/"
"""What the key of a `.ptd` file's digests starts with; the file's own digest follows, in hexadecimal."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How digests are computed."""

    end: bytes  # of the digests, and so of a sealed file: it reveals damage that hides them from the tables
    size: int  # of a digest, in bytes
    start: Callable[..., Any]  # returns a new hash

    def of(self, content: bytes | memoryview) -> bytes:
        """Return the digest of content."""
        return bytes(self.start(content).digest())

    @property
    def zeros(self) -> str:
        """The digits that stand for a data file's own digest when it is computed."""
        return "0" * (2 * self.size)


XXH3 = Kind(b"EXLSEAL2", 16, xxhash.xxh3_128)
SHA256 = Kind(b"EXLSEAL1", 32, hashlib.sha256)
"""What earlier versions used; it is only read."""

RESERVED = b"exir_lowering: reserved for digests " + XXH3.end
"""Stands for the seal until the file is complete; no other named data is equal to it."""

_HEAD = struct.Struct("<II")
_NAME = struct.Struct("<H")


class SealError(Exception):
    """Digests cannot be read; the message is a clause about the file."""


@dataclass(frozen=True, slots=True)
class Seal:
    """The digests that a `.pte` file keeps."""

    tables: bytes  # of the header and the tables, up to the first segment
    segments: tuple[bytes, ...]  # of each part but the seal's own, up to the start of the next: see `container.parts`
    # Of each data file, by the name that it was emitted with, in hexadecimal.
    data: Mapping[str, str] = field(default_factory=dict)
    kind: Kind = XXH3

    def encode(self) -> bytes:
        """Return the seal as a file keeps it."""
        parts = [_HEAD.pack(len(self.segments), len(self.data)), self.tables, *self.segments]
        for name, digest in sorted(self.data.items()):
            encoded = name.encode(errors="surrogateescape")
            parts += [bytes.fromhex(digest), _NAME.pack(len(encoded)), encoded]
        body = b"".join(parts)
        return body + self.kind.of(body) + self.kind.end


def size(segments: int, names: Iterable[str]) -> int:
    """Return how many bytes a seal has: for so many other segments, and data files of these names."""
    nothing = bytes(XXH3.size)
    return len(Seal(nothing, (nothing,) * segments, dict.fromkeys(names, XXH3.zeros)).encode())


def is_sealed(content: bytes | memoryview) -> bool:
    """Return whether content ends with digests."""
    return _kind(content) is not None


def identity(file: bytes | memoryview) -> str:
    """Return what identifies a program's file, in hexadecimal: its seal's digest, which covers all, or its SHA-256."""
    end = len(file) - len(XXH3.end)
    found = bytes(file[max(end - XXH3.size, 0) : end]) if _kind(file) is XXH3 else SHA256.of(file)
    return found.hex()


def _kind(content: bytes | memoryview) -> Kind | None:
    end = bytes(content[-len(XXH3.end) :])
    return next((kind for kind in (XXH3, SHA256) if kind.end == end), None)


def decode(content: bytes | memoryview) -> Seal:
    """Read a seal; raise a SealError when it is damaged, or of another version."""
    whole, kind = bytes(content), _kind(content)
    if kind is None or len(whole) < len(kind.end) + kind.size + _HEAD.size:
        raise SealError("its digests are damaged, or of another version of exir-lowering")
    body, own = whole[: -len(kind.end) - kind.size], whole[-len(kind.end) - kind.size : -len(kind.end)]
    if kind.of(body) != own:
        raise SealError("its digests are damaged")
    try:
        return _decode_body(body, kind)
    except (struct.error, UnicodeDecodeError) as error:
        raise SealError(f"its digests cannot be read: {error}") from None


def _decode_body(body: bytes, kind: Kind) -> Seal:
    count, files = _HEAD.unpack_from(body)
    size = kind.size
    at = _HEAD.size + size * (count + 1)
    if at > len(body):
        raise SealError(f"its digests are said to cover {count} segments, but are too short for that")
    tables, *segments = [body[start : start + size] for start in range(_HEAD.size, at, size)]
    data = {}
    for _ in range(files):
        digest, (length,) = body[at : at + size].hex(), _NAME.unpack_from(body, at + size)
        at += size + _NAME.size + length
        data[body[at - length : at].decode(errors="surrogateescape")] = digest
    return Seal(tables, tuple(segments), data, kind)


class RangeDigests(io.BufferedIOBase):
    """A file that keeps the digests of consecutive ranges of what is written, and nothing else."""

    def __init__(self, ends: Sequence[int]) -> None:
        """Take where each range ends; what is written after the last one is ignored."""
        self._ends, self._position, self._current = tuple(ends), 0, 0
        self._hashes = [XXH3.start() for _ in ends]

    def write(self, data: Any, /) -> int:
        """Take the next piece."""
        view = memoryview(data)
        size = len(view)
        while self._current < len(self._ends):
            rest = self._ends[self._current] - self._position
            part = view[:rest]
            self._hashes[self._current].update(part)
            self._position += len(part)
            if len(part) < rest:
                break
            view = view[rest:]
            self._current += 1
        return size

    def digests(self) -> tuple[bytes, ...]:
        """Return the digest of each range."""
        return tuple(one.digest() for one in self._hashes)


def data_key(digest: str = XXH3.zeros) -> str:
    """Return the key of a data file's digests, with the file's own digest in it once it is known."""
    return DATA_KEY + digest


def encode_segments(digests: Iterable[bytes]) -> bytes:
    """Return the digests of a data file's segments as the file keeps them."""
    return b"".join([*digests, XXH3.end])


def decode_segments(content: bytes | memoryview) -> tuple[tuple[bytes, ...], Kind]:
    """Read the digests of a data file's segments, and how they are computed; raise a SealError for damaged ones."""
    kind = _data_kind(content)
    body = bytes(content[: -len(kind.end)])
    if len(body) % kind.size:
        raise SealError("its digests are damaged")
    return tuple(body[start : start + kind.size] for start in range(0, len(body), kind.size)), kind


def _data_kind(segments: bytes | memoryview) -> Kind:
    kind = _kind(segments)
    if kind is None:
        raise SealError("its digests are damaged, or of another version of exir-lowering")
    return kind


def find_data_digest(keys: Iterable[str]) -> str | None:
    """Return a data file's digest, in hexadecimal, or None; a SealError when it has several, or an invalid one."""
    found = [key.removeprefix(DATA_KEY) for key in keys if key.startswith(DATA_KEY)]
    sizes = {len(kind.zeros) for kind in (XXH3, SHA256)}
    if len(found) > 1 or any(len(digest) not in sizes for digest in found):
        raise SealError(f"its digest is damaged: {', '.join(map(repr, found))}")
    return found[0] if found else None


def data_digest(tables: bytes | memoryview, digest: str, segments: bytes | memoryview) -> str:
    """Return a data file's own digest, from what is before its segments, the digits in there, and their digests."""
    kind = _data_kind(segments)
    made = kind.start(with_data_digest(tables, digest, kind.zeros))
    made.update(segments)
    return str(made.hexdigest())


def with_data_digest(tables: bytes | memoryview, old: str, new: str) -> bytes:
    """Return a data file's tables with other digits in the key of its digests; a SealError unless that occurs once."""
    content, wanted = bytes(tables), data_key(old).encode()
    if content.count(wanted) != 1:
        raise SealError(f"its tables have the key of its digests {content.count(wanted)} times")
    return content.replace(wanted, data_key(new).encode())
