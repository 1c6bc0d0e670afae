"""What executes a backend's payloads in the runtime: the other half of a `Backend`, without a compiler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # the machine that runs a file need not import ExecuTorch's ahead-of-time side
    from executorch.exir.backend.compile_spec_schema import CompileSpec


@dataclass(frozen=True, slots=True)
class DelegateContext:
    """What a delegate may know of the file while it compiles a payload.

    Attributes:
        method: The name of the method that the payload is part of.
        named_data: Returns named data of the file (ExecuTorch's NamedDataStore) by its key, None when there is none of
            that name. It can be called until `compile` returns.
        number: Which of the method's delegates the payload is for, from 0.
    """

    method: str
    named_data: Callable[[str], bytes | None]
    number: int = 0


class Delegate(ABC):
    """Executes payloads of one backend in ExecuTorch's runtime.

    `load` finds it by its id: in its `delegates=`, then in the entry points of the group `exir_lowering.delegates`.
    Runs do not overlap: whoever loads or runs a program waits for others. `destroy` may be called in any thread.

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
            inputs: Tensors, ints, floats and bools. Tensors are the runtime's own memory: they must not be written,
                and are valid until this call returns; clone what is to be kept.

        Returns:
            The outputs, of the dtypes and shapes that the file tells: tensors on the CPU, which are copied and may be
            inputs or views of them, and numbers where a partition returns one.
        """

    def destroy(self, handle: Any) -> None:
        """Let go of what a handle holds; called once for each, when its program is no longer used."""
        return None
