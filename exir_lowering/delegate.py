"""The run-time contract: what executes a backend's payloads. Nothing here needs the compiler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # the machine that runs a file need not import ExecuTorch's ahead-of-time side
    from executorch.exir.backend.compile_spec_schema import CompileSpec

__all__ = ["Delegate", "DelegateContext"]


@dataclass(frozen=True, slots=True)
class DelegateContext:
    """What a delegate may ask while it compiles a payload.

    Attributes:
        method: The method that is loaded.
        named_data: Returns the file's named data of a key, None when there is none.
    """

    method: str
    named_data: Callable[[str], bytes | None]


class Delegate(ABC):
    """Executes the payloads of one backend.

    Attributes:
        delegate_id: The backend id in the file.
    """

    delegate_id: ClassVar[str]

    def is_available(self) -> bool:
        """Tell whether payloads can be compiled and executed on this machine."""
        return True

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> Any:
        """Make a payload ready to be executed; by default nothing is to be done, and the payload is the handle.

        Args:
            processed: The payload that the backend made.
            compile_specs: What the backend was told.
            context: The method, and access to the file's named data.

        Returns:
            A handle, which `execute` and `destroy` get.
        """
        return processed

    @abstractmethod
    def execute(self, handle: Any, inputs: list[Any]) -> Sequence[Any]:
        """Execute a payload.

        Args:
            handle: What `compile` returned.
            inputs: Tensors (views of the runtime's memory, valid during the call only), ints, floats and bools.

        Returns:
            The outputs, tensors.
        """

    def destroy(self, handle: Any) -> None:
        """Release what a handle holds; by default nothing is to be done."""
        return None
