"""The checks of XNNPACK's payloads: the entry point of the group `exir_lowering.payloads`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from exir_lowering.backends.xnnpack.payload.call import check_call
from exir_lowering.backends.xnnpack.payload.graph import BACKEND, Graph
from exir_lowering.backends.xnnpack.payload.handles import replace_handles
from exir_lowering.backends.xnnpack.payload.reading import read_graph
from exir_lowering.plugins import PROVENANCE
from exir_lowering.plugins.payload import CheckedPayload, PayloadChecks, ValueSpec

# ConvertToLinearPass looks for linear layers by the source of a node, and in which module it is.
_READ = frozenset({"torch_fn", "source_fn_stack", "nn_module_stack"})


class XnnpackPayloads(PayloadChecks):
    """Checks what XNNPACK trusts, and says what ExecuTorch 1.5's `XnnpackBackend` reads."""

    backend_id = BACKEND
    made_by = "executorch.backends.xnnpack.xnnpack_preprocess.XnnpackBackend"
    unread = PROVENANCE - _READ if metadata.version("executorch").startswith("1.5.") else frozenset()
    replaces_handles = True

    def check(self, payload: memoryview) -> CheckedPayload:
        """Check a payload; see `PayloadChecks`."""
        return _Checked(read_graph(payload))

    def replace_handles(self, payload: bytes, handles: Mapping[int, int]) -> bytes:
        """Replace the debug handles of nodes; see `PayloadChecks`."""
        return replace_handles(payload, handles)


@dataclass(frozen=True, slots=True)
class _Checked(CheckedPayload):
    """A payload whose graph is valid."""

    graph: Graph

    @property
    def weights(self) -> Mapping[str, int]:
        """The named data that it reads, and how many bytes of each."""
        return self.graph.weights

    def check_call(self, arguments: Sequence[ValueSpec]) -> None:
        """Check the values of a call; see `CheckedPayload`."""
        check_call(self.graph, arguments)
