"""Run a file and its programs with the same inputs, call by call, and compare what they return.

Methods that share state are called in turn, in the order of the programs. Each generated case of a file with state
starts from the initial state, and calls every method three times; so does the first case of any file, as a delegate may
keep something from call to call. Nothing of the caller's changes: not the programs, not torch's random numbers.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.export import ExportedProgram
from torch.fx import Interpreter, Node

from exir_lowering._upstream.ambient import neutral
from exir_lowering._upstream.installed import load_libraries
from exir_lowering.errors import BackendUnavailableError, InputError, LoweringError
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.pte import files
from exir_lowering.pte.manifest import METHOD
from exir_lowering.runtime import LoadedProgram
from exir_lowering.runtime.program import check_arguments, open_file
from exir_lowering.runtime.source import ProgramFile, read_file
from exir_lowering.verification import measure
from exir_lowering.verification.cases import SEED, Call, Case, Generated
from exir_lowering.verification.eager import Eager, find_sharing, list_apart
from exir_lowering.verification.measure import Difference, Tolerance, check_share
from exir_lowering.verification.results import MethodResult, OutputResult, Verification
from exir_lowering.verification.subjects import Subject, match, read_bundled, read_inputs

if TYPE_CHECKING:
    from exir_lowering.steps.emit import Artifact

_CALLS = 3  # how often a method is called in a case, where a call may depend on those before

_SMALL = 1e-2
"""The share of an output's magnitude in its first call that it is taken to have at least, if its inputs are numbers."""

_NOISES = 2  # how often the inputs, and what is computed of them, are rounded to find out what that causes


def verify(
    source: Artifact | str | os.PathLike[str] | bytes,
    programs: ExportedProgram | Mapping[str, ExportedProgram],
    inputs: Sequence[Any] | Mapping[str, Sequence[Any]] | Literal["bundled"] | None = None,
    *,
    data: files.Given = None,
    delegates: Mapping[str, Delegate | type[Delegate]] | Sequence[Delegate | type[Delegate]] | None = None,
    libraries: Sequence[str | os.PathLike[str]] = (),
    tolerance: float | None = None,
) -> Verification:
    """Compare what a file computes with what its programs compute in eager PyTorch.

    Without inputs, they are generated: random numbers, and values that expose what random numbers do not (constants,
    ramps, ties, zeros, large ones, the ends of a vocabulary, of dtypes and of dynamic sizes). Inputs that PyTorch
    refuses are left out. State is compared through what later calls return.

    Args:
        source: What `emit` returned, or the path of a `.pte` file, or its content.
        programs: The programs that were lowered, by method; a single one is the method "forward". One that is named
            like a family is compared with each method of the family that can run here.
        inputs: Calls to compare instead: a sequence of tuples of arguments, nested as at export, or of (args, kwargs);
            for several methods a mapping from their names to such sequences. "bundled" for those in the file, which
            `LoweredModule.save` puts there.
        data: The `.ptd` data files of a path or content, as for `load`.
        delegates: Delegates, as for `load`.
        libraries: C++ libraries, as for `load`.
        tolerance: The largest error of floating-point numbers, as a share of the largest magnitude in an output; by
            default it depends on dtypes, and is looser for quantised programs.

    Returns:
        What was found: `ok`, the errors of each output, and `print` shows it.

    Raises:
        InputError: An argument is invalid, a program is not that of its method, or PyTorch refused all inputs of one.
        BackendUnavailableError, BackendFailure, LimitError, PluginLoadError: The file cannot be loaded; see `load`.
    """
    check_share("verify", tolerance)
    given = check_arguments(delegates, "error")
    load_libraries("verify", libraries)
    file = read(source, data)
    load = partial(open_file, file, given)
    subjects = match(programs, file, (opened := load()).runnable)
    bundled = isinstance(inputs, str) and inputs == "bundled"
    calls = None if inputs is None else read_bundled(subjects, file) if bundled else read_inputs(subjects, inputs)
    with torch.random.fork_rng(devices=()):
        comparison = Comparison(file, subjects, load, tolerance, opened=opened)
        comparison.run(calls)
        find_kernels(comparison, LoweringOptions())
    return conclude(comparison, generated=inputs is None, complete=True)


def find_kernels(comparison: Comparison, options: LoweringOptions) -> None:
    """Note the first operator of each method that is off which is wrong by itself on the host."""
    programs = {name: subject.program for name, subject in comparison.subjects.items()}
    for name, tally in comparison.tallies.items():
        calls, kernels, found = tally.replay or tally.failed, tally.subject.spec.operators, list[str]()
        if calls and kernels:
            from exir_lowering.verification.kernels import Trials  # with the compiler

            eager = Eager(programs, find_sharing(comparison.file))
            for call in calls[:-1]:
                eager.run(call.method, call.inputs)
            eager.run(name, calls[-1].inputs, partial(Trials, found, kernels, options, _is_wrong))
            tally.kernel = "".join(found)


def _is_wrong(program: ExportedProgram, file: ProgramFile, inputs: list[Any]) -> bool:
    comparison = Comparison(file, match(program, file), partial(open_file, file, {}), None)
    comparison.run({"forward": [inputs]})
    return comparison.is_off


def conclude(comparison: Comparison, *, generated: bool, complete: bool) -> Verification:
    """Return what a comparison found; it may have ended, incomplete, before it got to all methods."""
    file, tallies = comparison.file, comparison.tallies
    methods = {name: tally.result() for name, tally in tallies.items() if tally.calls or complete}
    rest = tuple(name for name in file.methods if name not in tallies and not (file.manifest and name == METHOD))
    return Verification(file.name, SEED if generated else None, MappingProxyType(methods), rest, comparison.apart)


def read(source: object, data: files.Given) -> ProgramFile:
    """Read the file that was given."""
    if files.is_file(source):
        return read_file(source, data, True)
    from exir_lowering.steps.emit import Artifact  # with the compiler, which takes a second, and files do not need

    if not isinstance(source, Artifact):
        kind, hint = type(source).__name__, " Pass its .emit()." if hasattr(source, "emit") else ""
        raise InputError(f"verify: got a {kind}, expected an Artifact, or the path or content of a .pte file.{hint}")
    if data is not None:
        raise InputError("verify: data: an artifact includes its data files; do not give any.")
    return read_file(source.buffer, list(source.data_files.values()) or None, True)


@dataclass(slots=True, eq=False)
class _Tally:
    """What is known of a method so far."""

    subject: Subject
    tolerance: Tolerance
    stateful: bool = False
    worst: dict[int, tuple[Difference, str, int, Any]] = field(default_factory=dict)  # by output: case, call, expected
    typical: dict[int, float] = field(default_factory=dict)  # the magnitude of each output in the first call
    off: dict[int, dict[str, None]] = field(default_factory=dict)
    cases: dict[str, None] = field(default_factory=dict)
    calls: int = 0
    skipped: int = 0
    reason: str = ""
    problem: str = ""
    kernel: str = ""
    furthest: float = 1.0  # the score of the call that is the furthest off
    replay: tuple[Call, ...] = ()  # that call, behind those before it in its case
    failed: tuple[Call, ...] = ()  # the same for the first call in which the file failed

    def add(self, index: int, case: Case, call: int, expected: Any, found: Difference) -> None:
        """Note how far an output is off in a call."""
        if found.score > 1:
            self.off.setdefault(index, {}).setdefault(case.name)
        known = self.worst.get(index)
        if known is None or (found.score, found.largest) > (known[0].score, known[0].largest):
            self.worst[index] = (found, case.name, call + 1, expected)

    def result(self) -> MethodResult:
        """Return what was found; InputError if nothing was compared."""
        name = self.subject.name
        if not self.calls:
            refused = f"PyTorch refused each of {self.skipped} calls, the first because of: {self.reason}"
            raise InputError(
                f"verify: nothing of method {name!r} was compared: {refused if self.skipped else 'it has no calls'}. "
                f"Give inputs that the program takes: inputs={{{name!r}: [(...)]}}."
            )
        outputs = tuple(self._output(index) for index in sorted(self.worst))
        counts = tuple(self.cases), self.calls, self.skipped, self.reason if self.skipped else ""
        kinds = self.subject.quantized, self.stateful
        return MethodResult(name, outputs, *counts, *kinds, self.problem, self.kernel)

    def _output(self, index: int) -> OutputResult:
        found, case, call, expected = self.worst[index]
        is_tensor = isinstance(expected, torch.Tensor)
        dtype = str(expected.dtype).removeprefix("torch.") if is_tensor else type(expected).__name__
        names = self.subject.program.graph_signature.user_outputs
        own = index - (len(self.worst) - len(names))  # first come the new values of inputs that it writes
        name = str(names[own]) if own >= 0 else "the new value of an input"
        tolerance = self.tolerance.describe(expected.dtype if is_tensor else torch.float32)
        off = tuple(self.off.get(index, ()))
        return OutputResult(
            *(index, name, dtype, not off, tolerance),
            *(found.largest, found.allowed, found.sqnr, found.cosine),
            *(case, call, found.problem, off),
        )


class Comparison:
    """A file and its programs, which are called together."""

    def __init__(
        self,
        file: ProgramFile,
        subjects: Mapping[str, Subject],
        load: Callable[[], LoadedProgram],
        share: float | None,
        *,
        strict: bool = False,
        opened: LoadedProgram | None = None,
    ) -> None:
        """Open the file; where it fails in a call, the error is noted, and raised if this is strict."""
        self.file, self.subjects, self._load, self._strict = file, subjects, load, strict
        self.program = opened or load()
        programs, sharing = {name: one.program for name, one in subjects.items()}, find_sharing(file)
        self.eager, self.apart = Eager(programs, sharing), list_apart(programs, sharing)
        self._fresh = True
        self._history: list[Call] = []  # those of this case so far
        self.tallies = {
            name: _Tally(subject, Tolerance(share, subject.quantized, subject.coarsest))
            for name, subject in subjects.items()
        }

    def run(self, given: Mapping[str, list[list[Any]]] | None) -> None:
        """Compare calls that are given, or generated ones."""
        with neutral():  # what is drawn is on the CPU, also where another device is the default
            if given is None:
                self._run_generated()
            else:
                for number, (name, calls) in itertools.product(range(max(map(len, given.values()))), given.items()):
                    if number < len(calls):
                        case = Case(f"input {number}", number, continuous=all(map(_spread, calls[number])))
                        self._call(name, case, 0, [calls[number]])
        for name, tally in self.tallies.items():
            tally.stateful = self.eager.is_stateful(name)

    def measure_as(self, other: Comparison) -> None:
        """Allow the errors that another comparison of these programs allows."""
        for name, tally in self.tallies.items():
            tally.tolerance, tally.typical = other.tallies[name].tolerance, dict(other.tallies[name].typical)

    def repeat(self, calls: Sequence[Call]) -> None:
        """Compare calls of another comparison."""
        with neutral():
            for call in calls:
                self._call(call.method, call.case, call.number, [call.inputs])

    @property
    def is_off(self) -> bool:
        """Whether any output was off in any call so far, or there were too many or too few."""
        return any(tally.off or tally.problem for tally in self.tallies.values())

    def close(self) -> None:
        """Let go of the open file, and of the state of the programs; what was found stays."""
        del self.program, self._load, self.eager

    def _run_generated(self) -> None:
        generated = {name: Generated(subject) for name, subject in self.subjects.items()}
        for number in range(max(len(each.cases) for each in generated.values())):
            names = [name for name, each in generated.items() if number < len(each.cases)]
            self._history = []
            if self.eager.is_stateful() and not self._fresh:
                self.program, self._fresh = self._load(), True
                self.eager.reset()
            for call in range(_CALLS if number == 0 or self.eager.is_stateful() else 1):
                for name in names:
                    case = generated[name].cases[number]
                    self._call(name, case, call, generated[name].make(case, call))

    def _call(self, name: str, case: Case, call: int, choices: Iterable[list[Any]]) -> None:
        """Compare a call, with the first inputs that PyTorch takes."""
        tally, before = self.tallies[name], self.eager.snapshot(name)
        self._fresh = False
        for inputs in choices:
            self.subjects[name].check(self.file.where(name), inputs)
            try:
                expected = self.eager.run(name, inputs)
                break
            except MemoryError:
                raise
            except Exception as error:
                self.eager.restore(name, before)
                text = " ".join(str(error).split()) or type(error).__name__
                tally.reason = tally.reason or (text if len(text) <= 120 else f"{text[:117]}...")
        else:
            tally.skipped += 1
            return
        self._history.append(Call(name, inputs, case, call))
        tally.calls += 1
        tally.cases.setdefault(case.name)
        try:
            got = self.program.run(name, *inputs)
        except LoweringError as error:
            tally.problem = tally.problem or f'in "{case.name}", call {call + 1}: {error}'
            tally.failed = tally.failed or tuple(self._history)
            if self._strict or isinstance(error, BackendUnavailableError):
                raise
            return
        if len(got) != len(expected):
            tally.problem = f"it returns {len(got)} outputs, and the program {len(expected)}"
            return
        self._compare(name, case, call, (inputs, before), expected, got)

    def _compare(
        self, name: str, case: Case, call: int, given: tuple[Any, Any], expected: list[Any], got: list[Any]
    ) -> None:
        tally = self.tallies[name]
        for index, value in enumerate(expected) if not tally.typical else ():
            tally.typical[index] = measure.magnitude(value)

        typical = _SMALL if case.continuous and not tally.subject.quantized else 1.0  # otherwise it can be noise only

        def compare(noise: Sequence[torch.Tensor | None]) -> list[Difference]:
            return [
                measure.measure(one, other, tally.tolerance, tally.typical.get(index, 0.0) * typical, moved)
                for index, (one, other, moved) in enumerate(zip(expected, got, noise, strict=True))
            ]

        found = compare([None] * len(expected))
        if case.continuous and any(each.score > 1 and not each.problem for each in found):
            found = compare(self._noise(name, *given, expected))
        for index, each in enumerate(found):
            tally.add(index, case, call, expected[index], each)
        furthest = max((each.score for each in found), default=0.0)
        if furthest > tally.furthest:
            tally.furthest, tally.replay = furthest, tuple(self._history)

    def _noise(self, name: str, inputs: list[Any], before: Any, expected: list[Any]) -> list[torch.Tensor | None]:
        """Return how far each output moves in PyTorch itself when the inputs are rounded differently."""
        after = self.eager.snapshot(name)
        largest: list[torch.Tensor | None] = [None] * len(expected)
        for number in range(_NOISES):
            self.eager.restore(name, before)
            generator = torch.Generator().manual_seed(number)
            try:
                rounded = [_round(one, generator, 4) for one in inputs]
                outputs = self.eager.run(name, rounded, partial(_Rounding, generator))
            except MemoryError:
                raise
            except Exception:  # at the edge of what the program takes
                continue
            moved = measure.differences(expected, outputs)
            largest = [
                new if old is None or new is None else torch.maximum(old, new)
                for old, new in zip(largest, moved, strict=True)
            ]
        self.eager.restore(name, after)
        return largest


def _spread(value: Any) -> bool:
    """Return whether an input has hardly any number twice, so that ties are not what it is about."""
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return True
    return int(value.flatten().sort().values.diff().count_nonzero()) >= value.numel() // 2


class _Rounding(Interpreter):
    """Rounds what operators compute in another way, where that is memory of its own: what a program writes is not."""

    def __init__(self, generator: torch.Generator, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._generator = generator

    def run_node(self, n: Node) -> Any:
        """Execute a node."""
        result = super().run_node(n)
        if n.op != "call_function" or not isinstance(result, torch.Tensor):
            return result
        read = (self.env.get(one) for one in n.all_input_nodes)
        memory = {one.untyped_storage().data_ptr() for one in read if isinstance(one, torch.Tensor)}
        return result if result.untyped_storage().data_ptr() in memory else _round(result, self._generator, 1)


def _round(value: Any, generator: torch.Generator, steps: int) -> Any:
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return value
    parts = (torch.rand(value.shape, generator=generator, dtype=torch.float64) - 0.5) * torch.finfo(value.dtype).eps
    return (value.double() * (1 + steps * parts)).to(value.dtype)
