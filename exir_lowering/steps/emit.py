"""Step emit: from lowered programs to one `.pte` file and its data files.

What is done stands in three tables, around one call of ExecuTorch's emitter: a name, a function of the `File`, and why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from exir_lowering._upstream import compiler, emission, locks
from exir_lowering._upstream.delegates import add_last_named_data, forgetting_delegates
from exir_lowering._upstream.edge import EdgeProgramManager, without_validity_checks
from exir_lowering._upstream.passes import mending_passes
from exir_lowering.errors import InputError, InvariantError, exception_text, explained
from exir_lowering.fast import accelerated
from exir_lowering.graphs import collector
from exir_lowering.model import EdgeMethod, ExtractedMethod
from exir_lowering.options import LoweringOptions, read_size
from exir_lowering.plans.lowering_plan import LoweringPlan
from exir_lowering.plans.planned import PlannedMemory
from exir_lowering.plans.report import Report
from exir_lowering.pte import digests, saving
from exir_lowering.pte.debug_info import SUFFIX, VERSION, DebugInfo, MethodDebug
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.steps import finishing, placement, sealing, shared_state
from exir_lowering.steps.conversion_context import converting
from exir_lowering.steps.file import EmitOptions, File, Lowered
from exir_lowering.steps.planned_sizes import bound_together


class Row(NamedTuple):
    """A part of emission."""

    name: str
    run: Callable[[File], None]
    reason: str


CHECKS = (
    Row("constant methods", finishing.check_options, "a method is a program or a constant, not both"),
    Row("state", shared_state.choose, "what is shared is decided for all methods of a file"),
    Row("shareable", shared_state.check, "a delegate cannot share what it keeps"),
    Row("inputs", finishing.check_methods, "the runtime takes inputs, and calls graphs, in few forms"),
)

FINISHERS = (
    Row("private copies", finishing.copy_programs, "emission rewrites graphs, and may be asked for again"),
    Row("plain operators", finishing.choose_operators, "passes of emission make operators whose kernels are wrong"),
    Row("sizes", finishing.bound_sizes, "ExecuTorch bounds inputs by the example, but not what is computed of them"),
    Row("tree specs", finishing.describe_plainly, "a file has no classes of the model's"),
    Row("first values", finishing.keep_first_values, "ExecuTorch drops what state starts with, unless it is marked"),
    Row("copies", finishing.copy_where_misread, "kernels read memory as contiguous; before writes, as these copy too"),
    Row("write back", finishing.write_state, "all state is read before any is written; after all other computing"),
    Row("originals", finishing.attach_originals, "they bring weights: before weights are placed"),
    Row("quantised kernels", finishing.import_kernels, "an operator is emitted only if its out variant is there"),
    Row("weights", placement.place_weights, "a policy says which file has which weight"),
    Row("shared state", shared_state.share, "methods share memory by its number; before memory is planned"),
    Row("out variants", finishing.choose_out_variants, "what only the emitter takes is made when nothing traces it"),
    Row("sizes together", bound_together, "they are fewer than each alone says; before memory is planned for them"),
    Row("memory", finishing.record_memory, "plans and limits need what was planned; wraps the planner"),
    Row("reserved data", finishing.reserve, "emission fixes where segments are: what is known later has the last ones"),
)

SEALERS = (
    Row("memory bound", sealing.bound_memory, "what is too large for its runtime is refused first"),
    Row("sizes of the file", sealing.report_narrowed, "passes of the emission may decide by a size, which bounds it"),
    Row("numbers", sealing.check_numbers, "originals are found by the number of a delegate, which passes may change"),
    Row("ETRecord", sealing.make_etrecord, "ExecuTorch's Inspector reads it; it needs the emitter's tables"),
    Row("one weight", sealing.share_weights, "a weight of delegates and the host is there once; this moves segments"),
    Row("provenance", sealing.write_provenance, "it names values, and counts results, as the emitter numbered them"),
    Row("debug records", sealing.record_debug, "profiles and errors find lines by the numbers of instructions"),
)

DIGESTS = Row("digests", sealing.write_digests, "they cover all else; outside the lock, as every byte is read")
"""The last sealer."""


@dataclass(frozen=True, slots=True, eq=False)
class Artifact:
    """A file that ExecuTorch's runtime loads.

    Attributes:
        manager: ExecuTorch's manager of the emitted program.
        report: The report of the lowering, with the memory that is planned for each method.
        methods: What the debug handles of each method stand for.
        etrecord: ExecuTorch's `ETRecord` for its Inspector; None unless `emit` was asked for it.
    """

    manager: compiler.ExecutorchProgramManager
    report: Report
    methods: Mapping[str, MethodDebug] = field(default_factory=dict)
    etrecord: Any = None

    @property
    def buffer(self) -> bytes:
        """The `.pte` file in memory, made again at each access; `save` does not need it."""
        return bytes(emission.pte_contents(self.manager))

    @property
    def data_files(self) -> dict[str, bytes]:
        """The `.ptd` data files by name, made again at each access; empty if all data is in the `.pte` file."""
        return {name: bytes(cord) for name, cord in sealing.data_contents(self.manager).items()}

    @property
    def debug_info(self) -> DebugInfo:
        """What the debug handles in the file stand for, with what identifies the file."""
        last = emission.cord_pieces(emission.pte_contents(self.manager))[-1]
        return DebugInfo(VERSION, digests.identity(bytes(last)), self.methods)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the `.pte` file, with its data files and debug information next to it, piece by piece.

        The debug information of `model.pte` is `model.debug.json`; the record for ExecuTorch's Inspector, if there is
        one, `model.etrecord`.

        All files are complete before the first one is moved to its final name, and the `.pte` file is the last. After
        an interruption, the files are those of the old program or of the new one, or an old program with a new data
        file of the same name, which `load` refuses.

        Args:
            path: Where the `.pte` file goes. An existing file is replaced once the new one is complete.
                If it is a link, the link stays, and the file that it points to is replaced.

        Returns:
            The path.

        Raises:
            InputError: The path does not end in `.pte`, or cannot be written.
        """
        target = saving.pte_path(path)
        data = sealing.data_contents(self.manager)
        files = {target.parent / name: cord.write_to_file for name, cord in data.items()}
        files[target] = self.manager.write_to_file
        if self.etrecord is not None:
            files[target.with_suffix(".etrecord")] = partial(_write_record, self.etrecord)
        try:
            if self.methods:
                debug = self.debug_info.to_json().encode()
                files[target.with_suffix(SUFFIX)] = lambda file: file.write(debug)
            saving.replace_files(files, target)
        except OSError as error:
            raise InputError(f"Cannot save to {str(target)!r}: {error}") from error
        return target

    def __repr__(self) -> str:
        return f"Artifact({', '.join(sorted(self.manager.methods))})"


def _write_record(record: Any, file: BinaryIO) -> None:
    what = "etrecord: ExecuTorch's ETRecord cannot be saved"
    with explained(lambda error: InputError(f"{what}: {exception_text(error)}"), OSError), locks.conversion():
        record.save(file)


def emit(lowered: Lowered, options: EmitOptions) -> Artifact:
    """Emit lowered programs, which are not changed."""
    file = File(lowered, options, lowered.report)
    _make(file, SEALERS)
    _seal(file, [DIGESTS])  # it reads all that was emitted, while other threads convert
    return Artifact(file.manager, file.report, file.debug, file.etrecord)


def plan_memory(
    methods: Sequence[EdgeMethod], extracted: Sequence[ExtractedMethod], planned: LoweringPlan, options: LoweringOptions
) -> LoweringPlan:
    """Return a plan with the memory that `emit()` will plan: checked now if there is a limit, else when it is asked."""
    lowered = Lowered(
        {method.name: method.program for method in extracted},
        Report(planned.methods, {}, {}, states=planned.states),
        fast=options.fast,
        in_place=any(method.rewrites for method in methods),
        memory_planner=options.memory_planner,
        require_memory=read_size(options.require_memory),
    )

    def find() -> dict[str, PlannedMemory]:
        """Emit copies, without payloads, for what is planned on the way."""
        file = File(lowered, EmitOptions(provenance=False), lowered.report)
        try:
            _make(file, [Row("memory", partial(sealing.bound_memory, device=True), "a plan has all figures")])
        except InputError:  # without a configuration, they cannot be emitted
            if options.require_memory is not None:
                raise
        return {method.name: method.memory for method in file.report.methods if method.memory is not None}

    if options.require_memory is None:
        return sealing.with_memory(planned, find)
    known = find()
    return sealing.with_memory(planned, lambda: known)


def _make(file: File, sealers: Sequence[Row]) -> None:
    """Run the tables around ExecuTorch's passes, memory planning and emitter."""
    lowered, fast = file.lowered, file.lowered.fast
    # Without gradients: ExecuTorch executes the writes into buffers, which autograd refuses for values that need one.
    context = converting(lowered.programs.values(), gradients=False, fast=fast)
    with context, mending_passes(numbers=False), collector.heap_frozen(), accelerated(fast):
        for row in (*CHECKS, *FINISHERS):
            row.run(file)
        emitted_from = [*lowered.programs.values(), *file.programs.values()]
        who = f"Methods {', '.join(map(repr, lowered.programs))}"
        failing = explained(lambda error: InputError(f"{who} could not be emitted: {exception_text(error)}"))
        with failing, forgetting_delegates(emitted_from), accelerated(fast, "emit"):
            edge = EdgeProgramManager(file.programs, file.constant_methods, without_validity_checks())
            for key, content in file.reserved.items():
                add_last_named_data(edge, key, content)
            with emission.adding_to_data_files(sealing.data_segments), emission.emitting() as emitted:
                file.manager = edge.to_executorch(file.config)
        file.calls, file.values = emitted.methods, emitted.values
        _seal(file, sealers)


def _seal(file: File, sealers: Sequence[Row]) -> None:
    for row in sealers:
        try:
            row.run(file)
        except CorruptError as error:
            raise InvariantError(f"The emitted file cannot be completed, in {row.name!r}: {error}.") from error
