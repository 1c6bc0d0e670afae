"""`refit`: the call, the values that it is given, and its result."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exir_lowering._upstream.tensors import KINDS
from exir_lowering.errors import InputError, did_you_mean, few, let_through
from exir_lowering.pte import container, digests, recipes, saving
from exir_lowering.pte.debug_info import SUFFIX
from exir_lowering.pte.digests import Seal
from exir_lowering.pte.files import PTE, DataFiles, Given, MappedFile, in_memory, is_file, open_file, read_data_files
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.recipes import Weight, digest, is_bounded
from exir_lowering.refitting.content import rewrite, spread

if TYPE_CHECKING:
    from exir_lowering.steps.emit import Artifact

_SHOWN = 5


@dataclass(frozen=True, slots=True, eq=False)
class RefittedFile:
    """A lowered file with other weights.

    Attributes:
        buffer: The `.pte` file, as a memoryview of bytes.
        data_files: The `.ptd` data files by name, in the same form; empty if all data is in the `.pte` file.
        debug: The debug information that was beside the file, as JSON; empty if there was none.
    """

    buffer: memoryview
    data_files: Mapping[str, memoryview]
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
        contents: dict[Path, Any] = {target.parent / name: content for name, content in self.data_files.items()}
        contents[target] = self.buffer
        if self.debug:
            contents[target.with_suffix(SUFFIX)] = self.debug
        try:
            saving.replace_files({each: methodcaller("write", content) for each, content in contents.items()}, target)
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
            value does not fit; or a backend has a weight in a form that cannot be made again.
    """
    file, artifact = _open(source)
    _, content = file.parse(container.open_program, PTE)
    seal, written = digests.check_program(file, "full", content.named), content.named.get(recipes.KEY)
    files, debug = _read_beside(artifact, file, data, seal)
    digests.check_all(file, seal, files, frozenset(files.named), "full")
    if seal is None or written is None:
        raise InputError(
            f"refit: {file.name} does not say how it is made of weights. Lower the model with "
            "LoweringOptions(refit=True), or `exir-lower lower --refit`."
        )
    who = f"refit: {file.name}"
    try:
        opened = _contents(who, seal.data, files)
        known = recipes.decode(written, sum(map(len, (file.content, *opened.values()))))
        values = _read_values(who, state_dict, known.weights, strict)
        program, more = rewrite(who, file.content, opened, known.places, values)
    except Exception as error:  # whatever a damaged recipe raises, in Python or torch
        let_through(error)
        if isinstance(error, InputError):
            raise
        what = str(error) if isinstance(error, CorruptError) else f"its recipes are damaged: {error!r:.200}"
        raise InputError(f"{who} cannot be refitted: {what}. Lower the model again.") from error
    old, new = (digests.identity(each).encode() for each in (file.content, program))
    return RefittedFile(program, more, debug.replace(old, new) if old in debug else b"")


def _contents(who: str, sealed: Mapping[str, str], files: DataFiles) -> dict[str, memoryview]:
    """Return the data files by the names that the program has for them, with which they are saved."""
    if any(Path(name).name != name or "\\" in name for name in sealed):
        raise InputError(f"{who}: its data files have names with folders: {_list([*sealed])}. It was damaged.")
    names = {found: name for name, found in sealed.items()}
    return {names[digests.find_data_digest(one.weights) or ""]: one.file.content for one in files.files}


def _open(source: object) -> tuple[MappedFile, Artifact | None]:
    if not is_file(source):
        from exir_lowering.steps.emit import Artifact  # with the compiler, which takes a second, and files do not need

        if isinstance(source, Artifact):
            return in_memory("the artifact", source.buffer), source
    return open_file(source, "refit", "an Artifact, or the path or content of a .pte file", ".pte"), None


def _read_beside(
    artifact: Artifact | None, file: MappedFile, data: Given, seal: Seal | None
) -> tuple[DataFiles, bytes]:
    """Read the data files of a program, and the debug information beside it."""
    if artifact is not None:
        debug = artifact.debug_info.to_json().encode() if artifact.methods else b""
        return read_data_files([*artifact.data_files.values()], "refit"), debug
    if isinstance(file.source, bytes):
        return read_data_files(data, "refit"), b""
    path = Path(file.source)
    if data is None and seal is not None:
        data = [path.parent / Path(name).name for name in seal.data]
    beside = path.with_suffix(SUFFIX)
    return read_data_files(data, "refit"), beside.read_bytes() if beside.is_file() else b""


def _read_values(who: str, given: Any, weights: Mapping[str, Weight], strict: bool) -> dict[str, torch.Tensor]:
    """Return the values to use by name, tied ones under each name; raise an InputError for what does not fit."""
    if not isinstance(given, Mapping):
        raise InputError(f"{who}: state_dict: got {type(given).__name__}, expected a mapping from names to tensors.")
    unknown = [name for name in given if name not in weights]
    if unknown:
        hint = did_you_mean(unknown[0], weights, most=2)
        raise InputError(f"{who}: state_dict has {_list(unknown)}, expected the names of the exported program.{hint}")
    sizes = [math.prod(weights[name].shape) for name in given]
    spread(lambda name: _check(f"{who}: state_dict[{name!r}]", given[name], weights[name]), [*given], sizes)
    found: dict[str, torch.Tensor] = {}
    groups: dict[str, list[str]] = {}
    for name, weight in weights.items():
        groups.setdefault(weight.tied or name, []).append(name)
    for names in groups.values():
        first, *others = [name for name in names if name in given] or [""]
        for other in others:
            if given[other] is not given[first] and digest(given[other]) != digest(given[first]):
                raise InputError(
                    f"{who}: state_dict: {first!r} and {other!r} are one tensor in the model, but got two values. Give "
                    "the same for both, or only one; lower the model again if they are not tied any more."
                )
        found.update({name: given[first].detach().resolve_neg() for name in names if first})
    missing = [name for name, weight in weights.items() if name not in found and not weight.reason]
    if strict and missing:
        raise InputError(f"{who}: state_dict lacks {_list(missing)}. Give all values; strict=False keeps the others.")
    return found


def _check(who: str, value: Any, weight: Weight) -> None:
    if type(value) not in KINDS:
        raise InputError(f"{who}: got a {type(value).__name__}, expected a tensor.")
    got, expected = f"{value.dtype}{list(value.shape)}", f"torch.{weight.dtype}{list(weight.shape)}"
    if got != expected:
        raise InputError(f"{who}: got {got}, expected {expected} as in the file. Convert it, or lower the model again.")
    if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
        raise InputError(f"{who}: got {value.layout} on {value.device}, expected a dense tensor on the CPU.")
    if weight.reason and digest(value) != weight.digest:
        raise InputError(f"{who}: its value cannot be replaced: {weight.reason}. Lower the model again.")
    if value.is_floating_point() and not weight.reason and not is_bounded(value):
        raise InputError(f"{who}: an element is infinite or larger than 65,536. Lower the model again.")


def _list(names: Sequence[Any]) -> str:
    return few(map(repr, names), _SHOWN)
