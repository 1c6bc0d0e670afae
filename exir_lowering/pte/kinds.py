"""Recognise a file that was given in place of another kind, by how it begins and not by its name."""

from __future__ import annotations

import io
import mmap
import zipfile
from dataclasses import dataclass
from pathlib import Path

from exir_lowering.errors.interrupts import let_through
from exir_lowering.pte import header

_HEAD = 64
_LONGEST_HEADER = 100_000_000  # of safetensors, whose library refuses longer ones
_ONNX_FIELDS = b"\x12\x1a\x22\x32\x3a\x42"  # the tags of the fields that may follow the version


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file."""

    name: str  # what it is, with an article
    advice: str  # what to do with it, as a sentence

    @property
    def short(self) -> str:
        """The name without its explanation."""
        return self.name.partition(",")[0]


_EXPORT = "Export the model with torch.export, and lower the program."
_BUILD = "Build the model, load its weights into it, export it with torch.export, and lower the program."

PTE = Kind("a .pte file, already lowered, for `exir-lower run`", "Load it with exir_lowering.load.")
PTD = Kind("a .ptd data file", "Give the .pte file that it was saved with, and this one as data=.")
_BUNDLED = Kind("a .bpte file, a program bundled with inputs", "Give the .pte file that it was made from.")
PT2 = Kind(
    "a .pt2 file, a torch.export program that is not lowered yet",
    "Lower it first: `exir-lower lower MODEL.pt2 --partitioner NAME -o MODEL.pte`, or "
    "exir_lowering.lower(torch.export.load(path), ...).emit().save(path).",
)
_TORCHSCRIPT = Kind("a TorchScript file, which has no exported graph", _EXPORT)
_SAVED = Kind("a torch.save file, which has weights but no exported graph", _BUILD)
_RECORD = Kind("an ETRecord, for ExecuTorch's Inspector", "Give the .pte file that it was made with.")
_ARRAYS = Kind("a file of numpy arrays", "Give a .pte file, and this one as an input.")
_ZIP = Kind("a zip archive", "Give the file itself, unpacked if it is in the archive.")
_ONNX = Kind("apparently an ONNX model", f"ONNX is not read. {_EXPORT}")
_SAFETENSORS = Kind("a safetensors file, which has weights but no graph", _BUILD)
_POINTER = Kind("a Git LFS pointer, not the file itself", "Fetch the file with `git lfs pull`.")

_STARTS: tuple[tuple[int, bytes, Kind], ...] = (
    (4, header.PTE_MAGIC[:2], PTE),  # of any version
    (4, header.PTD_MAGIC, PTD),
    (4, b"BP08", _BUNDLED),
    (4, b"TFL3", Kind("a TFLite model", f"TFLite is not read. {_EXPORT}")),
    (0, b"GGUF", Kind("a GGUF file, which has weights but no graph", _BUILD)),
    (0, b"\x89HDF\r\n", Kind("an HDF5 file, as Keras writes it", f"HDF5 is not read. {_EXPORT}")),
    (0, b"\x93NUMPY", _ARRAYS),
    (0, b"\x1f\x8b", Kind("a gzip archive", "Unpack it.")),
    (0, b"version https://git-lfs", _POINTER),
    (0, b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", _SAVED),
)
_IN_ZIP = (
    ("ETRECORD_V0", _RECORD),
    ("archive_format", PT2),
    ("serialized_exported_program.json", PT2),
    ("constants.pkl", _TORCHSCRIPT),
    ("data.pkl", _SAVED),
)


def kind_of_content(content: memoryview) -> Kind | None:
    """Return the kind of a file's content; None for an unknown one. The content is not read as a whole."""
    head = bytes(content[:_HEAD])
    for start, magic, kind in _STARTS:
        if head[start : start + len(magic)] == magic:
            return kind
    if head[:4] == b"PK\x03\x04":
        held = content.obj
        return _in_zip(held if isinstance(held, mmap.mmap) else io.BytesIO(content))
    header = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and header <= min(_LONGEST_HEADER, len(content) - 8):
        return _SAFETENSORS
    if len(head) > 2 and head[0] == 8 and 0 < head[1] < 32 and head[2] in _ONNX_FIELDS:
        return _ONNX
    return None


def kind_of_file(path: Path) -> Kind | None:
    """Return the kind of a file; None for an unknown one."""
    with path.open("rb") as file:
        if not file.read(1):
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as content:
            return kind_of_content(content)


def _in_zip(file: object) -> Kind | None:
    """Return the kind of a zip archive; None for a damaged one."""
    try:
        with zipfile.ZipFile(file) as archive:  # type: ignore[call-overload]
            names = archive.namelist()
    except Exception as error:  # whatever is wrong with the archive
        let_through(error)
        return None
    parts = {name.rpartition("/")[2] for name in names}
    if names and all(name.endswith(".npy") for name in names):
        return _ARRAYS
    return next((kind for name, kind in _IN_ZIP if name in parts), _ZIP)
