"""Programs for the benchmarks, built without export: converting 10,000 nodes takes minutes, lowering them seconds."""

from __future__ import annotations

from typing import Any

import torch
from executorch.exir import to_edge
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import tag_constant_data
from torch.export import ExportedProgram, export
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, GraphModule

CLAIMED = ("aten_add", "aten_mul")


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin((x + self.weight) * x)


def chain(blocks: int) -> ExportedProgram:
    """Return an Edge program of blocks `sin((x + weight) * x)`, one after the other; sin is left to the host."""
    template = to_edge(export(_Block().eval(), (torch.ones(4),))).exported_program()
    weight, first, *operators, _ = template.graph.nodes
    graph = Graph()
    weights = [graph.create_node("placeholder", f"p_{i}_weight", name=f"p_{i}_weight") for i in range(blocks)]
    for node in weights:
        node.meta = dict(weight.meta)
    value = x = graph.create_node("placeholder", "x", name="x")
    x.meta = dict(first.meta)
    for parameter in weights:
        env = {weight: parameter, first: value}
        for node in operators:
            env[node] = value = graph.node_copy(node, env.__getitem__)
    graph.output((value,))
    tensor = template.state_dict["weight"]
    specs = [InputSpec(InputKind.PARAMETER, TensorArgument(n.name), f"{i}.weight") for i, n in enumerate(weights)]
    specs.append(InputSpec(InputKind.USER_INPUT, TensorArgument("x"), None))
    return ExportedProgram(
        root=GraphModule({}, graph),
        graph=graph,
        graph_signature=ExportGraphSignature(
            specs, [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(value.name), None)]
        ),
        state_dict={f"{i}.weight": torch.nn.Parameter(tensor.detach().clone()) for i in range(blocks)},
        range_constraints={},
        module_call_graph=template.module_call_graph,
        constants={},
        verifiers=template.verifiers,
    )


class NoopDetails(BackendDetails):
    """An ExecuTorch backend without work, for both engines."""

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """Return an empty payload."""
        return PreprocessResult(b"noop")


class EachBlock(Partitioner):
    """Tags the claimed operators of each block; no proposal algorithm."""

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Tag."""
        tags: dict[str, Any] = {}
        for node in exported_program.graph.nodes:
            if node.op == "call_function" and node.name.startswith(CLAIMED):
                if node.name.startswith("aten_add"):
                    tags[f"tag{len(tags)}"] = DelegationSpec(NoopDetails.__name__, [])
                node.meta["delegation_tag"] = f"tag{len(tags) - 1}"
        tag_constant_data(exported_program)
        return PartitionResult(exported_program, tags)
