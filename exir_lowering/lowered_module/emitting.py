"""Make a module from lowered programs: its file is emitted in memory when it is first needed."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import replace
from typing import Any

from executorch.exir import ExecutorchBackendConfig
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering.errors import BackendUnavailableWarning
from exir_lowering.lowered_module.convention import of_program
from exir_lowering.lowered_module.module import Delegates, LoweredModule
from exir_lowering.lowered_module.originals import OriginalRunner
from exir_lowering.lowered_module.record import Record
from exir_lowering.lowered_module.runners import DelegateRunner, Engine
from exir_lowering.lowered_module.source import File, Source, read_source
from exir_lowering.plugins import availability
from exir_lowering.pte.temporary import TemporaryFolder
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
    # The module has the constant methods as attributes, and needs no Edge programs.
    kept = Lowered(
        programs, lowered.report, {}, {}, lowered.accelerate, in_place=lowered.in_place, unchanged=lowered.unchanged
    )
    file = File(lambda: emit_source(kept, options))
    if isinstance(delegates, str) and delegates == ORIGINAL:
        return LoweredModule(file, original, contents, original)
    runner = DelegateRunner(file.source, delegates, engine=engine)
    if runner.missing:
        reasons = " ".join(runner.missing.values())
        warnings.warn(
            f"{reasons} The module is made; {availability.POSSIBLE}.",
            BackendUnavailableWarning,
            stacklevel=stacklevel + 1,
        )
    return LoweredModule(file, runner, contents, original)


def emit_source(lowered: Lowered, options: EmitOptions) -> Source:
    """Emit programs in memory; data files go to a folder that is removed together with the result.

    Raise InputError if the programs cannot be emitted.
    """
    prepared = {name: _prepare(program) for name, program in lowered.programs.items()}
    artifact = emit(replace(lowered, programs=prepared), options)
    content = artifact.buffer
    files = artifact.data_files
    debug = artifact.methods
    if not files:
        return read_source(memoryview(content), content, (), lambda: debug)
    temporary = TemporaryFolder()
    folder = temporary.path
    for name, data in files.items():
        (folder / name).write_bytes(data)
    source = read_source(memoryview(content), content, [folder / name for name in files], lambda: debug)
    weakref.finalize(source, temporary.remove)
    return source


def _prepare(program: ExportedProgram) -> ExportedProgram:
    """Return a program that returns None where it returned a str, which ExecuTorch cannot write."""
    copied = graphs.copy_program(program)
    output = copied.graph.output_node()
    output.args = (_drop_strs(output.args[0]),)
    return copied


def _drop_strs(returned: Any) -> Any:
    return tuple(None if isinstance(item, str) else item for item in returned)
