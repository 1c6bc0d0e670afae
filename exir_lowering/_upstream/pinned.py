"""What depends on which code of torch and ExecuTorch: see `pins`, which compares it with the digests in `digests`."""

from __future__ import annotations

from dataclasses import dataclass

from exir_lowering._upstream.digests import DIGESTS as DIGESTS


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that is right only with upstream code that is known."""

    name: str
    does: str
    without: str  # what happens instead when it is off
    places: tuple[str, ...]  # each "module:name" that has to be known
    when_imported: tuple[str, ...] = ()  # the modules among them that count only if something has imported them


def _in(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}:{name}" for name in names)


_BASE = "executorch.exir.pass_base"
_PASSES = "executorch.exir.passes"
_PROGRAM = "executorch.exir.program._program"
_EXPORTED = "torch.export.exported_program"
_XNNPACK = "executorch.backends.xnnpack"
_DELEGATE = "torch._higher_order_ops.executorch_call_delegate"

_TRACING = (
    *_in(_BASE, "_ExportPassBase", "ExportPass", "ProxyValue"),
    *_in("torch._export.pass_base", "_ExportPassBaseDeprecatedDoNotUse"),
    *_in("torch.fx.passes.infra.pass_base", "PassBase"),
    *_in("executorch.exir.dialects.edge._ops", "EdgeOpOverload.__call__"),
    *_in(_DELEGATE, "call_delegate_cpu", "call_delegate_fake_tensor_mode"),
)
"""What passes are made from that retrace a graph."""

_FOLDING = _in(f"{_PASSES}.fold_redundant_qdq_pass", "FoldRedundantDequantizeQuantizePass")
"""The pass to Edge dialect that looks at more than one call."""

_DIALECT = (
    *_TRACING,
    *_FOLDING,
    *_in(f"{_PASSES}.remove_graph_asserts_pass", "RemoveNonCoreAtenOpGraphAssertsPass"),
    *_in(
        "torch._export.passes.replace_view_ops_with_view_copy_ops_pass",
        *("ReplaceViewOpsWithViewCopyOpsPass", "get_view_copy_of_view_op", "is_view_op"),
        *("_NON_FUNCTIONAL_OPS_TO_FUNCTIONAL_OPS",),
    ),
    *_in(f"{_PASSES}.replace_sym_size_op_pass", "ReplaceSymSizeOpPass", "replacements"),
    *_in(f"{_PASSES}.normalize_transpose_pass", "NormalizeTransposePass"),
    *_in(f"{_PASSES}.replace_broken_ops_with_function_ops_pass", "ReplaceBrokenOpsWithFunctionalOpsPass"),
    *_in(f"{_PASSES}.scalar_to_tensor_pass", "ScalarToTensorPass"),
    *_in(f"{_PASSES}.sym_to_tensor_pass", "SymToTensorPass"),
    *_in(f"{_PASSES}.remove_noop_pass", "RemoveNoopPass", "RemoveToCopyPass", "_DEQUANT_OPS", "_QUANT_OPS"),
    *_in(f"{_PASSES}.remove_noop_pass", "eliminate_dq_q"),
    *_in(f"{_PASSES}.prune_empty_tensors_pass", "PruneEmptyTensorsPass"),
    *_in(f"{_PASSES}.remove_mixed_type_operators", "RemoveMixedTypeOperators"),
    *_in(f"{_PASSES}.replace_aten_with_edge_pass", "OpReplacePass", "aten_to_edge", "should_lower_to_edge"),
    *_in(f"{_PASSES}.memory_format_ops_pass", "MemoryFormatOpsPass"),
    *_in(f"{_PASSES}.dim_order_ops_registry", "DimOrderOpsMap"),
)
"""The passes from core ATen to Edge operators, and what they look up."""

FEATURES = (
    Feature(
        "fast Edge conversion",
        "each distinct operator call is converted once",
        "ExecuTorch converts the whole program",
        (
            *_in(
                _PROGRAM,
                *("_generate_edge_program", "_gen_edge_manager_for_partitioners", "_get_aten_to_edge_passes"),
                *("_can_skip_using_EDGE_DO_NOT_DECOMP", "_default_decomposition_table"),
                *("_remove_invalid_ops_for_not_decompose", "_replace_aten_ops_with_transformed_ops"),
                *("_restore_transformed_ops_to_aten_ops", "contains_any_call_fn_target_op", "edge_no_decomp_namespace"),
                *("lift_constant_tensor_pass", "_transform"),
            ),
            *_in("executorch.exir._program_utils", "_get_updated_graph_signature", "_get_updated_range_constraints"),
            *_in(_BASE, "_TORCH_SYM_OPS"),
            *_in("executorch.exir.pass_manager", "_can_eliminate_common_getitems"),
            *_in(f"{_PASSES}.convert_constant_dim_order_pass", "convert_constant_dim_order_pass"),
            *_in(f"{_PASSES}.debug_handle_generator_pass", "DebugHandleGeneratorPass"),
            *_in(f"{_PASSES}.remove_unused_parameters_pass", "remove_unused_parameters_pass", "_is_parameter_used"),
            *_FOLDING,
            *_in(_PASSES, "base_pre_op_replace_passes", "base_post_op_replace_passes"),
            *_in("executorch.exir.verification.verifier", "EXIREdgeDialectVerifier"),
            *_in("torch._export.passes._node_metadata_hook", "_node_metadata_hook", "_set_node_metadata_hook"),
            *_in("torch._export.utils", "_get_decomp_for_cia", "_special_op_to_preserve_cia"),
            *_in("torch._export.verifier", "Verifier", "_verify_exported_program_signature"),
            *_in(
                _EXPORTED,
                *("ExportedProgram.run_decompositions", "_decompose_exported_program"),
                *("_decompose_and_get_gm_with_new_signature_constants", "_common_getitem_elimination_pass"),
                *("_split_decomp_table_to_cia_and_python_decomp", "_override_composite_implicit_decomp"),
            ),
            *_in("torch.fx.passes.runtime_assert", "insert_deferred_runtime_asserts"),
            *_in("torch.fx.proxy", "_COPY_META_FIELDS"),
            *_in("torch.fx.traceback", "NodeSource", "NodeSourceAction"),
        ),
    ),
    Feature(
        "Edge operators by name",
        "operators that the Edge passes only rename are replaced without running the passes",
        "the passes run once for each distinct call",
        _DIALECT,
    ),
    Feature(
        "reused pass results",
        "the values that passes compute for nodes are computed once for equal calls",
        "each pass computes them again",
        (
            *_TRACING,
            *_in("executorch.exir.lowered_backend_module", "LoweredBackendModule.forward"),
            *_in("torch._subclasses.fake_tensor", "FakeTensor.__new__"),
        ),
    ),
    Feature(
        "lazy graph code",
        "a graph module is compiled when its code is first needed",
        "each pass compiles the graphs that it changes",
        (
            *_in("torch.fx.graph_module", "GraphModule.recompile", "GraphModule._recompile_submodules"),
            *_in("torch.fx.graph_module", "GraphModule.__reduce__", "GraphModule.__reduce_package__"),
            *_in("torch.fx.graph_module", "GraphModule.__new__"),
        ),
    ),
    Feature(
        "signature tables",
        "the look-up tables of a program's signature are built once",
        "torch builds one for each look-up",
        _in(
            "torch.export.graph_signature",
            *("ExportGraphSignature", "InputSpec", "OutputSpec", "TensorArgument", "SymIntArgument"),
            *("SymFloatArgument", "SymBoolArgument"),
        ),
    ),
    Feature(
        "node histories",
        "nodes share the older part of their history",
        "torch copies it for each node",
        _in("torch.fx.traceback", "NodeSource"),
    ),
    Feature(
        "composite operators",
        "torch's composite operators are looked up once",
        "each conversion asks torch's dispatcher five times",
        (
            *_in("torch._export.utils", "_collect_all_valid_cia_ops", "_collect_all_valid_cia_ops_for_namespace"),
            *_in("torch._export.utils", "_collect_all_valid_cia_ops_for_aten_namespace", "_materialize_cpp_cia_ops"),
            *_in("torch._export.utils", "_is_preservable_cia_op", "_is_cia_op"),
        ),
    ),
    Feature(
        "dim orders and annotations",
        "dimension orders and class annotations are computed once",
        "ExecuTorch computes them for each tensor and each object",
        (
            *_in("executorch.exir.tensor", "dim_order_from_stride"),
            *_in("executorch.exir._serialize._dataclass", "_DataclassEncoder", "_json_to_dataclass"),
        ),
    ),
    Feature(
        "passes of XNNPACK",
        "passes with nothing to do are skipped",
        "each of them runs, and retraces the graph",
        (
            *_TRACING,
            *_in("torch.fx.graph_module", "GraphModule.print_readable"),
            *_in(f"{_XNNPACK}._passes", "XNNPACKPassManager"),
        ),
        (f"{_XNNPACK}._passes",),
    ),
    Feature(
        "content comparison",
        "emitted contents are compared byte by byte, and kept once",
        "ExecuTorch hashes them with SHA-256, several times",
        (
            *_in(
                "executorch.exir._serialize._named_data_store",
                *("NamedDataStore._sha256", "NamedDataStore._get_buffer_sha256"),
                *("NamedDataStore._add_named_data_to_map",),
            ),
            *_in(
                "executorch.exir.emit._emitter",
                *("_Emitter._tensor_spec_to_evalue", "_Emitter._save_new_const_tensor", "_Emitter._emit_delegate"),
            ),
        ),
    ),
    Feature(
        "loops in files",
        "`while_loop` is planned and emitted",
        "it is refused",
        (
            *_in(
                "executorch.exir.emit._emitter",
                *("_Emitter.__init__", "_Emitter.placeholder", "_Emitter.output", "_Emitter._emit_control_flow"),
                *("_Emitter._emit_cond", "_Emitter._emit_spec", "_Emitter._emit_evalue", "_Emitter._merge_chain"),
                *("_Emitter._get_operator",),
            ),
            *_in("executorch.exir.memory_planning", "get_while_nodes", "_apply_algo_to_submodules"),
        ),
    ),
    Feature(
        "reused XNNPACK hashes",
        "the SHA-256 of equal data is computed once",
        "ExecuTorch computes it for each method",
        _in(
            f"{_XNNPACK}.operators.node_visitor",
            *("NodeVisitor.get_quant_params", "NodeVisitor.get_serialized_buffer_index"),
        ),
        (f"{_XNNPACK}.operators.node_visitor",),
    ),
    Feature(
        "scalar operands",
        "Python numbers in operator calls keep their type and digits in Edge programs",
        "they become the tensors that ExecuTorch's ScalarToTensorPass makes",
        _in(f"{_PASSES}.scalar_to_tensor_pass", "ScalarToTensorPass.call_operator"),
    ),
    Feature(
        "empty concatenations",
        "concatenations of empty tensors keep computed sizes",
        "they get the sizes that ExecuTorch's PruneEmptyTensorsPass writes",
        _in(f"{_PASSES}.prune_empty_tensors_pass", "PruneEmptyTensorsPass.remove_empty_tensors_from_cat"),
    ),
    Feature(
        "operators without torch's compiler",
        "operators on meta tensors do not import torch's compiler",
        "the first one imports it",
        _in("torch._compile", "_disable_dynamo"),
    ),
    Feature(
        "lazy inductor import",
        "ExecuTorch's compiler is imported without torch's inductor, which is imported where a program needs it",
        "both are imported at once",
        (
            *_in("torch.export._remove_auto_functionalized_pass", "unsafe_remove_auto_functionalized_pass"),
            "file:torch/_inductor/fx_passes/post_grad.py",  # not imported, so that it cannot be asked otherwise
        ),
    ),
    Feature(
        "refusal reasons",
        "reports include the reasons that ExecuTorch's partitioners give for leaving an operator on the host",
        "reports lack these reasons",
        (
            *_in("executorch.exir.backend.utils", "WhyNoPartition.__call__", "WhyNoPartitionReporter.report_reject"),
            *_in("torch.fx.passes.infra.partitioner", "CapabilityBasedPartitioner._is_node_supported"),
        ),
    ),
    Feature(
        "linear-time proposals",
        "ExecuTorch's partitioners propose partitions in linear time, if requested",
        "they use ExecuTorch's algorithm",
        (
            *_in(
                "torch.fx.passes.infra.partitioner",
                *("CapabilityBasedPartitioner.propose_partitions", "CapabilityBasedPartitioner.__init__"),
                *("_DependencyViewer",),
            ),
            *_in(
                "executorch.exir.backend.canonical_partitioners.group_partitioner",
                *("GroupBasedPartitioner.propose_partitions", "GroupBasedPartitioner.__init__"),
            ),
        ),
    ),
    Feature(
        "sizes without guards",
        "torch's choice of a kernel for a convolution leaves dynamic sizes as they are",
        "a dynamic dimension may be narrowed, which the report says",
        (
            *_in("torch._subclasses.fake_impls", "conv"),
            *_in("torch.fx.passes.shape_prop", "_extract_tensor_metadata"),
            *_in("torch._higher_order_ops.utils", "_unstack_pytree"),
            *_in("executorch.exir.pass_base", "_unstack_pytree"),
        ),
    ),
    Feature(
        "restored kernels",
        "what a conversion replaces in torch's operators is restored if it is interrupted",
        "torch restores it unless it is interrupted",
        (
            *_in(_EXPORTED, "_override_composite_implicit_decomp"),
            *_in("torch._subclasses.fake_impls", "register_op_impl", "_deregister_op_impl"),
        ),
    ),
    Feature(
        "reused kernels",
        "the kernels that conversions put into torch's composite operators are made once",
        "each conversion makes ten thousand of them",
        (
            *_in("torch._higher_order_ops.utils", "autograd_not_implemented"),
            *_in("torch._export.utils", "_get_decomp_for_cia"),
            *_in(_EXPORTED, "_override_composite_implicit_decomp"),
            *_in("torch._ops", "OperatorBase.py_impl"),
            *_in("torch._subclasses.fake_impls", "register_op_impl", "_deregister_op_impl"),
        ),
    ),
)
"""Everything that is off where upstream's code is not known."""
