"""What depends on which code of torch and ExecuTorch: see `pins`, which compares it with the digests in pins.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that is right only with upstream code that is known."""

    name: str
    does: str
    without: str  # what happens instead when it is off
    code: str  # what has to be known, by module: "module: name name", a module a line

    @property
    def places(self) -> tuple[str, ...]:
        """Return each "module:name" that has to be known."""
        lines = (line.strip().partition(": ") for line in self.code.strip().splitlines())
        return tuple(f"{module}:{name}" for module, _, names in lines for name in names.split())


# What passes are made from that retrace a graph.
_TRACING = """
    executorch.exir.pass_base: _ExportPassBase ExportPass ProxyValue
    torch._export.pass_base: _ExportPassBaseDeprecatedDoNotUse
    torch.fx.passes.infra.pass_base: PassBase
    executorch.exir.dialects.edge._ops: EdgeOpOverload.__call__
    torch._higher_order_ops.executorch_call_delegate: call_delegate_cpu call_delegate_fake_tensor_mode
"""
# The pass to Edge dialect that looks at more than one call.
_FOLDING = "executorch.exir.passes.fold_redundant_qdq_pass: FoldRedundantDequantizeQuantizePass\n"
_VIEWS = "torch._export.passes.replace_view_ops_with_view_copy_ops_pass"

FEATURES = (
    Feature(
        "fast Edge conversion",
        "each distinct operator call is converted once",
        "ExecuTorch converts the whole program",
        f"""
        executorch.exir.program._program: _generate_edge_program _gen_edge_manager_for_partitioners
        executorch.exir.program._program: _get_aten_to_edge_passes _can_skip_using_EDGE_DO_NOT_DECOMP
        executorch.exir.program._program: _default_decomposition_table _remove_invalid_ops_for_not_decompose
        executorch.exir.program._program: _replace_aten_ops_with_transformed_ops _restore_transformed_ops_to_aten_ops
        executorch.exir.program._program: contains_any_call_fn_target_op edge_no_decomp_namespace
        executorch.exir.program._program: lift_constant_tensor_pass _transform
        executorch.exir._program_utils: _get_updated_graph_signature _get_updated_range_constraints
        executorch.exir.pass_base: _TORCH_SYM_OPS
        executorch.exir.pass_manager: _can_eliminate_common_getitems
        executorch.exir.passes.convert_constant_dim_order_pass: convert_constant_dim_order_pass
        executorch.exir.passes.debug_handle_generator_pass: DebugHandleGeneratorPass
        executorch.exir.passes.remove_unused_parameters_pass: remove_unused_parameters_pass _is_parameter_used
        {_FOLDING}
        executorch.exir.passes: base_pre_op_replace_passes base_post_op_replace_passes
        executorch.exir.verification.verifier: EXIREdgeDialectVerifier
        torch._export.passes._node_metadata_hook: _node_metadata_hook _set_node_metadata_hook
        torch._export.utils: _get_decomp_for_cia _special_op_to_preserve_cia
        torch._export.verifier: Verifier _verify_exported_program_signature
        torch.export.exported_program: ExportedProgram.run_decompositions _decompose_exported_program
        torch.export.exported_program: _decompose_and_get_gm_with_new_signature_constants
        torch.export.exported_program: _common_getitem_elimination_pass _split_decomp_table_to_cia_and_python_decomp
        torch.export.exported_program: _override_composite_implicit_decomp
        torch.fx.passes.runtime_assert: insert_deferred_runtime_asserts
        torch.fx.proxy: _COPY_META_FIELDS
        torch.fx.traceback: NodeSource NodeSourceAction
        """,
    ),
    Feature(
        "Edge operators by name",
        "operators that the Edge passes only rename are replaced without running the passes",
        "the passes run once for each distinct call",
        f"""
        {_TRACING}{_FOLDING}
        executorch.exir.passes.remove_graph_asserts_pass: RemoveNonCoreAtenOpGraphAssertsPass
        {_VIEWS}: ReplaceViewOpsWithViewCopyOpsPass get_view_copy_of_view_op is_view_op
        {_VIEWS}: _NON_FUNCTIONAL_OPS_TO_FUNCTIONAL_OPS
        executorch.exir.passes.replace_sym_size_op_pass: ReplaceSymSizeOpPass replacements
        executorch.exir.passes.normalize_transpose_pass: NormalizeTransposePass
        executorch.exir.passes.replace_broken_ops_with_function_ops_pass: ReplaceBrokenOpsWithFunctionalOpsPass
        executorch.exir.passes.scalar_to_tensor_pass: ScalarToTensorPass
        executorch.exir.passes.sym_to_tensor_pass: SymToTensorPass
        executorch.exir.passes.remove_noop_pass: RemoveNoopPass RemoveToCopyPass _DEQUANT_OPS _QUANT_OPS eliminate_dq_q
        executorch.exir.passes.prune_empty_tensors_pass: PruneEmptyTensorsPass
        executorch.exir.passes.remove_mixed_type_operators: RemoveMixedTypeOperators
        executorch.exir.passes.replace_aten_with_edge_pass: OpReplacePass aten_to_edge should_lower_to_edge
        executorch.exir.passes.memory_format_ops_pass: MemoryFormatOpsPass
        executorch.exir.passes.dim_order_ops_registry: DimOrderOpsMap
        """,
    ),
    Feature(
        "reused pass results",
        "the values that passes compute for nodes are computed once for equal calls",
        "each pass computes them again",
        f"""
        {_TRACING}
        executorch.exir.lowered_backend_module: LoweredBackendModule.forward
        torch._subclasses.fake_tensor: FakeTensor.__new__
        """,
    ),
    Feature(
        "lazy graph code",
        "a graph module is compiled when its code is first needed",
        "each pass compiles the graphs that it changes",
        """
        torch.fx.graph_module: GraphModule.recompile GraphModule._recompile_submodules GraphModule.__reduce__
        torch.fx.graph_module: GraphModule.__reduce_package__ GraphModule.__new__
        """,
    ),
    Feature(
        "signature tables",
        "the look-up tables of a program's signature are built once",
        "torch builds one for each look-up",
        """
        torch.export.graph_signature: ExportGraphSignature InputSpec OutputSpec TensorArgument SymIntArgument
        torch.export.graph_signature: SymFloatArgument SymBoolArgument
        """,
    ),
    Feature(
        "node histories",
        "nodes share the older part of their history",
        "torch copies it for each node",
        "torch.fx.traceback: NodeSource",
    ),
    Feature(
        "composite operators",
        "torch's composite operators are looked up once",
        "each conversion asks torch's dispatcher five times",
        """
        torch._export.utils: _collect_all_valid_cia_ops _collect_all_valid_cia_ops_for_namespace
        torch._export.utils: _collect_all_valid_cia_ops_for_aten_namespace _materialize_cpp_cia_ops
        torch._export.utils: _is_preservable_cia_op _is_cia_op
        """,
    ),
    Feature(
        "dim orders and annotations",
        "dimension orders and class annotations are computed once",
        "ExecuTorch computes them for each tensor and each object",
        """
        executorch.exir.tensor: dim_order_from_stride
        executorch.exir._serialize._dataclass: _DataclassEncoder _json_to_dataclass
        """,
    ),
    Feature(
        "passes of XNNPACK",
        "passes with nothing to do are skipped",
        "each of them runs, and retraces the graph",
        f"""
        {_TRACING}
        torch.fx.graph_module: GraphModule.print_readable
        executorch.backends.xnnpack._passes: XNNPACKPassManager
        """,
    ),
    Feature(
        "content comparison",
        "emitted contents are compared byte by byte, and kept once",
        "ExecuTorch hashes them with SHA-256, several times",
        """
        executorch.exir._serialize._named_data_store: NamedDataStore._sha256 NamedDataStore._get_buffer_sha256
        executorch.exir._serialize._named_data_store: NamedDataStore._add_named_data_to_map
        executorch.exir.emit._emitter: _Emitter._tensor_spec_to_evalue _Emitter._save_new_const_tensor
        executorch.exir.emit._emitter: _Emitter._emit_delegate
        """,
    ),
    Feature(
        "loops in files",
        "`while_loop` is planned and emitted",
        "it is refused",
        """
        executorch.exir.emit._emitter: _Emitter.__init__ _Emitter.placeholder _Emitter.output
        executorch.exir.emit._emitter: _Emitter._emit_control_flow _Emitter._emit_cond _Emitter._emit_spec
        executorch.exir.emit._emitter: _Emitter._emit_evalue _Emitter._merge_chain _Emitter._get_operator
        executorch.exir.memory_planning: get_while_nodes _apply_algo_to_submodules
        """,
    ),
    Feature(
        "reused XNNPACK hashes",
        "the SHA-256 of equal data is computed once",
        "ExecuTorch computes it for each method",
        "executorch.backends.xnnpack.operators.node_visitor: "
        "NodeVisitor.get_quant_params NodeVisitor.get_serialized_buffer_index",
    ),
    Feature(
        "scalar operands",
        "Python numbers in operator calls keep their type and digits in Edge programs",
        "they become the tensors that ExecuTorch's ScalarToTensorPass makes",
        "executorch.exir.passes.scalar_to_tensor_pass: ScalarToTensorPass.call_operator",
    ),
    Feature(
        "empty concatenations",
        "concatenations of empty tensors keep computed sizes",
        "they get the sizes that ExecuTorch's PruneEmptyTensorsPass writes",
        "executorch.exir.passes.prune_empty_tensors_pass: PruneEmptyTensorsPass.remove_empty_tensors_from_cat",
    ),
    Feature(
        "lazy inductor import",
        "ExecuTorch's compiler is imported without torch's inductor, which is imported where a program needs it",
        "both are imported at once",
        # The file is not imported, so that it cannot be asked otherwise.
        """
        torch.export._remove_auto_functionalized_pass: unsafe_remove_auto_functionalized_pass
        file: torch/_inductor/fx_passes/post_grad.py
        """,
    ),
    Feature(
        "refusal reasons",
        "reports include the reasons that ExecuTorch's partitioners give for leaving an operator on the host",
        "reports lack these reasons",
        """
        executorch.exir.backend.utils: WhyNoPartition.__call__ WhyNoPartitionReporter.report_reject
        torch.fx.passes.infra.partitioner: CapabilityBasedPartitioner._is_node_supported
        """,
    ),
    Feature(
        "linear-time proposals",
        "ExecuTorch's partitioners propose partitions in linear time, if requested",
        "they use ExecuTorch's algorithm",
        """
        torch.fx.passes.infra.partitioner: CapabilityBasedPartitioner.propose_partitions
        torch.fx.passes.infra.partitioner: CapabilityBasedPartitioner.__init__ _DependencyViewer
        executorch.exir.backend.canonical_partitioners.group_partitioner: GroupBasedPartitioner.propose_partitions
        executorch.exir.backend.canonical_partitioners.group_partitioner: GroupBasedPartitioner.__init__
        """,
    ),
    Feature(
        "sizes without guards",
        "torch's choice of a kernel for a convolution leaves dynamic sizes as they are",
        "a dynamic dimension may be narrowed, which the report says",
        """
        torch._subclasses.fake_impls: conv
        torch.fx.passes.shape_prop: _extract_tensor_metadata
        torch._higher_order_ops.utils: _unstack_pytree
        executorch.exir.pass_base: _unstack_pytree
        """,
    ),
    Feature(
        "restored kernels",
        "what a conversion replaces in torch's operators is restored if it is interrupted",
        "torch restores it unless it is interrupted",
        """
        torch.export.exported_program: _override_composite_implicit_decomp
        torch._subclasses.fake_impls: register_op_impl _deregister_op_impl
        """,
    ),
    Feature(
        "reused kernels",
        "the kernels that conversions put into torch's composite operators are made once",
        "each conversion makes ten thousand of them",
        """
        torch._higher_order_ops.utils: autograd_not_implemented
        torch._export.utils: _get_decomp_for_cia
        torch.export.exported_program: _override_composite_implicit_decomp
        torch._ops: OperatorBase.py_impl
        torch._subclasses.fake_impls: register_op_impl _deregister_op_impl
        """,
    ),
)
"""Everything that is off where upstream's code is not known."""
