"""Weights for workers: in a file that processes of one machine map, or sent once and known by their digests.

Tasks name pieces of memory. What is small travels with the task. The rest is written to a file, once for all tasks; a
worker that sees the file maps what it needs, privately, so that a backend that writes into a weight changes nothing for
others. A worker on another machine asks for what it has not been sent before.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from exir_lowering.pte.saving import TemporaryFolder

_SMALL = 1 << 16
"""Bytes up to which a piece travels with its task; a mapping costs about as much."""

_MOST_KEPT = 1 << 30
"""How many bytes of pieces a worker keeps that have no file."""

_TOKEN = 32


class MissingError(Exception):
    """A worker lacks pieces of memory, named by their digests."""

    def __init__(self, digests: Sequence[str]) -> None:
        super().__init__(f"{len(digests)} pieces of memory are missing")
        self.digests = tuple(digests)


class WeightsFile:
    """The memory of one call for its workers, in a file until `close`; with digests, for other machines too."""

    def __init__(self, *, digests: bool) -> None:
        self._digests = digests
        self._lock = threading.Lock()
        self._folder: TemporaryFolder | None = None
        self._path, self._token, self._end = Path(), "", 0
        self._places: dict[tuple[int, int], tuple[torch.Tensor, list[Any]]] = {}

    def place(self, pieces: Sequence[torch.Tensor], inline: Collection[str] = ()) -> tuple[list[Any], list[bytes]]:
        """Return what `find_pieces` takes, and the bytes sent with the task: small pieces, and `inline` digests."""
        places: list[Any] = []
        sent: list[bytes] = []
        for piece in pieces:
            found = [] if piece.numel() <= _SMALL else self._add(piece)
            if not found or found[-1] in inline:
                found = ["inline", len(sent), found[-1] if found else ""]
                sent.append(piece.numpy().tobytes())
            places.append(found)
        return places, sent

    def _add(self, piece: torch.Tensor) -> list[Any]:
        key = piece.data_ptr(), piece.numel()
        with self._lock:
            if key not in self._places:
                memory = piece.numpy().data
                digest = sha256(memory).hexdigest() if self._digests else ""
                offset = self._write(memory)
                self._places[key] = piece, ["file", str(self._path), self._token, offset, piece.numel(), digest]
            return self._places[key][1]

    def _write(self, memory: memoryview) -> int:
        if self._folder is None:
            self._folder = TemporaryFolder()
            self._path, self._token = self._folder.path / "weights", secrets.token_hex(_TOKEN // 2)
            self._path.write_bytes(self._token.encode())
            self._end = _TOKEN
        offset = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        with self._path.open("r+b") as file:
            file.seek(offset)
            file.write(memory)
        self._end = offset + len(memory)
        return offset

    def close(self) -> None:
        """Remove the file; workers that have mapped it keep what they have."""
        if self._folder is not None:
            self._folder.remove()


_kept: OrderedDict[str, torch.Tensor] = OrderedDict()
"""The pieces that this process was sent, by digest, the last used ones last."""

_kept_lock = threading.Lock()


def _keep(digest: str, piece: torch.Tensor) -> None:
    with _kept_lock:
        _kept[digest] = piece
        while sum(one.numel() for one in _kept.values()) > _MOST_KEPT:
            _kept.popitem(last=False)


def _find_kept(digest: str) -> torch.Tensor | None:
    with _kept_lock:
        if digest not in _kept:
            return None
        _kept.move_to_end(digest)
        return _kept[digest].clone()


def find_pieces(places: Sequence[Any], inline: Sequence[bytes]) -> list[torch.Tensor]:
    """Return a task's pieces of memory, from their places and the bytes that came with it; or MissingError."""
    found: list[torch.Tensor] = []
    missing = []
    for kind, *where, digest in places:
        piece: torch.Tensor | None
        if kind == "inline":
            piece = _copy(inline[where[0]])
            if digest:
                _keep(digest, piece.clone())  # the task may write into its own
        else:
            piece = _map(*where)
            if piece is None:
                piece = _find_kept(digest)
        if piece is None:
            missing.append(digest)
        else:
            found.append(piece)
    if missing:
        raise MissingError(missing)
    return found


def _copy(content: bytes) -> torch.Tensor:
    piece = torch.empty(len(content), dtype=torch.uint8)
    piece.numpy().data[:] = content
    return piece


def _map(path: str, token: str, offset: int, length: int) -> torch.Tensor | None:
    """Map a part of the file, None if there is no such file; another machine may have one of the same name."""
    try:
        with open(path, "rb") as file:
            if file.read(_TOKEN) != token.encode() or os.fstat(file.fileno()).st_size < offset + length:
                return None
            memory = mmap.mmap(file.fileno(), length, offset=offset, access=mmap.ACCESS_COPY)
    except OSError:
        return None
    return torch.frombuffer(memory, dtype=torch.uint8)
