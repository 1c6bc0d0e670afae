"""What kind of file one is, by how it begins; nothing here needs torch."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from exir_lowering.errors import InputError, ignoring_errors

PTE_MAGIC, PTD_MAGIC = b"ET12", b"FT01"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file."""

    name: str  # what it is, with an article
    advice: str  # what to do with it, as a sentence


PTE = Kind("a .pte file, already lowered, for `exir-lower run`", "Load it with exir_lowering.load.")
PTD = Kind("a .ptd data file", "Give the .pte file that it was saved with, and this one as data=.")
PT2 = Kind(
    "a .pt2 file, a torch.export program that is not lowered yet",
    "Lower it first: `exir-lower lower MODEL.pt2 --partitioner NAME -o MODEL.pte`, or "
    "exir_lowering.lower(torch.export.load(path), ...).emit().save(path).",
)

_MARKS: Mapping[bytes, Kind] = {PTE_MAGIC[:2]: PTE, PTD_MAGIC: PTD}
"""What follows the first four bytes, the identifiers of the flatbuffers; of a `.pte` file of any version."""


def kind_of(source: str | Path | bytes) -> Kind | None:
    """Return the kind of a file, from its path or content; None for one of another program. It is not read whole."""
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
            start = file.read(8)
            if start[:4] != b"PK\x03\x04":
                return next((kind for mark, kind in _MARKS.items() if start[4:].startswith(mark)), None)
            with ignoring_errors(), zipfile.ZipFile(file) as archive:  # whatever is wrong with it
                parts = {name.rpartition("/")[2] for name in archive.namelist()}
                return PT2 if parts & {"archive_format", "serialized_exported_program.json"} else None
    except OSError as error:
        raise InputError(f"{str(source)!r} cannot be loaded: {error}.") from error
    return None
