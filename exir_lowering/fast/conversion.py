"""From `torch.export` output to Edge dialect, in the same steps as ExecuTorch, each by distinct calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig
from executorch.exir._program_utils import _get_updated_graph_signature, _get_updated_range_constraints
from executorch.exir.pass_manager import _can_eliminate_common_getitems
from executorch.exir.passes import convert_constant_dim_order_pass
from executorch.exir.passes.debug_handle_generator_pass import DebugHandleGeneratorPass
from executorch.exir.passes.remove_unused_parameters_pass import remove_unused_parameters_pass
from executorch.exir.program._program import (
    _can_skip_using_EDGE_DO_NOT_DECOMP,
    _default_decomposition_table,
    _generate_edge_program,
    _remove_invalid_ops_for_not_decompose,
    _replace_aten_ops_with_transformed_ops,
    _restore_transformed_ops_to_aten_ops,
    contains_any_call_fn_target_op,
)
from executorch.exir.verification.verifier import EXIREdgeDialectVerifier
from torch._export.verifier import _verify_exported_program_signature
from torch.export import ExportedProgram
from torch.export.exported_program import _common_getitem_elimination_pass
from torch.fx import GraphModule, Node

from exir_lowering._upstream.fakes import decided, undecide
from exir_lowering._upstream.passes import lift_constants
from exir_lowering._upstream.programs import fake_mode_of
from exir_lowering._upstream.value_keys import NotCoveredError
from exir_lowering.fast.decompose import decompose, with_graph
from exir_lowering.fast.edge_operators import ASSERT_METADATA, to_edge_operators
from exir_lowering.fast.inplace import is_mutable
from exir_lowering.graphs.copies import has_symbols, private_copy


class Conversion:
    """Converts one program; remembers what went ExecuTorch's way, and why."""

    def __init__(self, name: str, config: EdgeCompileConfig) -> None:
        self.left: tuple[str, ...] = ()  # the steps that did, each with the reason
        self._name, self._config = name, config

    def convert(self, program: ExportedProgram, partitioners: Sequence[Any], decomposed: bool) -> ExportedProgram:
        """Convert a private copy to Edge dialect; raise NotCoveredError, or what torch and ExecuTorch do."""
        if decomposed:
            return self._to_edge(program, self._config.preserve_ops)
        inputs = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
        sizes = [size for value in inputs if isinstance(value, torch.Tensor) for size in value.shape]
        dynamic = not all(type(size) is int for size in sizes)
        if dynamic and any(type(value) in (int, float) for value in inputs):
            raise NotCoveredError("numbers as inputs beside dynamic sizes")  # torch makes symbols of them
        for partitioner in partitioners:
            program = partitioner.transform_for_pre_decomposition(program)
        program = self._decompose("functionalization", program, {})
        preserved: list[Any] = []
        if not partitioners:
            table = _default_decomposition_table()
            for op in self._config.preserve_ops:
                table.pop(op, None)
            program = self._decompose("decomposition", program, table)
        for partitioner in partitioners:
            program, kept = self._decompose_for(partitioner, program)
            preserved += [op for op in kept if op not in preserved]
        return self._to_edge(program, preserved)

    def _decompose(self, step: str, program: ExportedProgram, table: Mapping[Any, Any]) -> ExportedProgram:
        before = decided(env := getattr(fake_mode_of(program.graph_module), "shape_env", None))
        try:
            return decompose(_trial(program), table)
        except NotCoveredError as reason:
            self.left += (f"{step}: {reason}",)
            undecide(env, before)
            decomposed: ExportedProgram = program.run_decompositions(dict(table))
            return decomposed

    def _decompose_for(self, partitioner: Any, program: ExportedProgram) -> tuple[ExportedProgram, list[Any]]:
        """Decompose what a partitioner does not keep whole; return which operators it keeps."""
        wanted, _ = partitioner.ops_to_not_decompose(program)
        table = _default_decomposition_table()
        if _can_skip_using_EDGE_DO_NOT_DECOMP(partitioner, program):
            kept = [op for op in wanted if table.pop(op, None) is not None]
            if contains_any_call_fn_target_op(program.graph_module, table):
                program = self._decompose("decomposition", program, table)
            return program, kept
        for op in _remove_invalid_ops_for_not_decompose(wanted):
            table.pop(op, None)
        program = self._decompose("decomposition", program, table)
        found = _replace_aten_ops_with_transformed_ops(self._name, program, {self._name: [partitioner]}) or []
        program = self._decompose("decomposition of what is not preserved", program, _default_decomposition_table())
        _restore_transformed_ops_to_aten_ops(program)
        return program, list(found)

    def _to_edge(self, program: ExportedProgram, preserved: Sequence[Any]) -> ExportedProgram:
        program = remove_unused_parameters_pass(program)
        before = decided(env := getattr(fake_mode_of(program.graph_module), "shape_env", None))
        try:
            graph_module = to_edge_operators(_trial(program).graph_module, self._config)
        except NotCoveredError as reason:
            self.left += (f"Edge operators: {reason}",)
            undecide(env, before)
            converted: ExportedProgram = _generate_edge_program(self._config, program, preserve_ops=list(preserved))
            return converted
        edge = with_graph(program, graph_module)
        edge._verifiers = [
            EXIREdgeDialectVerifier(edge_compile_config=self._config, class_only=True, preserve_ops=list(preserved))
        ]
        edge = _finish(edge)
        _verify_exported_program_signature(edge)
        return edge


def _finish(program: ExportedProgram) -> ExportedProgram:
    """Lift constants, make them contiguous, remove dead code and number operators, as ExecuTorch does at the end."""
    program = lift_constants(program)
    program = convert_constant_dim_order_pass.convert_constant_dim_order_pass(program)
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            module.graph.eliminate_dead_code()
    DebugHandleGeneratorPass()(program.graph_module)
    program._graph_signature = _get_updated_graph_signature(program.graph_signature, program.graph_module)
    if _can_eliminate_common_getitems(program.graph_module):
        _common_getitem_elimination_pass(program.graph_module, program.graph_signature, program.module_call_graph)
    program._range_constraints = _get_updated_range_constraints(program.graph_module)
    for node in program.graph.find_nodes(op="placeholder"):
        node.meta.pop("tensor_meta", None)  # decomposing makes inputs without it, and OpenVINO prefers it to the value
    return program


def _trial(program: ExportedProgram) -> ExportedProgram:
    """Return a program to try on what ExecuTorch must find as it is: a copy, unless the attempt changes nothing."""
    changed = any(
        node.op == "get_attr" or is_mutable(node) or node.target is ASSERT_METADATA for node in program.graph.nodes
    )
    if not changed and not has_symbols(program, unbacked=True):
        return program
    tried = private_copy(program)
    for module in tried.graph_module.modules():
        if isinstance(module, GraphModule) and module.graph.find_nodes(op="call_function", target=ASSERT_METADATA):
            _drop_metadata_asserts(module)
    return tried


def _drop_metadata_asserts(module: GraphModule) -> None:
    """Remove asserts on metadata, but those that alone keep what they look at: decomposing would drop random calls."""
    read: set[Node] = set()  # what the graph is left with without them, when what nothing reads is removed
    for node in reversed(module.graph.nodes):
        kept = node.is_impure(impure_random=False) and node.target is not ASSERT_METADATA
        if node in read or (kept and not is_mutable(node)):  # nothing may read what is written
            read.add(node)
            read.update(node.all_input_nodes)
    for node in module.graph.find_nodes(op="call_function", target=ASSERT_METADATA):
        if not node.users and read.issuperset(node.all_input_nodes):
            module.graph.erase_node(node)
