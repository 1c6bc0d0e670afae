"""Make a module from lowered programs: its file is emitted in memory when it is first needed."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache, partial
from typing import Any

from executorch.exir import ExecutorchBackendConfig
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering.errors import BackendUnavailableWarning
from exir_lowering.lowered_module.convention import of_program
from exir_lowering.lowered_module.module import Delegates, LoweredModule
from exir_lowering.lowered_module.original_graphs import OriginalRunner
from exir_lowering.lowered_module.record import Record
from exir_lowering.lowered_module.runners import Engine, open_available
from exir_lowering.lowered_module.source import Source
from exir_lowering.plugins import availability
from exir_lowering.pte.assembling import RESERVED
from exir_lowering.pte.temporary import TemporaryFolder
from exir_lowering.runtime.program import read_file
from exir_lowering.steps import shared_state
from exir_lowering.steps.emit import EmitOptions, Lowered, emit

ORIGINAL = "original"


def of_lowered(
    lowered: Lowered, options: EmitOptions, delegates: Delegates | str | None, engine: Engine, *, stacklevel: int
) -> LoweredModule:
    """Make a module from lowered programs; see `LoweredMethods.module`."""
    programs = lowered.programs
    conventions = {name: of_program(name, program) for name, program in programs.items()}
    contents = Record(conventions, {}, {}, {})
    planning = getattr(options.config or ExecutorchBackendConfig(), "memory_planning_pass", None)  # emit checks it
    states = shared_state.choose(lowered.report.states, options.share_state, planning)
    shared_state.check(programs, states)
    original = OriginalRunner(programs, states)
    # Without the Edge programs, which it does not need.
    kept = Lowered(
        programs,
        lowered.report,
        {},
        lowered.constant_methods,
        lowered.accelerate,
        lowered.in_place,
        lowered.unchanged,
        lowered.made_by,
        memory_planner=lowered.memory_planner,
        require_memory=lowered.require_memory,
    )
    source = cache(partial(emit_source, kept, options))
    if isinstance(delegates, str) and delegates == ORIGINAL:
        return LoweredModule(source, original, contents, original)
    runner = open_available(source(), delegates, engine)
    if runner.missing:
        reasons = " ".join(runner.missing.values())
        warnings.warn(
            f"{reasons} The module was made; {availability.POSSIBLE}.",
            BackendUnavailableWarning,
            stacklevel=stacklevel + 1,
        )
    return LoweredModule(source, runner, contents, original)


def emit_source(lowered: Lowered, options: EmitOptions) -> Source:
    """Emit programs in memory, with data files in a folder that goes with the result; InputError if it fails."""
    prepared = {name: _prepare(program) for name, program in lowered.programs.items()}
    artifact = emit(replace(lowered, programs=prepared), replace(options, reserved=RESERVED))
    files = artifact.data_files
    folder = TemporaryFolder() if files else None
    data = [folder.path / name for name in files] if folder is not None else []
    for path, content in zip(data, files.values(), strict=True):
        path.write_bytes(content)
    debug = artifact.methods
    return Source(read_file(artifact.buffer, data or None, None, verify=False), tuple(data), lambda: debug, folder)


def _prepare(program: ExportedProgram) -> ExportedProgram:
    """Return a program that returns None where it returned a str, which ExecuTorch cannot write."""
    copied = graphs.copy_program(program)
    output = copied.graph.output_node()
    output.args = (_drop_strs(output.args[0]),)
    return copied


def _drop_strs(returned: Any) -> Any:
    return tuple(None if isinstance(item, str) else item for item in returned)
