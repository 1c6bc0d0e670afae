"""What a partition saves, as a plan would predict it: its operators on the host against a call of its backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.graphs import measures
from exir_lowering.partitioners.algorithms.convex import Proposal, list_computing
from exir_lowering.partitioners.supports.support import GraphScope
from exir_lowering.plugins import HOST
from exir_lowering.plugins.predicting import planned_costs

_OTHER = "a delegate of another partitioner"


class Gains:
    """The places of a graph's nodes and of the readers of each value, while proposals go back to the host."""

    def __init__(self, scope: GraphScope, proposals: Sequence[Proposal]) -> None:
        self._scope, self._costs = scope, planned_costs()
        computing = list_computing(scope.graph_module)
        self._place_of = {node: _OTHER for node in computing if _is_of_delegate(node)}
        self._place_of.update((node, each.backend) for each in proposals for node in each.nodes)
        self._places_of_readers = {
            node: Counter(self._place(user) for user in node.users)
            for node in scope.graph_module.graph.nodes
            if node not in scope.constants
        }

    def _place(self, node: Node) -> str:
        return self._place_of.get(node, HOST)

    def compare(self, proposal: Proposal) -> tuple[float, float]:
        """Return the seconds of a proposal's operators on the host, and in its backend with the call.

        Both include bringing the values that they read or make to where they are read.
        """
        module, costs, backend = self._scope.graph_module, self._costs, proposal.backend
        here = costs.nodes(module, proposal.nodes, HOST)
        there = costs.nodes(module, proposal.nodes, backend) + costs.call(backend)
        inside = set(proposal.nodes)
        for value, readers in self._count_readers(proposal).items():
            moved = measures.value_bytes(value) * costs.per_byte
            known = self._places_of_readers[value]
            hosted = known + Counter({HOST: readers})
            hosted[backend] -= readers
            there += moved * _count_other(known, self._place(value))
            here += moved * _count_other(hosted, HOST if value in inside else self._place(value))
        return here, there

    def drop(self, proposal: Proposal) -> None:
        """Leave a proposal on the host."""
        for value, readers in self._count_readers(proposal).items():
            self._places_of_readers[value].update({HOST: readers, proposal.backend: -readers})
        for node in proposal.nodes:
            del self._place_of[node]

    def _count_readers(self, proposal: Proposal) -> dict[Node, int]:
        """Return how many nodes of a proposal read each value that the proposal makes or reads, without constants."""
        found = dict.fromkeys(proposal.nodes, 0)
        for node in proposal.nodes:
            for source in node.all_input_nodes:
                if source in self._places_of_readers:
                    found[source] = found.get(source, 0) + 1
        return found


def _is_of_delegate(node: Node) -> bool:
    made = node.args[0] if graphs.is_getitem(node) else node
    return isinstance(made, Node) and graphs.is_delegate_call(made)


def _count_other(readers: Counter[str], own: str) -> int:
    return sum(count > 0 and place != own for place, count in readers.items())
