"""Plans built by hand: what the views have to show, without a lowering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from exir_lowering.model import Adjustment, Rejection
from exir_lowering.plans.lowering_plan import LoweringPlan
from exir_lowering.plans.planned import (
    HostNode,
    MethodPlan,
    PlannedNode,
    PlannedPartition,
    RefusedMerge,
)

HOSTILE = "</script><img src=x onerror=\"window.hacked='yes'\"> & {{ 7*7 }} \\"
"""A name that would run if a page took it for HTML, and change if a template or Graphviz took it for its own."""


def node(
    name: str,
    operator: str = "aten.add.Tensor",
    inputs: Sequence[str] = (),
    *,
    partition: str | None = None,
    module: str = "",
    source: str = "",
    result_bytes: int = 4,
    flops: int = 1,
) -> PlannedNode:
    return PlannedNode(name, operator, partition, module, source, tuple(inputs), result_bytes, flops)


def method(
    name: str,
    nodes: Iterable[PlannedNode],
    backends: dict[str, str],
    *,
    weights: dict[str, int] | None = None,
    host_weights: int = 0,
    reasons: dict[str, Sequence[tuple[str, str]]] | None = None,
    adjustments: Sequence[Adjustment] = (),
    refused: Sequence[RefusedMerge] = (),
) -> MethodPlan:
    """Make a method of nodes, the backend and weights of each partition, and (reason, by) for the host's nodes."""
    nodes, weights, reasons = tuple(nodes), weights or {}, reasons or {}
    by_name = {n.name: n for n in nodes}
    readers: dict[str, list[PlannedNode]] = {}
    for n in nodes:
        for source in n.inputs:
            readers.setdefault(source, []).append(n)
    partitions = []
    for identity, backend in backends.items():
        own = [n for n in nodes if n.partition == identity]
        read = {source for n in own for source in n.inputs if by_name[source].partition != identity}
        out = [n for n in own if any(r.partition != identity for r in readers.get(n.name, [])) or n.name not in readers]
        partitions.append(
            PlannedPartition(
                id=identity,
                backend_id=backend,
                nodes=tuple(n.name for n in own),
                operators=dict(Counter(n.operator for n in own)),
                weight_bytes=weights.get(identity, 0),
                bytes_in=sum(by_name[source].result_bytes for source in read),
                bytes_out=sum(n.result_bytes for n in out),
                flops=sum(n.flops for n in own),
            )
        )
    host = tuple(
        HostNode(
            n.name,
            n.operator,
            tuple(
                Rejection(name, n.name, n.operator, reason, by)
                for reason, by in reasons.get(n.name, [("no rule takes it", "SupportPartitioner")])
            ),
            n.module,
            n.source,
        )
        for n in nodes
        if n.partition is None
    )
    delegated = sum(weights.values())
    return MethodPlan(
        name=name,
        nodes=nodes,
        partitions=tuple(partitions),
        host=host,
        adjustments=tuple(adjustments),
        refused_merges=tuple(refused),
        weight_bytes=delegated + host_weights,
        delegated_weight_bytes=delegated,
    )


def small() -> LoweringPlan:
    """Two methods, two backends, a nested graph, and one of everything that a plan can say."""
    line = 'File "/home/user/model & co.py", line {}, in forward: y = torch.where(x < 0, x > 1, "<b>")'

    def at(number: int) -> str:
        return line.format(number)

    linear, add, relu = "aten.linear.default", "aten.add.Tensor", "aten.relu.default"
    nodes = [
        node("linear", linear, partition="forward_0", module="encoder.0", source=at(10), result_bytes=4096, flops=8192),
        node("relu", relu, ["linear"], partition="forward_0", module="encoder.1", result_bytes=4096, flops=1024),
        node("topk", "aten.topk.default", ["relu"], module="router", source=at(12), result_bytes=512, flops=100),
        node("sort", "aten.sort.default", ["topk"], module="router", source=at(13), result_bytes=512, flops=100),
        node("linear_1", linear, ["relu", "sort"], partition="forward_1", source=at(14), result_bytes=2048, flops=4096),
        node("mul", "aten.mul.Tensor", ["relu"], partition="forward_2", source=at(15), result_bytes=4096, flops=1024),
        node("cond", "cond", ["linear_1", "mul"], source=at(16), result_bytes=2048, flops=0),
        node("add", add, ["cond", "relu"], source=at(18), result_bytes=2048, flops=512),
        node("add_1", add, ["add"], source=at(19), result_bytes=2048, flops=512),
        node("true_graph_0.linear", linear, ["linear_1"], partition="forward_3", result_bytes=2048, flops=4096),
        node("true_graph_0.sin", "aten.sin.default", ["true_graph_0.linear"], result_bytes=2048, flops=512),
        node("false_graph_0.cos", "aten.cos.default", ["mul"], result_bytes=2048, flops=512),
    ]
    dropped = Adjustment("forward", "dropped", ("add", "add_1"), "2 operators, at least 3 wanted", "SupportPartitioner")
    cut = Adjustment("forward", "cut", ("mul",), "8,192 bytes of weights, at most 4,096 allowed", "SupportPartitioner")
    forward = method(
        "forward",
        nodes,
        {
            "forward_0": "XnnpackBackend",
            "forward_1": "XnnpackBackend",
            "forward_2": "EchoBackend",
            "forward_3": "XnnpackBackend",
        },
        weights={"forward_0": 262_144, "forward_1": 131_072, "forward_3": 65_536},
        host_weights=65_536,
        reasons={
            "topk": [("no rule takes aten.topk.default", "XnnpackPartitioner"), ("int64 <results> & more", "Echo")],
            "sort": [("no rule takes aten.sort.default", "XnnpackPartitioner"), ("int64 <results> & more", "Echo")],
            "add": [("2 operators, at least 3 wanted", "SupportPartitioner")],
            "add_1": [("2 operators, at least 3 wanted", "SupportPartitioner")],
            "cond": [("calls graphs", "lower")],
        },
        adjustments=[dropped, cut],
        refused=[RefusedMerge("forward_0", "forward_1", ("relu", "topk", "sort", "linear_1"))],
    )
    decode = method(
        "decode_step",
        [
            node("embed", "aten.embedding.default", module="embedding", result_bytes=256, flops=0),
            node("linear", linear, ["embed"], partition="decode_step_0", result_bytes=1024, flops=2048),
        ],
        {"decode_step_0": "XnnpackBackend"},
        weights={"decode_step_0": 4096},
        host_weights=4096,
    )
    return LoweringPlan((forward, decode))


def nothing_delegated() -> LoweringPlan:
    """A method without a partition."""
    nodes = [node("add"), node("mul", "aten.mul.Tensor", ["add"]), node("full", "aten.full.default")]
    return LoweringPlan((method("forward", nodes, {}),))


def empty() -> LoweringPlan:
    """A method without an operator."""
    return LoweringPlan((method("forward", [], {}),))


def hostile() -> LoweringPlan:
    """A plan in which every text is `HOSTILE`."""
    first, second, third = f"{HOSTILE}0", f"{HOSTILE}1", f"{HOSTILE}2"
    nodes = [
        node(first, HOSTILE, partition=HOSTILE, module=HOSTILE, source=HOSTILE),
        node(second, HOSTILE, [first], module=HOSTILE, source=HOSTILE),
        node(third, HOSTILE, [second], partition=f"{HOSTILE}b", module=HOSTILE, source=HOSTILE),
    ]
    made = method(
        HOSTILE,
        nodes,
        {HOSTILE: HOSTILE, f"{HOSTILE}b": HOSTILE},
        reasons={second: [(HOSTILE, HOSTILE)]},
        adjustments=[Adjustment(HOSTILE, "dropped", (second,), HOSTILE, HOSTILE)],
        refused=[RefusedMerge(HOSTILE, f"{HOSTILE}b", (first, second, third))],
    )
    return LoweringPlan((made,))


def varied(partitions: int = 300) -> LoweringPlan:
    """A model without a repeated layer: each partition differs, and host operators lie between them."""
    nodes: list[PlannedNode] = []
    backends = {}
    for i in range(partitions):
        backends[f"forward_{i}"] = "XnnpackBackend"
        for operator, partition in ((f"aten.op{i}.default", f"forward_{i}"), (f"aten.host{i % 7}.default", None)):
            before = [nodes[-1].name] if nodes else []
            more = [nodes[i].name] if i > 20 and i % 9 == 0 else []
            module = f"stage.{i // 100}.block.{i // 10}.unit.{i}"
            nodes.append(node(f"n{len(nodes)}", operator, before + more, partition=partition, module=module))
    merges = [RefusedMerge(f"forward_{i}", f"forward_{i + 1}", (f"n{2 * i}",) * 20) for i in range(partitions - 1)]
    return LoweringPlan((method("forward", nodes, backends, host_weights=50_000_000, refused=merges),))
