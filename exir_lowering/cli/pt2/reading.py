"""Reading a `.pt2` file."""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from torch.export import ExportedProgram

from exir_lowering._upstream import exported_files
from exir_lowering._upstream.exported_files import SCHEMA_MAJOR
from exir_lowering.cli.pt2 import program, tensors
from exir_lowering.cli.pt2.tensors import Archive
from exir_lowering.errors import InputError
from exir_lowering.graphs.serialized.grammar import UnsafeFileError

MODEL = "model"
"""The name that `torch.export.save` gives a program in its archive."""

_COMPILED = "data/aotinductor/"
_OLD = "serialized_exported_program.json"


def read_program(path: Path) -> ExportedProgram:
    """Read a program that `torch.export.save` wrote, from a stranger too: nothing in the file is executed.

    torch gets what was checked, instead of the file, which is opened once. UnsafeFileError (ExcessiveFileError if it
    takes much more memory or time than its size says) and InputError say what is wrong as a clause.
    """
    with path.open("rb") as file:
        parts = _read_parts(file)
    return exported_files.read_program(*parts)


def check_devices(path: Path) -> None:
    """Raise InputError for a device in a file that is not here, for which torch ends the process."""
    try:
        with zipfile.ZipFile(path) as archive:
            described = [archive.read(name) for name in archive.namelist() if name.endswith(".json")]
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error):
        return
    for content in described:
        _check_devices_in(content)


def _check_devices_in(content: bytes) -> None:
    try:
        json.loads(content, object_hook=_check_device)
    except InputError:
        raise
    except (ValueError, RecursionError):  # it is no JSON, or JSON that Python does not read
        return


def _check_device(table: dict[str, Any]) -> dict[str, Any]:
    for device in (table.get("device"), table.get("as_device")):
        if isinstance(device, dict) and isinstance(device.get("type"), str):
            program.check_device(device["type"])
    return table


def _read_parts(file: BinaryIO) -> tuple[Any, Any, Any, Any]:
    """Return a program in torch's schema, its weights, its constants and its example inputs, all checked."""
    archive = Archive(file)
    if _OLD in archive:
        return _read_old_parts(archive)
    if bytes(archive.read("archive_format")) != b"pt2":
        raise InputError("it is not an archive of torch.export.save")
    version = bytes(archive.read("archive_version"))
    if version.strip() != b"0":
        raise InputError(f"its archive version is {version[:20]!r}, expected 0")
    compiled = [name for name in archive.sizes if name.startswith(_COMPILED)]
    if compiled:
        raise UnsafeFileError(f"it has compiled code, which torch.export.load would load ({compiled[0]!r})")
    serialized = _parse_checked(archive.read(f"models/{MODEL}.json"))
    sample = f"{tensors.EXAMPLES}{MODEL}.pt"
    examples = tensors.read_examples(sample, archive.read(sample)) if sample in archive else None
    weights = tensors.read_tensors(archive, MODEL, "weights")
    constants = tensors.read_tensors(archive, MODEL, "constants")
    tensors.check_extents(archive, weights, constants, examples)
    return serialized, weights, constants, examples


def _read_old_parts(archive: Archive) -> tuple[Any, Any, Any, Any]:
    """Return the parts of a file of PyTorch 2.7 or before."""
    version = archive.read("version").decode("ascii", "replace").split(".")
    if version[0] != str(SCHEMA_MAJOR):
        raise InputError(f"its schema version is {version[0][:20]!r}, expected {SCHEMA_MAJOR}")
    serialized = _parse_checked(archive.read(_OLD))
    found = []
    for part in ("state_dict", "constants"):
        name = f"serialized_{part}.pt"
        # Before PyTorch 2.1 it had another ending.
        member = name if name in archive else f"serialized_{part}.json"
        found.append(tensors.read_state(f"the {part} {member!r}", archive.read(member)))
    sample = "serialized_example_inputs.pt"
    examples = tensors.read_examples(sample, archive.read(sample)) if sample in archive else None
    tensors.check_extents(archive, *found, examples)
    return serialized, found[0], found[1], examples


def _parse_checked(content: bytearray) -> Any:
    serialized = program.parse("ExportedProgram", content)
    try:
        program.check_program(serialized)
    except json.JSONDecodeError as error:
        raise InputError(f"its metadata is not JSON ({error})") from error
    return serialized
