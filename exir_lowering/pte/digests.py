"""SHA-256 digests in a `.pte` file and its `.ptd` data files, which show that they are intact and belong together.

A `.pte` file keeps a `Seal` as named data, in a segment of its own that is the last one: the digests of all that comes
before the first segment (header and tables), of each segment up to the start of the next, of each data file, and of the
seal itself.

A `.ptd` file keeps the digests of its segments in the same way. Its own digest is that of the tables and of these, so a
file is identified without reading its weights. It is in the key of the digests; when it is computed, its digits are
taken as zeros.

To ExecuTorch both are named data that nothing reads.
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KEY = "exir_lowering.digests"
"""The key of the seal among a `.pte` file's named data: a part of the file format, not the name of a module."""

DATA_KEY = "exir_lowering.digest/"
"""What the key of a `.ptd` file's digests starts with; the file's own digest follows, in hexadecimal."""

END = b"EXLSEAL1"
"""The end of the digests, and so of a sealed file: it reveals damage that hides them from the tables."""

RESERVED = b"exir_lowering: reserved for digests " + END
"""Stands for the seal until the file is complete; no other named data is equal to it."""

SIZE = 32
NO_DIGEST = "0" * (2 * SIZE)

_HEAD = struct.Struct("<II")
_NAME = struct.Struct("<H")


class SealError(Exception):
    """Digests cannot be read; the message is a clause about the file."""


@dataclass(frozen=True, slots=True)
class Seal:
    """The digests that a `.pte` file keeps.

    Attributes:
        tables: Of the header and the tables, up to the first segment.
        segments: Of each segment but the seal's own, up to the start of the next.
        data: Of each data file, by the name that it was emitted with, in hexadecimal.
    """

    tables: bytes
    segments: tuple[bytes, ...]
    data: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the seal as a file keeps it."""
        parts = [_HEAD.pack(len(self.segments), len(self.data)), self.tables, *self.segments]
        for name, digest in sorted(self.data.items()):
            encoded = name.encode(errors="surrogateescape")
            parts += [bytes.fromhex(digest), _NAME.pack(len(encoded)), encoded]
        body = b"".join(parts)
        return body + hashlib.sha256(body).digest() + END


def size(segments: int, names: Iterable[str]) -> int:
    """Return how many bytes a seal has.

    Args:
        segments: How many segments the file has besides the seal's.
        names: The names of its data files.
    """
    return len(Seal(bytes(SIZE), (bytes(SIZE),) * segments, dict.fromkeys(names, NO_DIGEST)).encode())


def decode(content: bytes | memoryview) -> Seal:
    """Read a seal.

    Raises:
        SealError: It is damaged, or of another version.
    """
    whole = bytes(content)
    if not whole.endswith(END) or len(whole) < len(END) + SIZE + _HEAD.size:
        raise SealError("its digests are damaged, or of another version of exir-lowering")
    body, own = whole[: -len(END) - SIZE], whole[-len(END) - SIZE : -len(END)]
    if hashlib.sha256(body).digest() != own:
        raise SealError("its digests are damaged")
    try:
        return _decode_body(body)
    except (struct.error, UnicodeDecodeError) as error:
        raise SealError(f"its digests cannot be read: {error}") from None


def _decode_body(body: bytes) -> Seal:
    count, files = _HEAD.unpack_from(body)
    at = _HEAD.size + SIZE * (count + 1)
    if at > len(body):
        raise SealError(f"its digests are said to cover {count} segments, but are too short for that")
    tables, *segments = [body[start : start + SIZE] for start in range(_HEAD.size, at, SIZE)]
    data = {}
    for _ in range(files):
        digest, (length,) = body[at : at + SIZE].hex(), _NAME.unpack_from(body, at + SIZE)
        at += SIZE + _NAME.size + length
        data[body[at - length : at].decode(errors="surrogateescape")] = digest
    return Seal(tables, tuple(segments), data)


class RangeDigests(io.BufferedIOBase):
    """A file that keeps the digests of consecutive ranges of what is written, and nothing else."""

    def __init__(self, ends: Sequence[int]) -> None:
        """Take where each range ends; what is written after the last one is ignored."""
        self._ends, self._position, self._current = tuple(ends), 0, 0
        self._hashes = [hashlib.sha256() for _ in ends]

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


def data_key(digest: str = NO_DIGEST) -> str:
    """Return the key of a data file's digests, with the file's own digest in it once it is known."""
    return DATA_KEY + digest


def encode_segments(digests: Iterable[bytes]) -> bytes:
    """Return the digests of a data file's segments as the file keeps them."""
    return b"".join([*digests, END])


def decode_segments(content: bytes | memoryview) -> tuple[bytes, ...]:
    """Read the digests of a data file's segments.

    Raises:
        SealError: They are damaged.
    """
    whole = bytes(content)
    body = whole[: -len(END)]
    if not whole.endswith(END) or len(body) % SIZE:
        raise SealError("its digests are damaged, or of another version of exir-lowering")
    return tuple(body[start : start + SIZE] for start in range(0, len(body), SIZE))


def find_data_digest(keys: Iterable[str]) -> str | None:
    """Return a data file's own digest, in hexadecimal; None for a file that has none.

    Args:
        keys: The keys of its data.

    Raises:
        SealError: It has several, or an invalid one.
    """
    found = [key.removeprefix(DATA_KEY) for key in keys if key.startswith(DATA_KEY)]
    if len(found) > 1 or any(len(digest) != len(NO_DIGEST) for digest in found):
        raise SealError(f"its digest is damaged: {', '.join(map(repr, found))}")
    return found[0] if found else None


def data_digest(tables: bytes | memoryview, digest: str, segments: bytes | memoryview) -> str:
    """Return a data file's own digest, in hexadecimal.

    Args:
        tables: All that comes before its first segment.
        digest: The digits that it has.
        segments: The digests of its segments, as the file keeps them.

    Raises:
        SealError: The key with the digits is not in the tables, or occurs twice.
    """
    made = hashlib.sha256(with_data_digest(tables, digest, NO_DIGEST))
    made.update(segments)
    return made.hexdigest()


def with_data_digest(tables: bytes | memoryview, old: str, new: str) -> bytes:
    """Return a data file's tables with other digits in the key of its digests.

    Raises:
        SealError: The key does not occur, or occurs twice.
    """
    content, wanted = bytes(tables), data_key(old).encode()
    if content.count(wanted) != 1:
        raise SealError(f"its tables have the key of its digests {content.count(wanted)} times")
    return content.replace(wanted, data_key(new).encode())
