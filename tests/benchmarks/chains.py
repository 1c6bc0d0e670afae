"""Many partitions, beside ExecuTorch's `to_backend` in one run: `python tests/benchmarks/chains.py [--json FILE]`.

The programs are built without export: converting 10,000 nodes takes minutes, lowering them seconds. Shared machines are
noisy: read the ratios, not the seconds.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from executorch.exir import to_edge
from executorch.exir.backend.backend_api import MethodProgramsPartitionerSpec, to_backend
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

import exir_lowering

UPSTREAM_LIMIT = 400
"""Partitions up to which ExecuTorch is run: 400 take it about a minute."""

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


def best(run: Callable[[], Any], times: int) -> tuple[float, Any]:
    """Return the least CPU time of several runs in seconds, each after a full garbage collection, and its result.

    CPU time, because other work on the machine does not count there.
    """
    found: tuple[float, Any] = (float("inf"), None)
    for _ in range(times):
        gc.collect()
        start = time.process_time()
        result = run()
        seconds = time.process_time() - start
        if seconds < found[0]:
            found = (seconds, result)
        del result
    return found


def chains(sizes: list[int], repeat: int) -> list[dict[str, Any]]:
    """Lower a chain of T partitions with a no-op backend in both engines."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        program = chain(size)
        floor, _ = best(lambda program=program: len(copy.deepcopy(program.graph).nodes), repeat)
        ours, steps = best(
            lambda program=program: exir_lowering.to_backend(program, EachBlock()).report.seconds, repeat
        )
        row: dict[str, Any] = {
            "partitions": size,
            "nodes": len(program.graph.nodes),
            "deepcopy_s": floor,
            "ours_s": ours,
        }
        row["times_deepcopy"] = ours / floor
        row["steps_times_deepcopy"] = {name: seconds / floor for name, seconds in steps.items()}
        if rows and rows[-1]["partitions"] * 2 == size:
            row["growth"] = ours / rows[-1]["ours_s"]
        if size <= UPSTREAM_LIMIT:
            spec = MethodProgramsPartitionerSpec({"forward": program}, {"forward": EachBlock()})
            row["upstream_s"], _ = best(lambda spec=spec: len(to_backend(spec)), 1)
            row["speedup"] = row["upstream_s"] / ours
        rows.append(row)
        print(f"chain of {size} partitions done", file=sys.stderr)
    return rows


def main() -> None:
    """Run the benchmark, and print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    arguments = parser.parse_args()
    sizes = [50, 100, 200] if arguments.quick else [50, 100, 200, 400, 800, 1600, 3200]
    best(lambda: exir_lowering.to_backend(chain(20), EachBlock()), 2)  # imports and caches of both engines
    best(lambda: to_backend(MethodProgramsPartitionerSpec({"m": chain(5)}, {"m": EachBlock()})), 1)
    rows = chains(sizes, repeat=5)
    for row in rows:
        print(", ".join(f"{name} {value:.3g}" for name, value in row.items() if not isinstance(value, dict)))
        print("   x deepcopy:", ", ".join(f"{name} {value:.1f}" for name, value in row["steps_times_deepcopy"].items()))
    if arguments.json:
        arguments.json.write_text(json.dumps({"chains": rows}, indent=2))


if __name__ == "__main__":
    main()
