"""`refit`: the call and its result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exir_lowering.errors import InputError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.pte import container, data_files, digests, kinds, mapping, recipes, saving, verifying
from exir_lowering.pte.data_files import Given
from exir_lowering.pte.debug_info import SUFFIX
from exir_lowering.pte.digests import SealError
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.mapping import MappedFile
from exir_lowering.refitting.content import rewrite
from exir_lowering.refitting.values import read_values
from exir_lowering.steps.emit import Artifact


@dataclass(frozen=True, slots=True, eq=False)
class RefittedFile:
    """A lowered file with other weights: what `Artifact` is for `emit`.

    Attributes:
        buffer: The `.pte` file.
        data_files: The `.ptd` data files by name; empty if all data is in the `.pte` file.
        debug: What is beside the file as `model.debug.json`; empty if nothing was.
    """

    buffer: bytes | bytearray
    data_files: Mapping[str, bytes | bytearray]
    debug: bytes = b""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the `.pte` file, with its data files and debug information next to it, as `Artifact.save` does.

        Args:
            path: Where the `.pte` file goes. It may be the file that the weights were put into.

        Returns:
            The path.

        Raises:
            InputError: The path does not end in `.pte`, or cannot be written.
        """
        target = saving.pte_path(path)
        contents = {target.parent / name: content for name, content in self.data_files.items()}
        contents[target] = self.buffer
        if self.debug:
            contents[target.with_suffix(SUFFIX)] = self.debug
        try:
            saving.replace_files({each: _writer(content) for each, content in contents.items()}, target)
        except OSError as error:
            let_through(error)
            raise InputError(f"Cannot save to {str(target)!r}: {error}") from error
        return target

    def __repr__(self) -> str:
        return f"RefittedFile({len(self.buffer):,} bytes)"


def refit(
    source: Artifact | str | os.PathLike[str] | bytes,
    state_dict: Mapping[str, torch.Tensor],
    *,
    data: Given = None,
    strict: bool = True,
) -> RefittedFile:
    """Put new weights into a file that was lowered with `LoweringOptions(refit=True)`, without lowering again.

    The result has the bytes that lowering the model with these weights would give, for the same options and versions.

    Args:
        source: What `emit` made, or the path or content of a `.pte` file. It is not changed.
        state_dict: The new values, by their names in the exported program, with the same shapes and dtypes.
        data: The path or content of a `.ptd` data file, or a list of these; by default those that the file was saved
            with, in its folder.
        strict: Whether all values have to be given. With False, those that are missing stay what they are.

    Returns:
        The file, with `buffer`, `data_files` and `save`.

    Raises:
        InputError: The file cannot be read, is damaged, or was lowered without `refit=True`; a name, shape, dtype or
            value does not fit; or the new values make the file another one: tensors that were equal differ, or the
            reverse, or a backend has a weight in a form that cannot be made again.
    """
    file, files, debug = _open(source, data)
    seal = verifying.check_program(file, "full")
    verifying.check_all(file, seal, files, frozenset(files.named), "full")
    _, content = container.open_program(file.content)
    written = content.named.get(recipes.KEY)
    if seal is None or written is None:
        raise InputError(
            f"refit: {file.name} does not say how it is made of weights. Lower the model with "
            "LoweringOptions(refit=True), or `exir-lower lower --refit`; its file can be refitted from then on."
        )
    who = f"refit: {file.name}"
    names = {digest: name for name, digest in seal.data.items()}
    opened = {names.get(_digest(one), one.name): one.file.content for one in files.files}
    try:
        known = recipes.decode(written)
        values = read_values(who, state_dict, known.weights, strict)
        with torch.no_grad():
            program, more = rewrite(who, file.content, opened, known.places, values)
    except (CorruptError, SealError) as error:
        raise InputError(f"{who} cannot be refitted: {error}. It is damaged: make or copy it again.") from None
    old, new = (digests.identity(each).encode() for each in (file.content, program))
    return RefittedFile(program, more, debug.replace(old, new) if old in debug else b"")


def _open(source: Any, data: Given) -> tuple[MappedFile, data_files.DataFiles, bytes]:
    """Open a program and its data files, and read the debug information beside it."""
    if isinstance(source, Artifact):
        debug = source.debug_info.to_json().encode() if source.methods else b""
        file = mapping.in_memory("the artifact", source.buffer)
        return file, data_files.read(list(source.data_files.values()) or None, "refit"), debug
    file = mapping.open_file(source, "refit", "an Artifact, or the path or content of a .pte file", ".pte")
    _, content = file.parse(container.open_program, kinds.PTE)
    if isinstance(file.source, bytes):
        return file, data_files.read(data, "refit"), b""
    path = Path(file.source)
    sealed = content.named.get(digests.KEY)
    if data is None and sealed is not None:
        try:
            data = [path.parent / Path(name).name for name in digests.decode(sealed).data]
        except SealError:
            data = None  # which is said later
    beside = path.with_suffix(SUFFIX)
    return file, data_files.read(data or None, "refit"), beside.read_bytes() if beside.is_file() else b""


def _digest(one: data_files.DataFile) -> str:
    return digests.find_data_digest(one.weights) or ""


def _writer(content: bytes | bytearray) -> saving.Write:
    return lambda file: file.write(content)
