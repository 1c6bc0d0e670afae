"""Execute a partition's original graph with PyTorch where its backend is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from exir_lowering import originals, registry
from exir_lowering.delegate import Delegate, DelegateContext
from exir_lowering.errors import BackendUnavailableError

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec


class OriginalGraphs(Delegate):
    """Stands in for a backend: ignores its payloads, and executes the graphs that the file keeps beside them.

    Args:
        backend_id: The backend.
        reason: Why it is missing here, as a clause.
    """

    def __init__(self, backend_id: str, reason: str) -> None:
        self.backend_id, self.reason = backend_id, reason
        self._torch = registry.find_delegate(originals.BACKEND)

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> Any:
        """Read the original graph of the partition.

        Raises:
            BackendUnavailableError: The file does not keep it.
        """
        payload = context.named_data(originals.key(context.method, context.number))
        if payload is None:
            raise BackendUnavailableError(
                f"method {context.method!r} needs the backend {self.backend_id!r}, and {self.reason}. There is no "
                "original graph to fall back to: the file has them if it is emitted with keep_originals=True, and its "
                "data file is given."
            )
        return self._torch.compile(payload, [], context)

    def execute(self, handle: Any, inputs: list[Any]) -> Sequence[Any]:
        """Execute the graph."""
        return self._torch.execute(handle, inputs)

    def destroy(self, handle: Any) -> None:
        """Let go of the graph."""
        self._torch.destroy(handle)
