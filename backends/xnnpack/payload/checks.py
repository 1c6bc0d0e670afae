"""The checks of XNNPACK's payloads: the entry point of the group `exir_lowering.payloads`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exir_lowering.backends.xnnpack.payload.call import check_call
from exir_lowering.backends.xnnpack.payload.graph import BACKEND, Graph
from exir_lowering.backends.xnnpack.payload.reading import read_graph
from exir_lowering.plugins.payload import CheckedPayload, PayloadChecks, ValueSpec


class XnnpackPayloads(PayloadChecks):
    """Checks what XNNPACK trusts."""

    backend_id = BACKEND

    def check(self, payload: memoryview) -> CheckedPayload:
        """Check a payload; see `PayloadChecks`."""
        return _Checked(read_graph(payload))


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
