"""The file of a lowered module: mapped when it was loaded, made when it is first needed otherwise."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from exir_lowering.errors import InputError
from exir_lowering.lowered_module.runners import Place, Source, read
from exir_lowering.pte.debug_info import SUFFIX, DebugInfo, MethodDebug


class File:
    """A module's file.

    Attributes:
        written: The constant methods in it that a module was saved with; they are replaced when it is saved again.
    """

    def __init__(self, make: Callable[[], Source], written: frozenset[str] = frozenset()) -> None:
        self._make, self.written = make, written
        self._source: Source | None = None

    @property
    def source(self) -> Source:
        """The file; it is made when it is first needed."""
        if self._source is None:
            self._source = self._make()
        return self._source


def data_paths(given: Any) -> list[str]:
    """Return the paths of a module's data files; it saves copies of them, by their names.

    Raises:
        InputError: Something else was given.
    """
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
            f"LoweredModule.load: data: {', '.join(map(repr, paths))} have one name in several directories; save would "
            "write them to one file. Rename one of them."
        )
    return paths


def opened(path: str, data: Sequence[str], place: Place) -> Source:
    """Map a file that was loaded already; it stays readable when another one takes its place.

    Args:
        path: Its path.
        data: The paths of its data files.
        place: Which files these were before they were loaded.

    Raises:
        InputError: One was replaced meanwhile.
    """
    with open(path, "rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    place.check()
    debug = cache(partial(_debug_beside, Path(path), content))
    return read(content, path, [Path(one) for one in data], debug, place)


def _debug_beside(path: Path, content: memoryview) -> Mapping[str, MethodDebug]:
    """Return what the debug information beside a file says of its methods, if it is of this file."""
    try:
        info = DebugInfo.from_json(path.with_suffix(SUFFIX).read_bytes())
    except (OSError, InputError):
        return {}
    return info.methods if info.sha256 == hashlib.sha256(content).hexdigest() else {}
