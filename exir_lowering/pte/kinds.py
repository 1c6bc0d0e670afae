"""What kind of file one is, by how it begins; nothing here needs torch."""

from __future__ import annotations

import io
import mmap
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exir_lowering.errors import InputError

PTE_MAGIC = b"ET12"
PTD_MAGIC = b"FT01"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file."""

    name: str  # what it is, with an article
    advice: str  # what to do with it, as a sentence

    @property
    def short(self) -> str:
        """The name without its explanation."""
        return self.name.partition(",")[0]


PTE = Kind("a .pte file, already lowered, for `exir-lower run`", "Load it with exir_lowering.load.")
PTD = Kind("a .ptd data file", "Give the .pte file that it was saved with, and this one as data=.")
PT2 = Kind(
    "a .pt2 file, a torch.export program that is not lowered yet",
    "Lower it first: `exir-lower lower MODEL.pt2 --partitioner NAME -o MODEL.pte`, or "
    "exir_lowering.lower(torch.export.load(path), ...).emit().save(path).",
)

_MARKS: Mapping[bytes, Kind] = {PTE_MAGIC[:2]: PTE, PTD_MAGIC: PTD}
"""What follows the first four bytes; of a `.pte` file of any version."""


def kind_of_content(content: memoryview) -> Kind | None:
    """Return the kind of a file's content; None for one of another program. The content is not read as a whole."""
    held = content.obj
    return _kind(bytes(content[:8]), held if isinstance(held, mmap.mmap) else io.BytesIO(content))


def kind_of_file(path: Path) -> Kind | None:
    """Return the kind of a file; None for one of another program."""
    try:
        with path.open("rb") as file:
            return _kind(file.read(8), file)
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be loaded: {error}.") from error


def _kind(start: bytes, source: Any) -> Kind | None:
    for mark, kind in _MARKS.items():
        if start[4:].startswith(mark):
            return kind
    if start[:4] != b"PK\x03\x04":
        return None
    try:
        with zipfile.ZipFile(source) as archive:
            parts = {name.rpartition("/")[2] for name in archive.namelist()}
    except MemoryError:
        raise
    except Exception:  # whatever is wrong with the archive
        return None
    return PT2 if parts & {"archive_format", "serialized_exported_program.json"} else None
