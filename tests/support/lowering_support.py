"""What the tests share: a partitioner that tags what it is told to, backends without work, exported programs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from executorch.exir import to_edge
from executorch.exir.backend.utils import tag_constant_data, tag_mutated_buffer
from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import (
    Backend,
    CompileSpec,
    DelegationSpec,
    Partitioner,
    PartitionResult,
    PreprocessResult,
)
from exir_lowering.graphs import every_node, operator_name, walk

SUMS_IN_HALF = bool(torch.cpu.get_capabilities().get("avx512_fp16"))
"""Whether XNNPACK sums half floats as such on this processor, and errors are larger."""


class TagPartitioner(Partitioner):
    """Tags each operator with the tag that a function gives it (None: not claimed), in nested graphs too."""

    def __init__(
        self,
        tag_of: Callable[[Node], str | None] = lambda node: "t",
        backend: str | Callable[[str], str] = "echo",
        *,
        nested: bool = True,
        constants: bool = True,
        state: bool = True,
        compile_specs: Sequence[CompileSpec] = (),
    ) -> None:
        super().__init__()
        self.tag_of, self.backend, self.nested = tag_of, backend, nested
        self.constants, self.state, self.compile_specs = constants, state, list(compile_specs)

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        tags: dict[str, DelegationSpec] = {}
        modules = (
            [m for _, m in walk(exported_program.graph_module)] if self.nested else [exported_program.graph_module]
        )
        for module in modules:
            for node in module.graph.nodes:
                tag = self.tag_of(node) if node.op == "call_function" else None
                if tag is not None:
                    node.meta["delegation_tag"] = tag
                    backend = self.backend if isinstance(self.backend, str) else self.backend(tag)
                    tags[tag] = DelegationSpec(backend, self.compile_specs)
        if self.constants:
            tag_constant_data(exported_program)
        if self.state:
            tag_mutated_buffer(exported_program)
        return PartitionResult(exported_program, tags)


def by_operator(*names: str, tag: str = "t") -> Callable[[Node], str | None]:
    """Claim operators by their full name, such as aten.add.Tensor, with one tag."""
    return lambda node: tag if operator_name(node) in names else None


class NoopBackend(Backend):
    """Lowers to nothing; counts its calls."""

    backend_id = "noop"

    def __init__(self) -> None:
        self.calls: list[dict[str, int]] = []

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        return PreprocessResult(b"noop")

    def preprocess_all(self, edge_programs: Any, compile_specs: Any) -> dict[str, list[PreprocessResult]]:
        self.calls.append({method: len(programs) for method, programs in edge_programs.items()})
        return {m: [PreprocessResult(b"noop") for _ in programs] for m, programs in edge_programs.items()}


def edge_program(module: torch.nn.Module, inputs: tuple[Any, ...], **export: Any) -> ExportedProgram:
    """Export a module and convert it to Edge dialect."""
    return to_edge(torch.export.export(module.eval(), inputs, **export)).exported_program()


def delegates(program: ExportedProgram) -> list[LoweredBackendModule]:
    """Return the delegates of a program, nested graphs included."""
    return [
        getattr(module, str(node.target))
        for _, module in walk(program.graph_module)
        for node in module.graph.nodes
        if node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), LoweredBackendModule)
    ]


def placeholders(graph_module: GraphModule) -> list[str]:
    """Return the names of a graph's placeholders."""
    return [node.name for node in graph_module.graph.nodes if node.op == "placeholder"]


def without_address(value: object) -> str:
    """Name a parameter of a test; processes that share the tests have to agree on the name."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def snapshot(program: ExportedProgram) -> dict[str, Any]:
    """Describe all that a lowering could change: graphs, metadata, signature, tables and their tensors."""
    tensors = {**program.state_dict, **program.constants}
    return {
        "nodes": [
            (path, node.name, node.op, str(node.target), str(node.args), str(node.kwargs))
            for path, node in every_node(program.graph_module)
        ],
        "meta": [
            sorted((key, id(value)) for key, value in node.meta.items()) for _, node in every_node(program.graph_module)
        ],
        "modules": sorted(name for name, _ in program.graph_module.named_modules()),
        "signature": str(program.graph_signature),
        "state_dict": list(program.state_dict),
        "constants": list(program.constants),
        "tensors": {name: (id(tensor), _digest(tensor)) for name, tensor in tensors.items()},
    }


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
