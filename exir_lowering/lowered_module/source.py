"""The `.pte` file behind a lowered module, and where it was loaded from."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from exir_lowering.errors import InputError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.plugins.payload import find_checks
from exir_lowering.pte import digests, format as file_format
from exir_lowering.pte.debug_info import SUFFIX, DebugInfo, MethodDebug
from exir_lowering.pte.format import MethodSpec


class Origin:
    """The paths that a file and its data files were loaded from, and which files they were."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        """Look at the files; InputError if one does not exist."""
        self._paths = tuple(paths)
        self.renew()

    def renew(self) -> None:
        """Treat the files that exist now as the ones that were loaded; InputError if one does not exist."""
        self._identities = [_identity(path) for path in self._paths]

    def check(self) -> None:
        """Check that the files are still those that were loaded; InputError if one is gone, replaced or changed."""
        for path, identity in zip(self._paths, self._identities, strict=True):
            if _identity(path) != identity:
                raise InputError(
                    f"{os.fsdecode(path)!r} was replaced or changed after the module was loaded from it: it may hold "
                    "another model. Load the module again."
                )


def _identity(path: str | os.PathLike[str]) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError as error:
        let_through(error)
        raise InputError(f"{os.fsdecode(path)!r} cannot be read: {error}. Load the module again.") from error
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, eq=False)
class Source:
    """A `.pte` file that is loaded."""

    content: memoryview
    given: str | bytes  # its path or content, for `load`
    data: tuple[Path, ...]  # its data files
    methods: Mapping[str, MethodSpec]
    # what the debug handles of its methods stand for; empty when that is unknown
    debug: Callable[[], Mapping[str, MethodDebug]]
    origin: Origin | None = None  # where it was loaded from; None when it is in memory


class File:
    """A module's file, with the constant methods in it that are replaced when the module is saved again."""

    def __init__(self, make: Callable[[], Source], written: frozenset[str] = frozenset()) -> None:
        self._make, self.written = make, written
        self._source: Source | None = None

    @property
    def source(self) -> Source:
        """The file; it is made when it is first needed."""
        if self._source is None:
            self._source = self._make()
        return self._source


def read_source(
    content: memoryview,
    given: str | bytes,
    data: Sequence[Path],
    debug: Callable[[], Mapping[str, MethodDebug]],
    origin: Origin | None = None,
) -> Source:
    """Read what a file says about its methods; CorruptError if the file is damaged."""
    return Source(content, given, tuple(data), file_format.read_program(content, find_checks), debug, origin)


def data_paths(given: Any) -> list[str]:
    """Return the paths of a module's data files, which it saves copies of by name; InputError for anything else."""
    several = given if isinstance(given, (list, tuple)) else () if given is None else (given,)
    for one in several:
        if not isinstance(one, (str, os.PathLike)):
            raise InputError(
                f"LoweredModule.load: data: got a {type(one).__name__}, expected the path of a .ptd file, or a list of "
                "these."
            )
    paths = [os.fsdecode(one) for one in several]
    if len({os.path.basename(path) for path in paths}) < len(paths):
        raise InputError(
            f"LoweredModule.load: data: {', '.join(map(repr, paths))} have the same name in different directories; "
            "save would write them to one file. Rename one of them."
        )
    return paths


def open_source(path: str, data: Sequence[str], origin: Origin) -> Source:
    """Map a file that was loaded already; it stays readable when another one takes its place.

    InputError: It or a data file was replaced since `origin` looked at them, before they were loaded.
    """
    with open(path, "rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    origin.check()
    debug = cache(partial(_debug_beside, Path(path), content))
    return read_source(content, path, [Path(one) for one in data], debug, origin)


def _debug_beside(path: Path, content: memoryview) -> Mapping[str, MethodDebug]:
    """Return what the debug information beside a file says about its methods, if it belongs to this file."""
    try:
        info = DebugInfo.from_json(path.with_suffix(SUFFIX).read_bytes())
    except (OSError, InputError):
        return {}
    return info.methods if info.digest == digests.identity(content) else {}
