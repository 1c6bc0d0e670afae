"""Write a lowered module: its `.pte` file, and the files beside it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from exir_lowering.lowered_module.source import Source
from exir_lowering.pte import saving
from exir_lowering.pte.debug_info import SUFFIX, VERSION, DebugInfo


def write_module(
    target: Path,
    pieces: Iterable[bytes | memoryview],
    source: Source,
    bundle: Callable[[Path], bytes | None],
) -> None:
    """Write a module's files: all of them, or none.

    Args:
        target: Where the `.pte` file goes.
        pieces: The content of the `.pte` file.
        source: The file that it was made from; its data files are copied.
        bundle: Returns ExecuTorch's bundled program for the path of the `.pte` file, or None.

    Raises:
        OSError: One cannot be written.
    """
    with saving.Staging() as staging:
        digest = hashlib.sha256()
        made = staging.add(target, partial(_write, pieces, digest))
        beside = {".bpte": bundle(made), SUFFIX: _debug(source, digest.hexdigest())}
        data = {target.parent / path.name: path for path in source.data}
        for copy, path in data.items():
            if not _is_same(copy, path):
                staging.add(copy, saving.copy_of(path))
        for suffix, content in beside.items():
            if content is not None:
                staging.add(target.with_suffix(suffix), partial(_put, content))
        own = isinstance(source.given, str) and _is_same(target, Path(source.given))
        staging.publish(target)
    if own and source.origin is not None:
        source.origin.renew()  # it has the same methods
    for suffix, content in beside.items():
        if content is None:  # an existing one belongs to an earlier file
            target.with_suffix(suffix).unlink(missing_ok=True)


def _write(pieces: Iterable[bytes | memoryview], digest: Any, file: BinaryIO) -> None:
    """Write a file, and update a hash with its content."""
    for piece in pieces:
        digest.update(piece)
        file.write(piece)


def _debug(source: Source, sha256: str) -> bytes | None:
    """Return the debug information of a file that has the source's methods; None when nothing is known."""
    methods = source.debug()
    return DebugInfo(VERSION, sha256, methods).to_json().encode() if methods else None


def _is_same(target: Path, path: Path) -> bool:
    return target.exists() and os.path.samefile(target, path)


def _put(content: bytes, file: BinaryIO) -> None:
    file.write(content)
