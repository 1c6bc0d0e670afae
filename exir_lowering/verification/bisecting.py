"""Find the operator that goes wrong in a backend, by giving it fewer operators and leaving the others on the host.

The search finds the shortest prefix of the delegated operators, in execution order, with which the file as a whole is
wrong: its last operator is the culprit. If that one alone is right, as in a fusion, the operators that it needs are
found in the same way. Each file runs in a separate process, which it may end or damage: a copy of
one that has imported what they need, since that takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import networkx
import torch
from torch.export import ExportedProgram

from exir_lowering.errors import BackendFailure, LimitError, LoweringError
from exir_lowering.lowered import LoweredMethods
from exir_lowering.options import LoweringOptions
from exir_lowering.pipeline import lower_in
from exir_lowering.plans.planned import MethodPlan, PlannedNode
from exir_lowering.plugins.backend import PartitionerLike
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.plugins.worker_errors import WorkerDiedError
from exir_lowering.runtime import Limits, LoadedProgram
from exir_lowering.runtime.engine import missing_kernels
from exir_lowering.runtime.isolated.engine import open_isolated
from exir_lowering.runtime.isolated.process import Process
from exir_lowering.runtime.program import check_arguments, open_file
from exir_lowering.runtime.source import ProgramFile
from exir_lowering.steps import arguments
from exir_lowering.steps.session import Progress, Session
from exir_lowering.steps.shared_state import ShareState
from exir_lowering.verification.cases import Call
from exir_lowering.verification.checking import Comparison, conclude, find_kernels, read
from exir_lowering.verification.results import (
    QUANTIZED,
    Culprit,
    Kind,
    Suspect,
    Verification,
    Where,
    describe_apart,
    problems,
)
from exir_lowering.verification.subjects import match, read_inputs

PATIENCE = 300.0
"""How many seconds a call may take in a separate process; then it hangs."""

_MOST_UNTRIED = 8  # how often a piece may fail to lower or run before the search ends with what it has
_Units = tuple[int, ...]  # units by their numbers: what goes to a backend together, in execution order


def bisect(
    programs: ExportedProgram | Mapping[str, ExportedProgram],
    partitioners: PartitionerLike,
    *,
    inputs: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
    backends: Mapping[str, Any] | None = None,
    delegates: Mapping[str, Delegate | type[Delegate]] | Sequence[Delegate | type[Delegate]] | None = None,
    options: LoweringOptions | None = None,
    share_state: ShareState = "auto",
) -> Culprit:
    """Find the operator that goes wrong in a backend: its result is off, or it fails, hangs or ends the process.

    The programs are lowered and verified. If the file is wrong, they are lowered with fewer operators in backends,
    about log2(operators) + 3 times in all. Of several culprits the first in execution order is found: deny it, and call
    again. An operator that ends the process or hangs is found only if another process can import the delegates.

    Args:
        programs: The programs from `torch.export`, as for `verify`.
        partitioners: As for `lower`.
        inputs: Calls to compare instead of generated ones, as for `verify`.
        backends: As for `lower`.
        delegates: As for `load`.
        options: As for `lower`. `on_backend_error="split"` finds what a backend cannot lower, which is an error here.
        share_state: As for `emit`.

    Returns:
        The operator, with its partition, module and source line; `ok` if nothing is wrong. `print` shows it.

    Raises:
        InputError: An argument is invalid, or PyTorch refused all inputs of a method.
        LoweringError: The programs cannot be lowered or the file cannot be loaded; see `lower` and `load`.
    """
    given = check_arguments(delegates, "error")
    with torch.random.fork_rng(devices=()):
        search = _Search(programs, partitioners, inputs, backends, given, arguments.check_options(options), share_state)
        try:
            return search.run()
        finally:
            if search.starter is not None:
                search.starter.abandon()


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """How a file ran."""

    kind: Kind
    comparison: Comparison | None = None  # None if the file could not be opened
    error: str = ""

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls in which the first method that goes wrong does so."""
        tallies = self.comparison.tallies.values() if self.comparison is not None else ()
        return next((found for tally in tallies if (found := tally.failed or tally.replay)), ())

    @property
    def score(self) -> float:
        """How far its outputs are off at most, as a multiple of what is allowed."""
        tallies = self.comparison.tallies.values() if self.comparison is not None else ()
        return max((found.score for tally in tallies for found, *_ in tally.worst.values()), default=0.0)

    def describe(self) -> str:
        """Say what is wrong."""
        if self.error or self.comparison is None:
            return self.error
        found = conclude(self.comparison, generated=True, complete=False)
        return next((line for method in found.methods.values() for line in problems(method)), "")


@dataclass(slots=True, eq=False)
class _Search:
    """The search for one culprit."""

    programs: Any
    partitioners: PartitionerLike
    inputs: Any
    backends: Mapping[str, Any] | None
    delegates: Mapping[str, Any]
    options: LoweringOptions
    share_state: ShareState
    lowerings: int = 1
    starter: Process | None = None  # of which each separate process is a copy
    isolated: bool = True  # whether each file runs in a separate process, as it may end or damage it
    calls: tuple[Call, ...] | None = None  # with which calls, None for all
    whole: _Outcome = _Outcome("")
    units: list[tuple[Suspect, ...]] = field(default_factory=list)
    tried: dict[_Units, bool | None] = field(default_factory=dict)
    untried: int = 0
    lowered: Any = None  # the whole lowering
    verification: Verification | None = None  # what was found about it
    advance: Callable[[], None] = lambda: None
    smallest: tuple[LoweredMethods, _Outcome] | None = None  # the last one that was wrong

    @property
    def _for_pieces(self) -> LoweringOptions:
        """The options for less than the whole."""
        options = replace(self.options, assume={}, require_coverage=0.0, require_memory=None)
        return replace(options, on_backend_error=None, progress=False)

    def run(self) -> Culprit:
        """Lower everything, and search if it is wrong."""
        self.lowered = lower_in(Session(self.options, self.backends), self.programs, self.partitioners)
        file = read(self.lowered.emit(share_state=self.share_state), None)
        try:
            self.whole = self._execute(file)
        except LoweringError:  # such as delegates that another process cannot have; else it is raised again
            self.isolated = False
            self.whole = self._execute(file)
        comparison, complete = self.whole.comparison, not self.whole.kind
        if comparison is not None:
            generated = self.inputs is None
            self.verification = conclude(comparison, generated=generated, complete=complete)
        if not self.whole.kind and self.verification is not None and self.verification.apart:
            self.whole = replace(self.whole, kind="off", error=" ".join(describe_apart(self.verification)))
            return self._conclude("host")
        if not self.whole.kind:
            return self._conclude("")
        self.units = [unit for method in self.lowered.report.methods for unit in _list_units(method)]
        everything = tuple(range(len(self.units)))
        progress = Progress(self.options.progress)
        with progress:
            self.advance = progress.count("bisect", len(everything).bit_length() + 3)
            return self._search(everything, file)

    def _search(self, everything: _Units, file: ProgramFile) -> Culprit:
        self.smallest, self.tried[everything] = (self.lowered, self.whole), True
        if not self._choose_calls(file):
            return self._conclude("unsteady")
        if not everything or _lacks_kernels(file) or self._is_wrong(()):
            return self._conclude("host")
        found = self._find(everything)
        if self.smallest[0] is self.lowered and self._try(everything) is False:  # only the first lowering is wrong
            return self._conclude("unsteady")
        return self._conclude("backend", found)

    def _choose_calls(self, file: ProgramFile) -> bool:
        """Choose with which calls the error is seen again; False if it is not."""
        for calls in (self.whole.calls, None):
            self.calls = calls
            if self._execute(file).kind == self.whole.kind:
                return True
        return False

    def _find(self, everything: _Units) -> _Units:
        """Return the first unit with which those before it become wrong, after what it needs of them."""
        right, wrong = self._narrow(0, len(everything), lambda count: everything[:count])
        if right == 0 or self._is_wrong(everything[right:wrong]):
            return everything[right:wrong]
        before, size = 0, 1
        while size < right and not self._is_wrong(everything[right - size : wrong]):
            before, size = size, 2 * size
        low, high = self._narrow(before, min(size, right), lambda more: everything[right - more : wrong])
        ends = (*everything[right - high : right - low], *everything[right:wrong])
        return ends if self._is_wrong(ends) else everything[right - high : wrong]

    def _narrow(self, right: int, wrong: int, choose: Callable[[int], _Units]) -> tuple[int, int]:
        """Return the numbers between which what is chosen becomes wrong, except where what is between cannot run."""
        untried: set[int] = set()
        while self.untried <= _MOST_UNTRIED:
            left = [number for number in range(right + 1, wrong) if number not in untried]
            if not left:
                break
            # Beside what cannot be tried there is often more of that: the places are spread.
            middle = left[int(len(left) * ((0.5 + 0.618 * len(untried)) % 1))]
            verdict = self._is_wrong(choose(middle))
            if verdict is None:
                untried.add(middle)
                self.untried += 1
            elif verdict:
                wrong = middle
            else:
                right = middle
        return right, wrong

    def _is_wrong(self, chosen: _Units) -> bool | None:
        """Return whether it goes wrong with only some units in backends; None if that cannot be tried."""
        if chosen not in self.tried:
            self.tried[chosen] = self._try(chosen)
        return self.tried[chosen]

    def _try(self, chosen: _Units) -> bool | None:
        kept = {(one.method, one.backend_id, one.node.name) for unit in chosen for one in self.units[unit]}
        known = {(method.name, node.name) for method in self.lowered.report.methods for node in method.nodes}
        # The programs are rewritten already, and pieces may be fewer and in more parts than the whole has to be.
        session = Session(replace(self._for_pieces, rewrites="none"), self.backends)

        def leave_out(method: str, backend_id: str, node: str) -> str | None:  # not a getitem, which is not known
            left = (method, node) in known and (method, backend_id, node) not in kept
            return "bisect leaves it out" if left else None

        self.lowerings += 1
        self.advance()
        try:
            edge = self.lowered.edge_programs
            lowered = lower_in(session, edge, self.partitioners, treatment=leave_out)
            lowered = replace(lowered, in_place=self.lowered.in_place)  # as the rewrites had it
            file = read(lowered.emit(share_state=self.share_state), None)
            if _lacks_kernels(file):  # for what is left out: that it fails says nothing of the rest
                return None
            outcome = self._execute(file)
        except LoweringError:  # a backend does not take a piece
            return None
        # What is half as wrong without any backend is not an operator's in one, though it is allowed alone.
        most = not chosen and self.whole.kind == "off" and outcome.score > self.whole.score / 2
        if outcome.kind == self.whole.kind or most:
            self.smallest = lowered, outcome
            return True
        return False if outcome.kind in ("", "off") else None

    def _execute(self, file: ProgramFile) -> _Outcome:
        """Run a file and compare; an error of ours is raised if it says nothing of the file."""
        subjects = match(self.programs, file)
        given = None if self.inputs is None else read_inputs(subjects, self.inputs)
        comparison, process = None, None

        def load() -> LoadedProgram:
            nonlocal process
            if not self.isolated:
                return open_file(file, self.delegates)
            if process is None:
                process = open_isolated(file, self.delegates, "error", Limits(seconds=PATIENCE), self._begin)
            else:
                process.restart()
            return LoadedProgram(file, process)

        try:
            comparison = Comparison(file, subjects, load, None, strict=True)
            if self.whole.comparison is not None:
                comparison.measure_as(self.whole.comparison)
            if self.calls is None:
                comparison.run(given)
            else:
                comparison.repeat(self.calls)
        except LoweringError as error:
            kind = _kind_of(error, comparison)
            if kind is None:
                raise
            return _Outcome(kind, comparison, str(error))
        finally:
            if comparison is not None:
                comparison.close()  # what was found is kept, and a process with the file is not
        return _Outcome("off" if comparison.is_off else "", comparison)

    def _begin(self, modules: Sequence[str]) -> Process:
        """Return a process for one file."""
        self.starter = self.starter or Process(modules)  # for the first file, which needs the most
        return Process(forked_from=self.starter)

    def _conclude(self, where: Where, found: _Units = ()) -> Culprit:
        _, outcome = self.smallest or (None, self.whole)
        error, kernels = outcome.describe() or self.whole.describe(), ""
        if where == "host" and outcome.comparison is not None and outcome.kind in ("off", "fails"):
            find_kernels(outcome.comparison, self._for_pieces)
            kernels = "".join(f" {tally.kernel}." for tally in outcome.comparison.tallies.values() if tally.kernel)
        suspects = [suspect for unit in reversed(found) for suspect in self.units[unit]]
        suspects.sort(key=lambda suspect: suspect.node.operator.startswith(QUANTIZED))
        return Culprit(self.whole.kind, where, tuple(suspects), error + kernels, self.lowerings, self.verification)


def _kind_of(error: LoweringError, comparison: Comparison | None) -> Kind | None:
    """Return how a file went wrong that could not be opened or run; None if the error is about something else."""
    if isinstance(error, LimitError):
        return "hangs"
    if isinstance(error.__cause__, WorkerDiedError):
        return "crashes"
    failed = comparison is not None and any(tally.failed for tally in comparison.tallies.values())
    return "fails" if failed or isinstance(error, BackendFailure) else None


def _lacks_kernels(file: ProgramFile) -> bool:
    return any(map(missing_kernels, file.methods.values()))


def _list_units(method: MethodPlan) -> list[tuple[Suspect, ...]]:
    """Return the delegated operators in execution order, each with what quantises and dequantises for it."""
    backend_ids = {partition.id: partition.backend_id for partition in method.partitions}
    nodes = {node.name: node for node in method.nodes if node.partition is not None}
    places = {name: place for place, name in enumerate(nodes)}
    together = networkx.Graph(_ties(nodes))
    together.add_nodes_from(nodes)
    groups = sorted(sorted(group, key=places.__getitem__) for group in networkx.connected_components(together))
    groups.sort(key=lambda group: places[group[-1]])
    return [
        tuple(Suspect(method.name, backend_ids[str(nodes[name].partition)], nodes[name]) for name in group)
        for group in groups
    ]


def _ties(nodes: Mapping[str, PlannedNode]) -> Iterator[tuple[str, str]]:
    """Yield operators that stay together: backends take a quantised one with what is around it."""

    def sources(node: PlannedNode) -> Iterator[PlannedNode]:
        return (nodes[name] for name in node.inputs if name in nodes and nodes[name].partition == node.partition)

    for node in nodes.values():
        dequantizes = node.operator.startswith(f"{QUANTIZED}dequantize")
        for source in sources(node):
            # Where the scale is no result, one quantised operator ends at a quantize, and the next begins.
            ends = _quantizes(source) and dequantizes
            if not ends and any(operator.startswith(QUANTIZED) for operator in (source.operator, node.operator)):
                yield source.name, node.name
            for fused in sources(source) if _quantizes(node) else ():  # what an activation is fused with
                yield fused.name, source.name


def _quantizes(node: PlannedNode) -> bool:
    return node.operator.startswith(f"{QUANTIZED}quantize") and node.operator.endswith(".default")
