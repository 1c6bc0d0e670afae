"""The interface of the engines, which execute the methods of a `LoadedProgram`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from exir_lowering._upstream import installed, locks
from exir_lowering.errors import InputError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.graphs.operators.budget import STEPS
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.pte.format import MethodSpec
from exir_lowering.runtime.source import ProgramFile
from exir_lowering.runtime.trace import TraceEvent

Prepared = TypeVar("Prepared")
"""A method as an engine prepares it to run."""


class Executor(Protocol):
    """What executes the methods of a `LoadedProgram`: an engine in this process, or one in a process of its own."""

    @property
    def name(self) -> str:
        """What `load` calls the engine."""
        ...

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """What is held while a method runs."""
        ...

    def entered(self, method: str) -> AbstractContextManager[Any]:
        """Return the context in which a method runs; an InputError for one that must not run now."""
        ...

    def run(self, method: MethodSpec, inputs: Sequence[Any]) -> list[Any]:
        """Run a method; see `Engine`."""
        ...

    def record(self, method: MethodSpec, inputs: Sequence[Any], runs: int) -> list[TraceEvent]:
        """Record runs of a method; see `Engine`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Engine(ABC, Generic[Prepared]):
    """Executes the methods of one file; used with the lock of `locks.engine` held.

    Attributes:
        name: What `load` calls it.
        refusal: A sentence that says why the engine needs the kernels of ExecuTorch's runtime, "" when that is obvious.
        file: The file.
        delegates: Its Python delegates, by id.
        ready: The methods that were set up.
        running: The methods that are running, each after the number of `locks.epoch`.
        steps: How many instructions a run may execute, where the engine counts them.
    """

    name: ClassVar[str]
    refusal: ClassVar[str] = ""

    file: ProgramFile
    delegates: Mapping[str, Delegate]
    ready: dict[str, Prepared] = field(default_factory=dict, kw_only=True)
    running: set[tuple[int, str]] = field(default_factory=set, kw_only=True)
    steps: int = field(default=STEPS, kw_only=True)

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
        """Run a method.

        Args:
            method: One of the file's methods.
            inputs: Its inputs, as `inputs.prepare` returns them.

        Returns:
            The outputs, which no later run changes.

        Raises:
            InputError: The method cannot be set up, or failed.
            BackendFailure: A Python delegate raised.
            BackendContractError: A Python delegate returned something other than the file says.
        """

    @abstractmethod
    def record(self, method: MethodSpec, inputs: Sequence[Any], runs: int) -> list[TraceEvent]:
        """Run a method that is set up anew, and record what it does; no other run sees its state.

        Args:
            method: One of the file's methods.
            inputs: Its inputs, as `inputs.prepare` returns them.
            runs: How often it is run.

        Returns:
            What was recorded, with the names of `trace`.

        Raises:
            InputError, BackendFailure, BackendContractError: As for `run`.
        """

    @abstractmethod
    def _set_up(self, method: MethodSpec) -> Prepared:
        """Make a method ready to run, in its initial state."""

    @abstractmethod
    def _sharing(self, method: MethodSpec) -> Collection[str]:
        """Return the methods that share their state with one, itself included; none when it has its own."""

    def set_up_delegated(self) -> None:
        """Set up the methods that call Python delegates, except those that lack a kernel, which fail when run.

        Raises:
            InputError, BackendUnavailableError, BackendFailure: One cannot be set up.
        """
        for method in self.file.methods.values():
            if self.calls_delegates(method) and not _missing_kernels(method):
                self.prepare(method)

    def calls_delegates(self, method: MethodSpec) -> bool:
        """Return whether a method calls Python delegates."""
        return not self.delegates.keys().isdisjoint(method.backends)

    def prepare(self, method: MethodSpec) -> Prepared:
        """Return a method, set up at its first use.

        Raises:
            InputError: The runtime has no kernel for an operator, or the method cannot be set up.
            BackendUnavailableError: What executes a payload is missing here.
            BackendFailure: A Python delegate raised.
        """
        if method.name in self.ready:
            return self.ready[method.name]
        missing = _missing_kernels(method)
        if missing:
            raise InputError(
                f"{self.file.where(method.name)} cannot run: the ExecuTorch runtime here has no kernel for "
                f"{', '.join(missing)}. {self.refusal}Import the library that has it (custom operators have one), or "
                "change the model so that the operator is decomposed or delegated."
            )
        self.ready[method.name] = self._set_up(method)
        # Setting up a method writes its initial state. Those that share it are set up at once, before one changes it;
        # one that fails here fails again when it is run.
        for name in self._sharing(method):
            if name not in self.ready:
                try:
                    self.ready[name] = self._set_up(self.file.methods[name])
                except Exception as error:
                    let_through(error)
        return self.ready[method.name]


def _missing_kernels(method: MethodSpec) -> list[str]:
    """Return the operators of a method that the runtime has no kernel for; none when it cannot be asked."""
    kernels = installed.kernels()
    return [] if kernels is None else sorted(set(method.operators) - kernels)
