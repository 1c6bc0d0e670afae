"""Copies of graphs and programs that share their tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram, ExportGraphSignature
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Graph, GraphModule, Node

from exir_lowering._upstream.programs import assemble_program, guards_code_of, lazy_graph_module
from exir_lowering.graphs.walking import attribute

LIFTED_ORDER = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
"""The kinds of lifted inputs, in the order of a partition's placeholders."""


def copy_graph_module(graph_module: GraphModule) -> GraphModule:
    """Copy a graph and the graphs nested in it. Tensors, lowered modules and metadata values are shared."""
    graph = Graph()
    root: dict[str, Any] = {}
    env: dict[Node, Node] = {}
    for node in graph_module.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        if node.op == "get_attr" and node.target not in root:
            value = attribute(graph_module, node.target)
            root[node.target] = copy_graph_module(value) if isinstance(value, GraphModule) else value
    copied = lazy_graph_module(root, graph)
    copied.meta.update(graph_module.meta)
    return copied


def copy_program(
    program: ExportedProgram, graph_module: GraphModule | None = None, *, kind: type[ExportedProgram] = ExportedProgram
) -> ExportedProgram:
    """Copy a program's graph (or use another one), signature and tables; the tensors are shared."""
    return assemble_program(
        graph_module=graph_module or copy_graph_module(program.graph_module),
        signature=copy_signature(program),
        state_dict=dict(program.state_dict),
        constants=dict(program.constants),
        range_constraints=dict(program.range_constraints),
        module_call_graph=list(program.module_call_graph),
        example_inputs=program.example_inputs,
        verifiers=program.verifiers,
        guards_code=guards_code_of(program),
        kind=kind,
    )


def copy_signature(program: ExportedProgram) -> ExportGraphSignature:
    """Copy a program's signature, including its names: torch renames them in place when a node is replaced."""
    signature = program.graph_signature
    inputs = [replace(spec, arg=copy.copy(spec.arg)) for spec in signature.input_specs]
    outputs = [replace(spec, arg=copy.copy(spec.arg)) for spec in signature.output_specs]
    return ExportGraphSignature(input_specs=inputs, output_specs=outputs)


def lifted_inputs(program: ExportedProgram) -> dict[Node, InputSpec]:
    """Return the placeholders that hold parameters, buffers and lifted constants, with their specs."""
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = program.graph_signature.input_specs
    return {node: spec for node, spec in zip(placeholders, specs, strict=True) if spec.kind in LIFTED_ORDER}


def own_state(programs: Iterable[ExportedProgram]) -> None:
    """Give programs their own copy of the current state, so that later runs of theirs and of the model are independent.

    Args:
        programs: Private copies, whose tables are changed. Programs that share a buffer still share it afterwards.
    """
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for program in programs:
        for name in set(program.graph_signature.buffers_to_mutate.values()):
            for table in (program.state_dict, program.constants):
                tensor = table.get(name)
                if isinstance(tensor, torch.Tensor):
                    table[name] = copies.setdefault(id(tensor), (tensor, tensor.detach().clone()))[1]
