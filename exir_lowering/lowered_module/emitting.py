"""Modules in the process that lowered them: their file is emitted in memory."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering.errors import BackendUnavailableWarning
from exir_lowering.lowered_module.convention import of_program
from exir_lowering.lowered_module.module import Delegates, LoweredModule
from exir_lowering.lowered_module.record import Record
from exir_lowering.plugins import availability, registry
from exir_lowering.pte.assembling import RESERVED
from exir_lowering.pte.debug_info import DebugFile
from exir_lowering.pte.saving import TemporaryFolder
from exir_lowering.runtime.engine import open_engine
from exir_lowering.runtime.program import LoadedProgram
from exir_lowering.runtime.source import read_file
from exir_lowering.steps.emit import emit
from exir_lowering.steps.file import EmitOptions, Lowered


def of_lowered(
    lowered: Lowered, options: EmitOptions, delegates: Delegates | None, *, stacklevel: int
) -> LoweredModule:
    """Make a module from lowered programs; see `LoweredMethods.module`."""
    contents = Record({name: of_program(name, program) for name, program in lowered.programs.items()}, {}, {})
    given = registry.check_delegates(delegates)
    prepared = {name: _prepare(program) for name, program in lowered.programs.items()}
    artifact = emit(replace(lowered, programs=prepared), replace(options, reserved=RESERVED))
    folder = TemporaryFolder() if artifact.data_files else None  # which goes with the module
    data = [folder.path / name for name in artifact.data_files] if folder is not None else []
    for path, content in zip(data, artifact.data_files.values(), strict=True):
        path.write_bytes(content)
    file = read_file(artifact.buffer, data or None, verify=False)
    file = replace(file, debug=DebugFile(file.file, artifact.methods))
    engine = open_engine(file, given, "later")
    reasons = [
        f"Method {name!r} needs the backend {backend!r}, and {missing.reason}. {missing.advice}"
        for name, method in file.methods.items()
        for backend, missing in engine.missing.items()
        if backend in method.backends
    ]
    if reasons:
        warnings.warn(
            f"{' '.join(reasons)} The module was made; {availability.POSSIBLE}.",
            BackendUnavailableWarning,
            stacklevel=stacklevel + 1,
        )
    return LoweredModule(file, LoadedProgram(file, engine), contents, folder)


def _prepare(program: ExportedProgram) -> ExportedProgram:
    """Return a program that returns None where it returned a str, which ExecuTorch cannot write."""
    copied = graphs.copy_program(program)
    output = copied.graph.output_node()
    returned: Any = output.args[0]
    output.args = (tuple(None if isinstance(item, str) else item for item in returned),)
    return copied
