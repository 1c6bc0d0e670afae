"""What torch and ExecuTorch do to a program on its way to Edge dialect, in parts that can be applied to any graph."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache, partial
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig
from executorch.exir._program_utils import _get_updated_graph_signature, _get_updated_range_constraints
from executorch.exir.dialects.edge._ops import EdgeOpOverload as EdgeOpOverload
from executorch.exir.pass_base import _TORCH_SYM_OPS
from executorch.exir.pass_manager import _can_eliminate_common_getitems
from executorch.exir.passes import convert_constant_dim_order_pass
from executorch.exir.passes.debug_handle_generator_pass import DebugHandleGeneratorPass
from executorch.exir.passes.dim_order_ops_registry import DimOrderOpsMap
from executorch.exir.passes.memory_format_ops_pass import MemoryFormatOpsPass
from executorch.exir.passes.remove_graph_asserts_pass import RemoveNonCoreAtenOpGraphAssertsPass
from executorch.exir.passes.remove_noop_pass import _DEQUANT_OPS, _QUANT_OPS, eliminate_dq_q as eliminate_dq_q
from executorch.exir.passes.remove_unused_parameters_pass import (
    remove_unused_parameters_pass as remove_unused_parameters_pass,
)
from executorch.exir.passes.replace_aten_with_edge_pass import (
    OpReplacePass,
    aten_to_edge as aten_to_edge,
    should_lower_to_edge as should_lower_to_edge,
)
from executorch.exir.program._program import (
    _can_skip_using_EDGE_DO_NOT_DECOMP,
    _default_decomposition_table,
    _generate_edge_program,
    _get_aten_to_edge_passes,
    _remove_invalid_ops_for_not_decompose,
    _replace_aten_ops_with_transformed_ops,
    _restore_transformed_ops_to_aten_ops,
    contains_any_call_fn_target_op,
    edge_no_decomp_namespace,
    lift_constant_tensor_pass,
)
from executorch.exir.verification.verifier import EXIREdgeDialectVerifier
from torch._export.passes._node_metadata_hook import _node_metadata_hook, _set_node_metadata_hook
from torch._export.passes.replace_view_ops_with_view_copy_ops_pass import (
    ReplaceViewOpsWithViewCopyOpsPass,
    get_view_copy_of_view_op,
)
from torch._export.utils import _special_op_to_preserve_cia
from torch._export.verifier import Verifier as Verifier, _verify_exported_program_signature
from torch._higher_order_ops.effects import has_effects as has_effects  # keeps calls in order, by passing tokens
from torch.export import ExportedProgram, exported_program
from torch.export.exported_program import _common_getitem_elimination_pass, _split_decomp_table_to_cia_and_python_decomp
from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts

ASSERT_METADATA = torch.ops.aten._assert_tensor_metadata.default
SYMBOLIC_OPERATORS = frozenset(
    {*_TORCH_SYM_OPS, *(each for each in vars(operator).values() if callable(each) and not isinstance(each, type))}
)
"""The functions, not operators of torch, that compute sizes in graphs."""
DEQUANTIZE = frozenset(_DEQUANT_OPS)
QUANTIZE = frozenset(_QUANT_OPS)
DIM_ORDER_OPERATORS = frozenset(DimOrderOpsMap)

_ADDED_BY = 'File "torch/fx/passes/runtime_assert.py", line 24, in insert_deferred_runtime_asserts'  # as in torch

can_preserve_directly = _can_skip_using_EDGE_DO_NOT_DECOMP
contains_any = contains_any_call_fn_target_op
default_table = _default_decomposition_table
preservable = _remove_invalid_ops_for_not_decompose
restore_preserved = _restore_transformed_ops_to_aten_ops
set_preserved_apart = _replace_aten_ops_with_transformed_ops
updated_signature = _get_updated_graph_signature
verify_signature = _verify_exported_program_signature


def add_sizes(graph_module: torch.fx.GraphModule, shape_env: Any) -> None:
    """Add nodes for the sizes of inputs, as torch does after it has traced a program; they replace those there are."""
    graph, metadata = graph_module.graph, {"stack_trace": _ADDED_BY}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    sizes = []
    with graph.inserting_after(inputs[-1]):
        reader = graph.call_function(tuple)  # torch removes those that nothing reads
    with graph.inserting_before(reader):
        for node in inputs:
            for axis, size in enumerate(getattr(node.meta.get("val"), "shape", ())):
                if isinstance(size, torch.SymInt):
                    sizes.append(graph.call_function(torch.ops.aten.sym_size.int, (node, axis)))
                    sizes[-1].meta["val"] = size
    reader.args = (tuple(sizes),)
    with _set_node_metadata_hook(graph_module, partial(_node_metadata_hook, metadata=metadata)):
        insert_deferred_runtime_asserts(graph_module, shape_env, "exported program", export=True)
    graph.erase_node(reader)


def split_table(table: Mapping[Any, Any]) -> tuple[Set[Any], Set[Any]]:
    """Return the composite operators that a table of decompositions leaves whole, and those it decomposes in Python."""
    whole = {op for op, do in table.items() if do is _special_op_to_preserve_cia}
    composite = exported_program._collect_all_valid_cia_ops()  # type: ignore[attr-defined]  # as it is replaced now
    return _split(frozenset(table), frozenset(whole), frozenset(composite))


@lru_cache(maxsize=8)  # for the same tables, each conversion asks several times
def _split(
    named: frozenset[Any], whole: frozenset[Any], composite: frozenset[Any]
) -> tuple[frozenset[Any], frozenset[Any]]:
    """Do what `split_table` does, for the operators in a table, those left whole in it, and all composite ones."""
    table: dict[Any, Any] = {op: _special_op_to_preserve_cia if op in whole else None for op in named}
    found, in_python = _split_decomp_table_to_cia_and_python_decomp(table)
    return frozenset(op for op, do in found.items() if do is _special_op_to_preserve_cia), frozenset(in_python)


def has_order_of_torch() -> bool:
    """Return whether torch is told to put the nodes of programs that it decomposes in an order of its own."""
    config = sys.modules.get("torch._dynamo.config")
    return bool(getattr(config, "canonicalize_output_graph_node_order", False))  # not before torch 2.14


def view_copy_of(target: Any) -> Any:
    """Return the operator that copies what an operator would return a view of, None if it returns no view."""
    return get_view_copy_of_view_op(target._schema)


def skips_dim_order(config: EdgeCompileConfig) -> bool:
    """Return whether a configuration keeps operators with memory formats."""
    return bool(config._skip_dim_order)


def take_calling_convention(graph: torch.fx.Graph, other: torch.fx.Graph) -> None:
    """Make a graph take its arguments, and return its results, as another one does."""
    graph.set_codegen(other._codegen)


def is_kept_apart(target: Any) -> bool:
    """Return whether an operator is the stand-in that keeps another one from being decomposed."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == edge_no_decomp_namespace


def set_verifier(program: ExportedProgram, verifier: Any) -> None:
    """Make a program one of the dialect that a verifier class checks."""
    program._verifiers = [verifier]


def dialect_passes(config: EdgeCompileConfig) -> list[Any]:
    """Return ExecuTorch's passes from core ATen to Edge operators, in its order."""
    before, _ = _get_aten_to_edge_passes(config)
    passes = [RemoveNonCoreAtenOpGraphAssertsPass(), ReplaceViewOpsWithViewCopyOpsPass(), *before, OpReplacePass()]
    return passes if config._skip_dim_order else [*passes, MemoryFormatOpsPass()]


def edge_verifier(config: EdgeCompileConfig, preserved: Sequence[Any]) -> Any:
    """Return the verifier class that ExecuTorch gives to a converted program."""
    return EXIREdgeDialectVerifier(edge_compile_config=config, class_only=True, preserve_ops=list(preserved))


def generate_edge_program(
    config: EdgeCompileConfig, program: ExportedProgram, preserved: Sequence[Any]
) -> ExportedProgram:
    """Convert a decomposed program to Edge dialect by ExecuTorch's passes, and check it; raises whatever they raise."""
    converted: ExportedProgram = _generate_edge_program(config, program, preserve_ops=list(preserved))
    return converted


def finish_edge(program: ExportedProgram) -> ExportedProgram:  # program is changed
    """Lift constants, make them contiguous, remove dead code and number operators, as ExecuTorch does at the end."""
    program = _in_order_of_signature(lift_constant_tensor_pass(program))
    program = convert_constant_dim_order_pass.convert_constant_dim_order_pass(program)
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            module.graph.eliminate_dead_code()
    DebugHandleGeneratorPass()(program.graph_module)
    program._graph_signature = _get_updated_graph_signature(program.graph_signature, program.graph_module)
    if _can_eliminate_common_getitems(program.graph_module):
        _common_getitem_elimination_pass(program.graph_module, program.graph_signature, program.module_call_graph)
    program._range_constraints = _get_updated_range_constraints(program.graph_module)
    return program


def _in_order_of_signature(program: ExportedProgram) -> ExportedProgram:
    """Put inputs in the order of their signature, which ExecuTorch reverses where there is no user input."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    names = [spec.arg.name for spec in program.graph_signature.input_specs]
    if list(placeholders) != names and sorted(placeholders) == sorted(names):
        body = next(node for node in program.graph.nodes if node.op != "placeholder")
        for name in names:
            body.prepend(placeholders[name])
    return program
