"""How long a method will take: its operators where they run, the calls of delegates, and the data in between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering.graphs import measures
from exir_lowering.model import EdgeMethod
from exir_lowering.plans.planned import Advice, HostCost, HostNode, Prediction
from exir_lowering.plugins.costs import HOST, AskedCosts, CostModel, count_trips

LARGEST = 3
"""How many host costs a prediction lists."""

_TOGETHER = 3
"""How many operators advice may be about to be repeated at the cost of one of them."""

_ATTENTION = "aten.scaled_dot_product_attention"


def predict(
    edge: EdgeMethod,  # before partitions are taken out
    partition_of: Mapping[Node, str],  # with getitems and the nodes of nested graphs
    backend_of: Mapping[str, str],  # by partition
    host: Mapping[Node, HostNode],
    advice: Sequence[Advice],
    model: CostModel | None = None,  # None: the default model
) -> Prediction:
    """Predict the latency of a method, nested graphs included, with what would remove the largest costs on the host.

    Of the branches of a cond the one that takes longer counts. The graph of a map or scan counts once for each element
    of what it goes over, that of a loop once, as nobody knows how often it runs.
    InputError: The model raised, or a cost is not a finite number of at least 0.
    """
    walk = _Walk(partition_of, backend_of, AskedCosts(model))
    sums = walk.graph(edge.program.graph_module, frozenset(graphs.lifted_inputs(edge.program)), None)
    by_operator: dict[str, dict[Node, float]] = {}
    for node, seconds in sums.nodes.items():
        by_operator.setdefault(graphs.operator_name(node), {})[node] = seconds
    # The dearest first.
    ranked = sorted((-sum(nodes.values()), operator) for operator, nodes in by_operator.items())
    largest = []
    for seconds, operator in ranked[:LARGEST]:
        nodes = by_operator[operator]
        dearest = max(nodes, key=nodes.__getitem__)
        remedy = _remedy(dearest, edge, host.get(dearest), advice)
        largest.append(HostCost(operator, len(nodes), -seconds, remedy))
    return Prediction(sums.total, sums.host, sums.delegates, sums.crossing, tuple(largest), walk.costs.guessed)


# -- the walk ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sums:
    """Seconds of a graph; `nodes` has those of each operator on the host."""

    host: float = 0.0
    delegates: float = 0.0
    crossing: float = 0.0
    nodes: dict[Node, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def total(self) -> float:
        return self.host + self.delegates + self.crossing

    def add_host(self, node: Node, seconds: float) -> None:
        """Count an operator on the host."""
        self.host += seconds
        self.nodes[node] += seconds

    def add(self, other: _Sums, times: int) -> None:
        """Count a graph that is called."""
        self.host += other.host * times
        self.delegates += other.delegates * times
        self.crossing += other.crossing * times
        for node, seconds in other.nodes.items():
            self.nodes[node] += seconds * times


@dataclass(frozen=True, slots=True)
class _Walk:
    """A walk over the graphs of a method; each graph is visited once."""

    partition_of: Mapping[Node, str]
    backend_of: Mapping[str, str]
    costs: AskedCosts
    known: dict[GraphModule, _Sums] = field(default_factory=dict)

    def graph(self, module: GraphModule, constants: frozenset[Node], within: str | None) -> _Sums:
        """Return the seconds of a graph; `within` is the partition that it is in as a whole."""
        if module in self.known:
            return self.known[module]
        sums = _Sums()
        called = {within}
        for node in module.graph.nodes:
            if node.op in ("output", "get_attr") or node in constants:
                continue
            partition = self.partition_of.get(node, within)
            if partition not in called:
                called.add(partition)
                sums.delegates += self.costs.call(self.backend_of[partition])  # type: ignore[index]
            sums.crossing += self._crossing(node, partition, within)
            if graphs.is_operator(node):
                self._operator(module, node, partition, constants, sums)
        self.known[module] = sums
        return sums

    def _operator(
        self, module: GraphModule, node: Node, partition: str | None, constants: frozenset[Node], sums: _Sums
    ) -> None:
        nested = list(graphs.nested_graphs(module, node))
        seconds = self.costs.node(node, self._place(partition), calls=bool(nested))
        if partition is None:
            sums.add_host(node, seconds)
        else:
            sums.delegates += seconds
        if not nested:
            return
        inner = [self.graph(each.module, frozenset(each.receivers(constants)), partition) for each in nested]
        if graphs.operator_name(node) == "cond":
            inner = [max(inner, key=lambda each: each.total)]
        for each in inner:
            sums.add(each, count_trips(node))

    def _place(self, partition: str | None) -> str:
        return HOST if partition is None else self.backend_of[partition]

    def _crossing(self, node: Node, partition: str | None, within: str | None) -> float:
        """Return what it costs to bring a node's result to each other place where it is read."""
        own = self._place(partition)
        places = set()
        for user in node.users:
            if not (graphs.is_getitem(user) and self.partition_of.get(user, within) == partition):
                places.add(self._place(within if user.op == "output" else self.partition_of.get(user, within)))
        places.discard(own)
        return self.costs.per_byte * measures.value_bytes(node) * len(places) if places else 0.0


# -- what would help ---------------------------------------------------------------------------------------------------


def _remedy(node: Node, edge: EdgeMethod, refused: HostNode | None, advice: Sequence[Advice]) -> str:
    """Return why an operator is on the host and what would remove it."""
    operator = graphs.operator_name(node)
    known = [refused.reason] if refused is not None and refused.reason else []
    if any(origin.startswith(_ATTENTION) for origin in graphs.origins(node)):
        known += _attention_remedy(edge)
    known += [str(each) for each in advice if operator in each.operators and len(each.operators) <= _TOGETHER][:1]
    return "; ".join(known)


def _attention_remedy(edge: EdgeMethod) -> list[str]:
    """Return what would remove operators that attention was decomposed into."""
    refused = [f"{one.rewrite} left it: {one.reason}; {one.advice}" for one in edge.refused_rewrites]
    if refused or edge.rewrites:
        return refused[:1]
    return ['it comes from scaled_dot_product_attention, which LoweringOptions(rewrites="safe") rewrites']
