"""What executes the methods of a program: the part of `LoadedProgram` that there are several of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from exir_lowering.pte.format import MethodSpec
from exir_lowering.runtime.trace import TraceEvent


class Engine(Protocol):
    """Executes the methods of one file; used with the lock of `locks.engine` held."""

    @property
    def name(self) -> str:
        """What `load` calls it."""
        ...

    def run(self, method: MethodSpec, inputs: Sequence[Any]) -> list[Any]:
        """Run a method.

        Args:
            method: One of the file's methods.
            inputs: Its inputs, as `prepare` returns them.

        Returns:
            The outputs, which no later run changes.

        Raises:
            InputError: The method cannot be set up, or failed.
            BackendFailure: A Python delegate raised.
            BackendContractError: A Python delegate returned something else than the file says.
        """
        ...

    def record(self, method: MethodSpec, inputs: Sequence[Any], runs: int) -> list[TraceEvent]:
        """Run a method that is set up anew, and record what it does; no other run sees its state.

        Args:
            method: One of the file's methods.
            inputs: Its inputs, as `prepare` returns them.
            runs: How often it is run.

        Returns:
            What was recorded, with the names of `trace`.

        Raises:
            InputError, BackendFailure, BackendContractError: As for `run`.
        """
        ...
