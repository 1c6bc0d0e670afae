"""Find the debug information of a file, and with it the lines of the model that a failure is about."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from exir_lowering.errors import InputError, find_named_handle
from exir_lowering.errors.interrupts import let_through
from exir_lowering.graphs import sources
from exir_lowering.pte import digests, mapping
from exir_lowering.pte.debug_info import SUFFIX, DebugInfo, MethodDebug

Lines: TypeAlias = Callable[[int, BaseException], str]
"""Takes the number of a method's delegate and what it raised; returns the model's lines, as the end of a message."""


def no_lines(number: int, error: BaseException) -> str:
    """Return no lines: nothing is known about the model."""
    return ""


@dataclass(eq=False)
class DebugFile:
    """The debug information of a `.pte` file, read when it is first needed."""

    source: str | bytes  # the path of the `.pte` file, or its content
    path: Path | None  # the debug information's; None when there is none
    # Whether the caller named it: then it has to be valid; otherwise an invalid one is ignored with a warning.
    asked: bool = False

    def method(self, name: str) -> MethodDebug | None:
        """Return what is known about a method; None when nothing is."""
        return None if self._info is None else self._info.methods.get(name)

    @cached_property
    def _info(self) -> DebugInfo | None:
        try:
            return self._load()
        except InputError as error:
            if self.asked:
                raise
            warnings.warn(f"{error} It is not used.", stacklevel=4)  # from the caller of `method`
            return None

    def lines(self, method: str) -> Lines:
        """Return a function that returns the model's lines for a failure of a method's delegates."""

        def tell(number: int, error: BaseException) -> str:
            try:
                known = self.method(method)
            except Exception as problem:  # a warning that is an error here must not take the failure's place
                let_through(problem)
                return str(problem)
            if known is None or number >= len(known.delegates):
                return ""
            handle = find_named_handle(error)
            found = known.lines((handle,)) if handle is not None else []
            return sources.format_lines(found or known.lines(known.delegates[number].handles))

        return tell

    def _load(self) -> DebugInfo | None:
        if self.path is None:
            return None
        who = f"The debug information {str(self.path)!r} cannot be used"
        try:
            info = DebugInfo.from_json(self.path.read_bytes())
            program = mapping.open_file(self.source, "load", "the path or content of a .pte file", ".pte")
            digest = digests.identity(program.content)
        except InputError as error:
            raise InputError(f"{who}: {error}. Save the artifact again.") from error
        except (OSError, ValueError) as error:
            let_through(error)
            raise InputError(f"{who}: {error}.") from error
        if info.digest != digest:
            raise InputError(
                f"{who}: it belongs to another .pte file, or to this one before it was made again (digest "
                f"{info.digest[:12]}..., the file has {digest[:12]}...). Save the artifact again: it writes both."
            )
        return info


def find(source: str | bytes, given: object) -> DebugFile:
    """Find the debug information of a program: what the caller gave, or `model.debug.json` beside `model.pte`."""
    if given is None:
        beside = Path(source).with_suffix(SUFFIX) if isinstance(source, str) and Path(source).name else None
        return DebugFile(source, beside if beside is not None and beside.is_file() else None)
    if not isinstance(given, (str, os.PathLike)):
        raise InputError(f"load: debug: got a {type(given).__name__}, expected the path of a {SUFFIX} file.")
    file = DebugFile(source, Path(os.fsdecode(given)), asked=True)
    file.method("")  # what was asked for is checked at once
    return file
