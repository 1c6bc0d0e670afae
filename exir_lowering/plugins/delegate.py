"""What executes a backend's payloads in the runtime: the other half of a `Backend`, without a compiler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:  # the machine that runs a file need not import ExecuTorch's ahead-of-time side
    from executorch.exir.backend.compile_spec_schema import CompileSpec


class Recorder(Protocol):
    """Takes the profile events of a delegate's handle; whoever executes the delegate makes one."""

    @property
    def active(self) -> bool:
        """Whether events are recorded: the handle is being executed, and somebody profiles."""
        ...

    def now(self) -> int:
        """Return the time, in the recorder's unit."""
        ...

    def record(self, identifier: int | str, start: int, end: int) -> None:
        """Record an event that has ended."""
        ...


class _Nothing:
    """An event that nobody records."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


class _Event:
    """An event: the time that the context lasts."""

    __slots__ = ("_identifier", "_recorder", "_start")

    def __init__(self, recorder: Recorder, identifier: int | str) -> None:
        self._recorder, self._identifier, self._start = recorder, identifier, 0

    def __enter__(self) -> None:
        self._start = self._recorder.now()

    def __exit__(self, *error: object) -> None:
        if self._recorder.active:
            self._recorder.record(self._identifier, self._start, self._recorder.now())


_NOTHING = _Nothing()


def check_identifier(identifier: object) -> None:
    """Check that an event can be recorded under an identifier.

    Raises:
        ValueError: It is neither a number from 0 to 2**31 - 1 nor a str with something in it.
    """
    if isinstance(identifier, str) and identifier and "\0" not in identifier:
        return
    if isinstance(identifier, int) and not isinstance(identifier, bool) and 0 <= identifier < 2**31:
        return
    raise ValueError(
        f"event({identifier!r}): expected an identifier of the backend's debug_handle_map: an int from 0 to 2**31 - 1, "
        "or a str that is not empty and has no null characters."
    )


@dataclass(frozen=True, slots=True)
class DelegateContext:
    """What a delegate may know of the file while it compiles a payload; kept in a handle, it takes profile events.

    Attributes:
        method: The name of the method that the payload is part of.
        named_data: Returns named data of the file (ExecuTorch's NamedDataStore) by its key, None when there is none of
            that name. It can be called until `compile` returns.
        number: Which of the method's delegates the payload is for, from 0.
        recorder: Takes the events of `event`; None when nothing is ever profiled.
    """

    method: str
    named_data: Callable[[str], bytes | None]
    number: int = 0
    recorder: Recorder | None = None

    def event(self, identifier: int | str) -> AbstractContextManager[None]:
        """Return a context that records how long it lasts, for `LoadedProgram.profile` and ExecuTorch's Inspector.

        It is meant for `execute`: keep the context that `compile` got in the handle. When nothing is profiled, and
        outside of `execute`, it does nothing.

        Args:
            identifier: A key of the `debug_handle_map` that the backend returned for the payload.

        Raises:
            ValueError: While something is profiled: the identifier is none.
        """
        recorder = self.recorder
        if recorder is None or not recorder.active:
            return _NOTHING
        check_identifier(identifier)
        return _Event(recorder, identifier)


class Delegate(ABC):
    """Executes payloads of one backend in ExecuTorch's runtime.

    `load` finds it by its id: in its `delegates=`, then in the entry points of the group `exir_lowering.delegates`.
    Runs do not overlap: whoever loads or runs a program waits for others, so a delegate must not wait for a thread that
    does. `destroy` may be called in any thread. Autocast, inference mode, default devices and dtypes of the caller are
    set aside meanwhile, and gradients are off.

    What a delegate raises is raised again by `load` and `run`, as the cause of a BackendFailure. ExecuTorch's own
    loaders see a number only: that of the exception's attribute `executorch_error`, such as 0x30, if it has one.

    Attributes:
        delegate_id: The id of the backend, as it is in the file.
    """

    delegate_id: ClassVar[str]

    def is_available(self) -> bool:
        """Tell whether payloads can be compiled and executed on this machine; a file is not loaded otherwise."""
        return True

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> Any:
        """Make a payload ready to be executed; called once for each, when its file is loaded.

        Args:
            processed: The payload, as the backend made it.
            compile_specs: What the partitioner told the backend.
            context: The method, and named data of the file.

        Returns:
            Anything: the handle that `execute` and `destroy` get. By default the payload.
        """
        return processed

    @abstractmethod
    def execute(self, handle: Any, inputs: list[Any]) -> Sequence[Any]:
        """Execute a payload.

        A file does not say where a call's inputs end. Where that is in doubt the first call may be made again, with
        more or fewer inputs, until as many outputs are returned as are left: raise when `inputs` are not what the
        payload needs.

        Args:
            handle: What `compile` returned.
            inputs: Tensors, ints, floats and bools. Tensors are the runtime's own memory: they must not be written, nor
                their views (`run` raises a BackendContractError), and are valid until this call returns; clone what is
                to be kept.

        Returns:
            The outputs, of the dtypes and shapes that the file tells: tensors on the CPU, which are copied and may be
            inputs or views of them, and numbers where a partition returns one.
        """

    def destroy(self, handle: Any) -> None:
        """Let go of what a handle holds; called once for each, when its program is no longer used."""
        return None
