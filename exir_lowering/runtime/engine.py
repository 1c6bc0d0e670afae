"""What the engines have in common, which execute the methods of a `LoadedProgram`, and traces of what they ran."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from exir_lowering._upstream import installed, locks
from exir_lowering._upstream.ambient import neutral
from exir_lowering.errors import BackendUnavailableError, InputError, LoweringError, let_through
from exir_lowering.graphs.operators.budget import STEPS
from exir_lowering.plugins.availability import Missing
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.pte import slots
from exir_lowering.pte.flatbuffer import Table, root
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.instructions import DELEGATE, KERNEL
from exir_lowering.runtime.source import ProgramFile

METHOD_EVENT, KERNEL_EVENT, DELEGATE_EVENT = "Method::execute", "OPERATOR_CALL", "DELEGATE_CALL"
"""What ExecuTorch's runtime calls its events."""

EVENTS: Mapping[int, str] = {KERNEL: KERNEL_EVENT, DELEGATE: DELEGATE_EVENT}
"""What it calls those of instructions."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that took time."""

    name: str  # what the runtime calls it, such as "DELEGATE_CALL"
    instruction: int  # the number of the instruction of which it is a part; -1 for none
    identifier: int | str | None  # what a delegate calls it; None for an event of the runtime itself
    nanoseconds: int  # how long it took
    start: int = 0  # when it began, in nanoseconds since an arbitrary point in time


@dataclass(slots=True, eq=False)
class Trace:
    """Records what the interpreter does. It is also a `Recorder` of delegates."""

    events: list[TraceEvent] = field(default_factory=list)
    active: bool = False  # whether a delegate is being executed
    instruction: int = -1  # the one that is being executed

    def now(self) -> int:
        """Return the time in nanoseconds."""
        return time.perf_counter_ns()

    def record(self, identifier: int | str, start: int, end: int) -> None:
        """Record an event of the delegate that is being executed."""
        self.events.append(TraceEvent("", self.instruction, identifier, end - start, start))

    def begin(self, instruction: int, name: str) -> int:
        """Begin an instruction, or with -1 the method, and return the time."""
        self.instruction, self.active = instruction, name == DELEGATE_EVENT
        return self.now()

    def end(self, instruction: int, name: str, start: int) -> None:
        """Record an instruction that has ended."""
        took = self.now() - start
        self.active = False
        self.events.append(TraceEvent(name, instruction, None, took, start))


_Field = slots.ProfileEvent


def read_etdump(content: bytes) -> list[TraceEvent]:
    """Return the events of all executions that an ETDump has, in order, without those of loading."""
    # ExecuTorch's own reader starts flatc, and keeps one of several events of a run that have the same identifier.
    events: list[TraceEvent] = []
    for run in root(memoryview(content)[4:]).tables(slots.ETDump.RUN_DATA):  # after its size
        if run.text(slots.RunData.NAME) == "Execute":
            events += _events(run)
    return events


def _events(run: Table) -> Iterator[TraceEvent]:
    for entry in run.tables(slots.RunData.EVENTS):
        event = entry.table(slots.Event.PROFILE_EVENT)
        if event is not None:
            number, text = event.number(_Field.DELEGATE_DEBUG_ID_INT, "i", -1), event.text(_Field.DELEGATE_DEBUG_ID_STR)
            identifier = text or (number if number >= 0 else None)
            start = event.number(_Field.START_TIME, "Q")
            took = event.number(_Field.END_TIME, "Q") - start
            chained = event.number(_Field.CHAIN_INDEX, "i") >= 0
            instruction = event.number(_Field.INSTRUCTION_ID, "i", -1) if chained else -1
            yield TraceEvent(event.text(_Field.NAME), instruction, identifier, max(took, 0), start)


Prepared = TypeVar("Prepared")
"""A method as an engine prepares it to run."""


@dataclass(frozen=True, slots=True, eq=False)
class Engine(ABC, Generic[Prepared]):
    """Executes the methods of one file, with the lock of `locks.engine` held; raises what `LoadedProgram.run` does."""

    name: ClassVar[str]  # what `load` calls it
    refusal: ClassVar[str] = ""  # says why it needs the kernels of ExecuTorch's runtime, where that is not obvious

    file: ProgramFile
    delegates: Mapping[str, Delegate]  # in Python, by id
    ready: dict[str, Prepared] = field(default_factory=dict, kw_only=True)  # the methods that were set up
    # The methods that are running, each after the number of `locks.epoch`.
    running: set[tuple[int, str]] = field(default_factory=set, kw_only=True)
    missing: Mapping[str, Missing] = field(default_factory=dict, kw_only=True)  # backends that nothing here executes
    steps: int = field(default=STEPS, kw_only=True)  # how many instructions a run may execute, where they are counted

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """What is held while a method runs: the lock of all engines."""
        return locks.engine()  # type: ignore[no-any-return]

    @contextmanager
    def entered(self, method: str) -> Iterator[None]:
        """Keep a delegate from running the method that it is called from: both would write into the same memory."""
        epoch = locks.epoch()  # what another thread of the parent ran, a forked child does not run
        running = [name for number, name in self.running if number == epoch]
        shared = method in self.file.sharing and not self.file.sharing.isdisjoint(running)
        if method in running or shared:
            raise InputError(
                f"run: {self.file.where(method)} is running: a delegate that it calls cannot run it again"
                f"{', nor a method that shares its memory' if shared else ''}. Load the file once "
                "more for that."
            )
        self.running.add((epoch, method))
        try:
            yield
        finally:
            self.running.discard((epoch, method))

    @abstractmethod
    def run(self, method: MethodSpec, inputs: Sequence[Any]) -> list[Any]:
        """Run a method with inputs as `inputs.prepare` returns them; no later run changes what this returns."""

    @abstractmethod
    def record(self, method: MethodSpec, inputs: Sequence[Any], runs: int) -> list[TraceEvent]:
        """Set a method up again, run it that often, and return what it does; no other run sees its state."""

    @abstractmethod
    def _set_up(self, method: MethodSpec) -> Prepared:
        """Make a method ready to run, in its initial state."""

    def set_up_delegated(self) -> None:
        """Set up the methods that call Python delegates, except those of families, and those that fail when run."""
        chosen_from = {line.method for line in self.file.manifest}
        for method in self.file.methods.values():
            if self.calls_delegates(method) and method.name not in chosen_from and not missing_kernels(method):
                self.prepare(method)

    def calls_delegates(self, method: MethodSpec) -> bool:
        """Return whether a method calls Python delegates."""
        return not self.delegates.keys().isdisjoint(method.backends)

    def prepare(self, method: MethodSpec) -> Prepared:
        """Return a method, set up at its first use; raise an InputError when the runtime lacks a kernel for it."""
        if method.name in self.ready:
            return self.ready[method.name]
        for backend in self.missing.keys() & set(method.backends):
            raise BackendUnavailableError(
                f"{self.file.where(method.name)} cannot run: it needs the backend {backend!r}, and "
                f"{self.missing[backend].reason}. {self.missing[backend].advice}"
            )
        missing = missing_kernels(method)
        if missing:
            raise InputError(
                f"{self.file.where(method.name)} cannot run: the ExecuTorch runtime here has no kernel for "
                f"{', '.join(missing)}. {self.refusal}Import the library that has it (custom operators have one), or "
                "change the model so that the operator is decomposed or delegated."
            )
        with neutral():
            self.ready[method.name] = self._set_up(method)
            # Setting up a method writes its initial state. Those that share it are set up at once, before one changes
            # it; one that fails here fails again when it is run.
            for name in self.file.sharing if method.name in self.file.sharing else ():
                if name not in self.ready and self.missing.keys().isdisjoint(self.file.methods[name].backends):
                    try:
                        self.ready[name] = self._set_up(self.file.methods[name])
                    except Exception as error:
                        let_through(error)
        return self.ready[method.name]


def missing_kernels(method: MethodSpec) -> list[str]:
    """Return the operators of a method that the runtime has no kernel for; none when it cannot be asked."""
    kernels = installed.kernels()
    return [] if kernels is None else sorted(set(method.operators) - kernels)


@contextmanager
def explaining(describe: Callable[[Exception], str]) -> Iterator[None]:
    """Make an InputError of what is raised, with what `describe` makes of it; errors of ours pass as they are."""
    try:
        yield
    except LoweringError:
        raise
    except Exception as error:
        let_through(error)
        raise InputError(describe(error)) from error
