"""Step emit: from lowered programs to one `.pte` file and its data files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from executorch.exir import ExecutorchBackendConfig, ExecutorchProgramManager
from torch.export import ExportedProgram

from exir_lowering import _upstream, graphs, originals, placement
from exir_lowering.errors import InputError
from exir_lowering.placement import StoredData
from exir_lowering.report import Report


@dataclass(frozen=True, slots=True, eq=False)
class Artifact:
    """A file that ExecuTorch's runtime loads.

    Attributes:
        manager: ExecuTorch's manager of the emitted program.
        report: The report of the lowering.
        stored: What takes how many bytes in the file and its data files, the largest first.
    """

    manager: ExecutorchProgramManager
    report: Report
    stored: tuple[StoredData, ...]

    @property
    def buffer(self) -> bytes:
        """The `.pte` file in memory, made anew at each use; `save` does without."""
        return bytes(_upstream.pte_contents(self.manager))

    @property
    def data_files(self) -> dict[str, bytes]:
        """The `.ptd` data files by name, made anew at each use; empty when all data is in the `.pte` file."""
        return {_data_name(name): bytes(cord) for name, cord in _upstream.data_file_contents(self.manager).items()}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the `.pte` file, and its data files beside it, piece by piece.

        Args:
            path: Where the `.pte` file goes. A file that is there is replaced once the new one is complete.

        Returns:
            The path.

        Raises:
            InputError: The path does not end in `.pte`, or cannot be written.
        """
        target = pte_path(path)
        try:
            for name, cord in _upstream.data_file_contents(self.manager).items():
                replace_file(target.parent / _data_name(name), cord.write_to_file)
            replace_file(target, self.manager.write_to_file)
        except OSError as error:
            raise InputError(f"Cannot save to {str(target)!r}: {error}") from error
        return target

    def __repr__(self) -> str:
        return f"Artifact({', '.join(sorted(self.manager.methods))})"


def emit(
    programs: Mapping[str, ExportedProgram],
    config: ExecutorchBackendConfig | None,
    *,
    constant_methods: Mapping[str, Any] | None,
    external_weights: placement.Policy | None,
    keep_originals: bool,
    report: Report,
) -> Artifact:
    """Emit lowered programs; see `LoweredMethods.emit`."""
    if config is not None and not isinstance(config, ExecutorchBackendConfig):
        raise InputError(f"config: got {type(config).__name__}, expected ExecuTorch's ExecutorchBackendConfig.")
    if constant_methods is not None and (
        not isinstance(constant_methods, Mapping) or not all(isinstance(name, str) for name in constant_methods)
    ):
        raise InputError(
            f"constant_methods: got {type(constant_methods).__name__} {constant_methods!r}, expected a mapping from "
            "method names to values."
        )
    both = sorted(set(programs) & set(constant_methods or ()))
    if both:
        raise InputError(f"constant_methods: {both} are methods of the program too; choose other names.")
    # ExecuTorch rewrites the graphs that it emits.
    copies = {name: graphs.copy_program(program) for name, program in programs.items()}
    if keep_originals:
        originals.attach(copies)
    config = config or ExecutorchBackendConfig()
    if external_weights is not None:
        config = placement.place(copies, config, external_weights)
    try:
        edge = _upstream.EdgeProgramManager(copies, dict(constant_methods or {}), _upstream.without_validity_checks())
        manager = edge.to_executorch(config)
    except Exception as error:
        raise InputError(
            f"Methods {', '.join(map(repr, programs))} could not be emitted: {type(error).__name__}: {error}"
        ) from error
    if keep_originals:
        originals.check_numbers(programs, manager)
    return Artifact(manager, report, placement.stored(copies, config, manager))


def pte_path(path: str | os.PathLike[str]) -> Path:
    """Return where a `.pte` file goes.

    Raises:
        InputError: The path does not end in `.pte`.
    """
    try:
        target = Path(path)
    except TypeError as error:
        raise InputError(f"Cannot save to {path!r}: expected a path that ends in .pte.") from error
    if target.suffix != ".pte":
        raise InputError(f"Cannot save to {str(target)!r}: expected a path that ends in .pte.")
    return target


def _data_name(name: str) -> str:
    return name if name.endswith(".ptd") else f"{name}.ptd"


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file beside its place and move it there, so that a failure leaves what was there.

    Args:
        path: Its place.
        write: Writes the content.

    Raises:
        OSError: It cannot be written.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
