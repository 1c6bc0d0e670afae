"""From a partitioned method to its plan: where each operator went, and why it stayed on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering.graphs import measures
from exir_lowering.graphs.order import reach, topological
from exir_lowering.model import EdgeMethod, ExtractedMethod, Partition, Rejection, TaggedMethod
from exir_lowering.plans.planned import HostNode, MethodPlan, PlannedNode, PlannedPartition, RefusedMerge
from exir_lowering.plugins.backend import Partitioner


def plan_method(
    edge: EdgeMethod,  # as it was before the first partitioner
    tagged: Sequence[TaggedMethod],  # the result of each partitioner, in their order
    extracted: ExtractedMethod,
) -> MethodPlan:
    """Describe one method in a plan that holds no node and no tensor."""
    program = edge.program
    planned, partition_of = _place(program, extracted.partitions)
    weights, readers, bytes_in, bytes_out = _measure(program, partition_of)
    backend_of = {partition.id: partition.backend_id for partition in extracted.partitions}
    graphs_of: dict[str, list[PlannedNode]] = {}  # nested ones apart from what calls them
    members: dict[str, list[PlannedNode]] = {partition.id: [] for partition in extracted.partitions}
    for node in planned:
        graphs_of.setdefault(node.name.rpartition(".")[0], []).append(node)
        if node.partition is not None:
            members[node.partition].append(node)
    partitions = tuple(
        PlannedPartition(
            id=partition.id,
            backend_id=partition.backend_id,
            nodes=tuple(node.name for node in members[partition.id]),
            operators=dict(Counter(node.operator for node in members[partition.id])),
            weight_bytes=sum(weights[key] for key in readers.get(partition.id, ())),
            bytes_in=bytes_in[partition.id],
            bytes_out=bytes_out[partition.id],
            flops=sum(node.flops for node in members[partition.id]),
        )
        for partition in extracted.partitions
    )
    delegated = set().union(*(keys for partition, keys in readers.items() if partition is not None))
    return MethodPlan(
        name=extracted.name,
        nodes=tuple(planned),
        partitions=partitions,
        host=tuple(_host(planned, tagged, extracted)),
        adjustments=(*edge.adjustments, *(adjustment for step in tagged for adjustment in step.adjustments)),
        refused_merges=tuple(one for nodes in graphs_of.values() for one in _refused_merges(nodes, backend_of)),
        weight_bytes=sum(weights[key] for key in set().union(*readers.values())),
        delegated_weight_bytes=sum(weights[key] for key in delegated),
        rewritings=edge.rewritings,
        refused_rewrites=edge.refused_rewrites,
        legalized=edge.legalized,
        model=next((kind for one in program.graph.nodes for path, kind in graphs.modules(one)[:1] if path != kind), ""),
        partitioners=tuple(map(_name, edge.partitioners)),
    )


def _name(partitioner: object) -> str:
    """Return the class of a partitioner, and of the one that it wraps if that is another class."""
    inner = getattr(partitioner, "partitioner", None)
    name, wrapped = type(partitioner).__qualname__, _name(inner) if isinstance(inner, Partitioner) else ""
    return f"{name} of {wrapped}" if wrapped not in ("", name) else name


# -- where each operator is, and what it weighs -----------------------------------------------------------------------


def _place(program: ExportedProgram, partitions: Sequence[Partition]) -> tuple[list[PlannedNode], dict[Node, str]]:
    """Return the operators, and the partitions of nodes: getitems and those of nested graphs that moved included."""
    named = {name: partition.id for partition in partitions for name in partition.nodes}
    planned: list[PlannedNode] = []
    partition_of: dict[Node, str] = {}

    def producer(node: Node) -> Node:
        while graphs.is_getitem(node) and isinstance(node.args[0], Node):
            node = node.args[0]
        return node

    def visit(module: GraphModule, path: tuple[str, ...], moved: str | None) -> None:
        seen: set[str] = set()
        for node in module.graph.nodes:
            name = graphs.qualified_name(path, node)
            partition = partition_of.get(producer(node)) if graphs.is_getitem(node) else moved or named.get(name)
            if partition is not None:
                partition_of[node] = partition
            nested = list(graphs.nested_graphs(module, node))
            if graphs.is_operator(node):
                sources = dict.fromkeys(map(producer, node.all_input_nodes))
                read = tuple(graphs.qualified_name(path, one) for one in sources if graphs.is_operator(one))
                of, where = graphs.operator_name(node), (graphs.module_stack(node), graphs.source_line(node))
                calls = tuple(".".join((*path, one.name)) for one in nested)
                sizes = measures.value_bytes(node), measures.flops(node)
                planned.append(PlannedNode(name, of, partition, *where, read, *sizes, calls))
            for one in nested:
                if one.name not in seen:
                    seen.add(one.name)
                    visit(one.module, (*path, one.name), partition)

    visit(program.graph_module, (), None)
    return planned, partition_of


def _measure(
    program: ExportedProgram, partition_of: Mapping[Node, str]
) -> tuple[dict[int, int], dict[str | None, set[int]], Counter[str], Counter[str]]:
    """Return bytes by weight, the weights that each partition (None: the host) reads, and the bytes in and out."""
    weights: dict[int, int] = {}
    readers: dict[str | None, set[int]] = {}
    bytes_in, bytes_out = Counter[str](), Counter[str]()

    def visit(module: GraphModule, lifted: Mapping[Node, int]) -> None:
        for node in module.graph.nodes:
            if node.op in ("output", "get_attr"):
                continue
            if node in lifted:
                for reader in {partition_of.get(user) for user in node.users if graphs.is_operator(user)}:
                    readers.setdefault(reader, set()).add(lifted[node])
                continue
            own = partition_of.get(node)
            others = {partition_of.get(user) for user in node.users if user.op != "placeholder"} - {own}
            if any(not graphs.is_getitem(user) for user in node.users):
                for reader in others - {None}:
                    bytes_in[str(reader)] += measures.value_bytes(node)
                if own is not None and others:
                    bytes_out[own] += measures.value_bytes(node)
            for nested in graphs.nested_graphs(module, node):
                visit(nested.module, {inner: lifted[outer] for inner, outer in nested.receivers(lifted).items()})

    lifted = {}
    for node, spec in graphs.lifted_inputs(program).items():
        tensor = graphs.lifted_value(program, str(spec.target))
        lifted[node] = id(node) if tensor is None else id(tensor)
        weights[lifted[node]] = measures.value_bytes(node)
    visit(program.graph_module, lifted)
    return weights, readers, bytes_in, bytes_out


# -- why it stays on the host ------------------------------------------------------------------------------------------


def _host(
    nodes: Sequence[PlannedNode], tagged: Sequence[TaggedMethod], extracted: ExtractedMethod
) -> Iterator[HostNode]:
    rejections: dict[str, list[Rejection]] = {}
    for rejection in (*(one for step in tagged for one in step.rejections), *extracted.rejections):
        rejections.setdefault(rejection.node, []).append(rejection)
    for node in nodes:
        if node.partition is None:
            reasons = rejections.get(node.name) or [
                Rejection(
                    extracted.name, node.name, node.operator, "the method has no partitioner", "lower", "no_partitioner"
                )
            ]
            yield HostNode(node.name, node.operator, tuple(reasons), node.module, node.source)


# -- what lies between partitions --------------------------------------------------------------------------------------


def _refused_merges(nodes: Sequence[PlannedNode], backend_of: Mapping[str, str]) -> Iterator[RefusedMerge]:
    """Yield, for each partition of a graph and the next one of its backend, the path that leaves and re-enters them."""
    key_of = {node.name: node.partition or f"host {node.name}" for node in nodes}
    successors = {key: dict[str, tuple[str, str]]() for key in key_of.values()}  # with partitions contracted
    for node in nodes:
        for source in node.inputs:
            if source in key_of and key_of[source] != key_of[node.name]:
                successors[key_of[source]].setdefault(key_of[node.name], (source, node.name))
    keys = list(successors)
    number = {key: i for i, key in enumerate(keys)}
    order = topological([[number[after] for after in successors[key]] for key in keys])
    place = {keys[i]: place for place, i in enumerate(order)}
    last: dict[str, str] = {}  # the partition of each backend so far

    def before(end: str, key: str) -> bool:
        return place[key] <= place[end]

    for second in place:
        backend_id = backend_of.get(second)
        first = last.get(backend_id or "")
        if first is not None:
            steps = [(first, key) for key in reversed(successors[first]) if key != second]
            came_from = reach(steps, successors.__getitem__, partial(before, second))
            names: list[str] = []
            at = second
            while at in came_from:
                source, user = successors[came_from[at]][at]
                names += [name for name in (user, source) if not names or names[-1] != name]
                at = came_from[at]
            if names:
                yield RefusedMerge(first, second, tuple(reversed(names)))
        if backend_id is not None:
            last[backend_id] = second
