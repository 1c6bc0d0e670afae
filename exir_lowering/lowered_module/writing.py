"""Write a lowered module: its `.pte` file, and the files beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from exir_lowering.lowered_module.source import Source
from exir_lowering.pte import digests, mapping, saving
from exir_lowering.pte.debug_info import SUFFIX, VERSION, DebugInfo


def write_module(
    target: Path,  # where the `.pte` file goes
    pieces: Iterable[bytes | memoryview],  # the content of the `.pte` file
    source: Source,  # what it was made from; its data files are copied
    # returns ExecuTorch's bundled program for the path of the `.pte` file, or None
    bundle: Callable[[Path], bytes | None],
) -> None:
    """Write a module's files: all of them, or none and an OSError."""
    with saving.Staging() as staging:
        made = staging.add(target, lambda file: file.writelines(pieces))
        beside = {".bpte": bundle(made), SUFFIX: _debug(source, made)}
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


def _debug(source: Source, made: Path) -> bytes | None:
    """Return the debug information of a file that has the source's methods; None when nothing is known."""
    methods = source.debug()
    if not methods:
        return None
    content = mapping.open_file(made, "save", "a path", ".pte").content
    return DebugInfo(VERSION, digests.identity(content), methods).to_json().encode()


def _is_same(target: Path, path: Path) -> bool:
    return target.exists() and os.path.samefile(target, path)


def _put(content: bytes, file: BinaryIO) -> None:
    file.write(content)
