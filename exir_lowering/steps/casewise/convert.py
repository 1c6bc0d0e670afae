"""From `torch.export` output to Edge dialect, in the same steps as ExecuTorch, each by cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from exir_lowering._upstream import conversion
from exir_lowering.graphs.copies import has_symbols, private_copy
from exir_lowering.steps.casewise.decompose import decompose, with_graph
from exir_lowering.steps.casewise.dialect import to_edge_operators
from exir_lowering.steps.casewise.inplace import is_mutable
from exir_lowering.steps.casewise.value_keys import Uncovered


class Conversion:
    """Converts one program; remembers what went ExecuTorch's way, and why."""

    def __init__(self, name: str, config: EdgeCompileConfig) -> None:
        self.uncovered: tuple[str, ...] = ()  # the steps that did, each with the reason
        self._name, self._config = name, config

    def convert(self, program: ExportedProgram, partitioners: Sequence[Any]) -> ExportedProgram:
        """Convert a private copy to Edge dialect; raise Uncovered if it cannot be converted by cases."""
        inputs = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
        sizes = [size for value in inputs if isinstance(value, torch.Tensor) for size in value.shape]
        dynamic = not all(type(size) is int for size in sizes)
        if dynamic and any(type(value) in (int, float) for value in inputs):
            raise Uncovered("numbers as inputs beside dynamic sizes")  # torch makes symbols of them
        for partitioner in partitioners:
            program = partitioner.transform_for_pre_decomposition(program)
        program = self._decompose("functionalization", program, {})
        preserved: list[Any] = []
        if not partitioners:
            table = conversion.default_table()
            for op in self._config.preserve_ops:
                table.pop(op, None)
            program = self._decompose("decomposition", program, table)
        for partitioner in partitioners:
            program, kept = self._decompose_for(partitioner, program)
            preserved += [op for op in kept if op not in preserved]
        return self._to_edge(program, preserved)

    def rename(self, program: ExportedProgram) -> ExportedProgram:
        """Convert a private copy that is functional and decomposed already; raise what torch and ExecuTorch do."""
        return self._to_edge(program, self._config.preserve_ops)

    def _decompose(self, step: str, program: ExportedProgram, table: Mapping[Any, Any]) -> ExportedProgram:
        try:
            return decompose(_trial(program), table)
        except Uncovered as reason:
            self.uncovered += (f"{step}: {reason}",)
            decomposed: ExportedProgram = program.run_decompositions(dict(table))
            return decomposed

    def _decompose_for(self, partitioner: Any, program: ExportedProgram) -> tuple[ExportedProgram, list[Any]]:
        """Decompose what a partitioner does not keep whole; return which operators it keeps."""
        wanted, _ = partitioner.ops_to_not_decompose(program)
        table = conversion.default_table()
        if conversion.can_preserve_directly(partitioner, program):
            kept = [op for op in wanted if table.pop(op, None) is not None]
            if conversion.contains_any(program.graph_module, table):
                program = self._decompose("decomposition", program, table)
            return program, kept
        for op in conversion.preservable(wanted):
            table.pop(op, None)
        program = self._decompose("decomposition", program, table)
        found = conversion.set_preserved_apart(self._name, program, {self._name: [partitioner]}) or []
        program = self._decompose("decomposition of what is not preserved", program, conversion.default_table())
        conversion.restore_preserved(program)
        return program, list(found)

    def _to_edge(self, program: ExportedProgram, preserved: Sequence[Any]) -> ExportedProgram:
        program = conversion.remove_unused_parameters_pass(program)
        try:
            graph_module = to_edge_operators(_trial(program).graph_module, self._config)
        except Uncovered as reason:
            self.uncovered += (f"Edge operators: {reason}",)
            return conversion.generate_edge_program(self._config, program, preserved)
        edge = with_graph(program, graph_module)
        conversion.set_verifier(edge, conversion.edge_verifier(self._config, preserved))
        edge = conversion.finish_edge(edge)
        conversion.verify_signature(edge)
        return edge


def _trial(program: ExportedProgram) -> ExportedProgram:
    """Return a program to try on what ExecuTorch must find as it is: a copy, unless the attempt changes nothing."""
    changed = any(
        node.op == "get_attr" or is_mutable(node) or node.target is conversion.ASSERT_METADATA
        for node in program.graph.nodes
    )
    if not changed and not has_symbols(program):
        return program
    tried = private_copy(program)
    _drop_metadata_asserts(tried)
    return tried


def _drop_metadata_asserts(program: ExportedProgram) -> None:
    """Remove asserts on metadata, but those that alone keep what they look at: decomposing would drop random calls."""
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule) and any(
            node.target is conversion.ASSERT_METADATA for node in module.graph.nodes
        ):
            read = _list_read(module.graph)
            for node in list(module.graph.nodes):
                if (
                    node.target is conversion.ASSERT_METADATA
                    and not node.users
                    and read.issuperset(node.all_input_nodes)
                ):
                    module.graph.erase_node(node)


def _list_read(graph: Graph) -> set[Node]:
    """Return the nodes that a graph is left with without asserts about metadata, when what nothing reads is removed."""
    read: set[Node] = set()
    for node in reversed(graph.nodes):
        kept = node.is_impure(impure_random=False) and node.target is not conversion.ASSERT_METADATA
        if node in read or (kept and not is_mutable(node)):  # nothing may read what is written
            read.add(node)
            read.update(node.all_input_nodes)
    return read
