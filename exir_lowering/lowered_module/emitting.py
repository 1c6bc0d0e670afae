"""Modules in the process that lowered them: their file is emitted in memory when it is first needed.

Only this process has the original graphs too, by which methods can be executed instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from executorch.exir import ExecutorchBackendConfig
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering._upstream import locks
from exir_lowering._upstream.ambient import neutral
from exir_lowering._upstream.delegates import with_original
from exir_lowering._upstream.programs import DelegatedProgram, pytree
from exir_lowering.errors import BackendUnavailableWarning, InputError
from exir_lowering.graphs.copies import same_kind
from exir_lowering.lowered_module.convention import Convention, of_program
from exir_lowering.lowered_module.module import Delegates, LoweredModule
from exir_lowering.lowered_module.record import Record
from exir_lowering.lowered_module.runners import Source, open_available
from exir_lowering.model import State
from exir_lowering.plugins import availability
from exir_lowering.pte.assembling import RESERVED
from exir_lowering.pte.saving import TemporaryFolder
from exir_lowering.runtime.inputs import show
from exir_lowering.runtime.program import read_file
from exir_lowering.steps import shared_state
from exir_lowering.steps.conversion_context import converting
from exir_lowering.steps.emit import emit
from exir_lowering.steps.file import EmitOptions, Lowered
from exir_lowering.steps.write_back import separate

ORIGINAL = "original"


def of_lowered(
    lowered: Lowered, options: EmitOptions, delegates: Delegates | str | None, *, stacklevel: int
) -> LoweredModule:
    """Make a module from lowered programs; see `LoweredMethods.module`."""
    programs = lowered.programs
    conventions = {name: of_program(name, program) for name, program in programs.items()}
    contents = Record(conventions, {}, {}, {})
    planning = getattr(options.config or ExecutorchBackendConfig(), "memory_planning_pass", None)  # emit checks it
    states = shared_state.choose(lowered.report.states, options.share_state, planning)
    shared_state.check(programs, states)
    original = OriginalRunner(programs, states)
    kept = replace(lowered, edge_programs={})  # which it does not need
    source = cache(partial(emit_source, kept, options))
    if isinstance(delegates, str) and delegates == ORIGINAL:
        return LoweredModule(source, original, contents, original)
    runner = open_available(source(), delegates)
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
    returned: Any = output.args[0]
    output.args = (tuple(None if isinstance(item, str) else item for item in returned),)
    return copied


class OriginalRunner:
    """Executes programs in PyTorch, each partition by its original graph."""

    def __init__(self, programs: Mapping[str, ExportedProgram], states: Sequence[State]) -> None:
        self._programs, self._states = programs, states
        self._separate: Mapping[str, ExportedProgram] | None = None
        self._modules: dict[str, Any] = {}

    def run(self, convention: Convention, leaves: Sequence[Any]) -> list[Any]:
        """Execute a method; InputError if the graph rejects an argument."""
        name = convention.method
        if name not in self._modules:
            with locks.conversion(), converting([self._programs[name]], gradients=False):
                if self._separate is None:
                    self._separate = with_own_state(self._programs, self._states)
                self._modules[name] = self._separate[name].module()
        given = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for index in convention.written:
            if isinstance(given[index], torch.Tensor):
                given[index] = given[index].clone()
        args, kwargs = convention.arguments(given)
        try:
            with neutral():
                returned = self._modules[name](*args, **kwargs)
        except MemoryError:
            raise
        except Exception as error:
            shown = ", ".join(f"{label}: {show(leaf)}" for label, leaf in zip(convention.labels, given, strict=True))
            raise InputError(
                f"{name}(): the original graphs do not take these arguments ({shown or 'none'}): "
                f"{type(error).__name__}: {error}"
            ) from error
        outputs = [given[index] for index in convention.written] + pytree.tree_leaves(returned)
        return [output.clone() if isinstance(output, torch.Tensor) else output for output in outputs]

    def fresh(self) -> OriginalRunner:
        """Return another runner, whose methods are in their initial state."""
        return OriginalRunner(self._programs, self._states)

    def describe(self, name: str) -> str:
        """Describe what executes a method."""
        return "the original graphs, in PyTorch"


def with_own_state(programs: Mapping[str, ExportedProgram], states: Sequence[State]) -> Mapping[str, ExportedProgram]:
    """Return lowered programs that write into buffers of their own, in delegates too; shared states stay shared."""
    copies = {name: _copy_with_own_state(program) for name, program in programs.items()}
    for state in states:
        tables = [
            (table, name)
            for method, name in state.names.items()
            for table in (copies[method].state_dict, copies[method].constants)
            if state.shared and name in table
        ]
        first = [table[name] for table, name in tables[:1]]
        for table, name in tables:
            table[name] = same_kind(first[0], table[name])
    return copies


def _copy_with_own_state(program: ExportedProgram) -> ExportedProgram:
    copied = _with_copied_state(program)
    for _, module, attribute in graphs.delegates(copied.graph_module):
        lowered = getattr(module, attribute)
        original = _with_copied_state(lowered.original_module, DelegatedProgram)
        setattr(module, attribute, with_original(lowered, original))
    return copied


def _with_copied_state(program: ExportedProgram, kind: type[ExportedProgram] = ExportedProgram) -> ExportedProgram:
    copied = graphs.copy_program(program, kind=kind)
    graphs.own_state([copied])
    separate(copied)
    return copied
