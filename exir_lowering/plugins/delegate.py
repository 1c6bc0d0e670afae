"""The contract of delegates, which execute a backend's payloads in the runtime, without a compiler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:  # the machine that runs a file need not import ExecuTorch's ahead-of-time side
    from executorch.exir.backend.compile_spec_schema import CompileSpec


class Recorder(Protocol):
    """Records the profile events of a delegate's handle; created by whatever executes the delegate."""

    @property
    def active(self) -> bool:
        """Whether events are recorded: the handle is being executed and profiled."""

    def now(self) -> int:
        """Return the current time, in the recorder's unit."""

    def record(self, identifier: int | str, start: int, end: int) -> None:
        """Record an event that has ended."""


@contextmanager
def _recorded(recorder: Recorder, identifier: int | str) -> Iterator[None]:
    """Record how long the context lasts."""
    start = recorder.now()
    try:
        yield
    finally:
        if recorder.active:
            recorder.record(identifier, start, recorder.now())


@dataclass(frozen=True, slots=True)
class DelegateContext:
    """What a delegate may know about the file while it compiles a payload; later, it records profile events.

    Attributes:
        method: The name of the method that the payload is part of.
        named_data: Returns named data of the file (ExecuTorch's NamedDataStore) by its key, or None if there is no such
            key. It can be called until `compile` returns.
        number: Which of the method's delegates the payload is for, from 0.
        recorder: Records the events of `event`; None if nothing is ever profiled.
    """

    method: str
    named_data: Callable[[str], bytes | None]
    number: int = 0
    recorder: Recorder | None = None

    def event(self, identifier: int | str) -> AbstractContextManager[None]:
        """Return a context that records how long it lasts, for `LoadedProgram.profile` and ExecuTorch's Inspector.

        The identifier is a key of the `debug_handle_map` that the backend returned for the payload; ValueError if it is
        invalid. It is meant for `execute`: keep the context that `compile` gets in the handle. It does nothing outside
        `execute`, or when nothing is profiled.
        """
        recorder = self.recorder
        if recorder is None or not recorder.active:
            return nullcontext()
        text = isinstance(identifier, str) and identifier and "\0" not in identifier
        number = isinstance(identifier, int) and not isinstance(identifier, bool) and 0 <= identifier < 2**31
        if not text and not number:
            raise ValueError(
                f"event({identifier!r}): expected an identifier of the backend's debug_handle_map: an int from 0 to "
                "2**31 - 1, or a non-empty str without null characters."
            )
        return _recorded(recorder, identifier)


class Delegate(ABC):
    """Executes payloads of one backend in ExecuTorch's runtime.

    `load` finds it by its id: in its `delegates=`, then in the entry points of the group `exir_lowering.delegates`.
    Runs do not overlap: loading or running a program waits for other threads that do so. Therefore a delegate must not
    wait for such a thread. `destroy` may be called in any thread. The caller's autocast, inference mode, default device
    and dtype are set aside while a delegate runs, and gradients are off.

    `load` and `run` raise a BackendFailure whose cause is the delegate's exception. ExecuTorch's own loaders only get a
    number: the exception's attribute `executorch_error`, such as 0x30, if it has one.

    Attributes:
        delegate_id: The id of the backend, as in the file.
    """

    delegate_id: ClassVar[str]

    def is_available(self) -> bool:
        """Return whether this machine can compile and execute payloads; if not, files with them are not loaded."""
        return True

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> Any:
        """Return what `execute` and `destroy` get as the handle of a payload: any object but None, by default itself.

        It is called once for each payload, when its file is loaded, with the partitioner's options for the backend.
        """
        return processed

    @abstractmethod
    def execute(self, handle: Any, inputs: list[Any]) -> Sequence[Any]:
        """Execute a payload.

        A file does not say where a call's inputs end. If that is in doubt, the first call may be repeated with more or
        fewer inputs, until the number of outputs matches what is left: raise if `inputs` are not what the payload
        needs.

        Args:
            handle: What `compile` returned.
            inputs: Tensors, ints, floats and bools. Tensors are the runtime's own memory: neither they nor their views
                may be written (`run` raises a BackendContractError), and they are valid until this call returns; clone
                what you want to keep.

        Returns:
            The outputs, with the dtypes and shapes that the file declares: tensors on the CPU, which are copied and may
            be inputs or views of them, and numbers where a partition returns a number.
        """

    def destroy(self, handle: Any) -> None:
        """Release what a handle holds; called once for each handle, when its program is no longer used."""
        return None
