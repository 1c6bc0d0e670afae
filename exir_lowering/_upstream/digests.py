"""The digests of upstream code that was looked at, by module and name: see tests/house/record_pins.py."""

from __future__ import annotations

DIGESTS: dict[str, dict[str, tuple[str, ...]]] = {
    "executorch.backends.xnnpack._passes": {
        "XNNPACKPassManager": ("49d3365d57a9bc68",),
    },
    "executorch.backends.xnnpack.operators.node_visitor": {
        "NodeVisitor.get_quant_params": ("47a869c19fde3166",),
        "NodeVisitor.get_serialized_buffer_index": ("9b6043cc1cf74e28",),
    },
    "executorch.exir._program_utils": {
        "_get_updated_graph_signature": ("b0a666ea7600545d",),
        "_get_updated_range_constraints": ("ea9b787506a79762",),
    },
    "executorch.exir._serialize._dataclass": {
        "_DataclassEncoder": ("78c38185f2592d4e",),
        "_json_to_dataclass": ("cb2c58cbb00b339a",),
    },
    "executorch.exir._serialize._named_data_store": {
        "NamedDataStore._add_named_data_to_map": ("b3ebaa7ac9fe8da9",),
        "NamedDataStore._get_buffer_sha256": ("c2b679c5054ce816",),
        "NamedDataStore._sha256": ("61d1f16fdd9f4053",),
    },
    "executorch.exir.backend.canonical_partitioners.group_partitioner": {
        "GroupBasedPartitioner.__init__": ("09ab834bca2cc49d",),
        "GroupBasedPartitioner.propose_partitions": ("897d9e977f1db57d",),
    },
    "executorch.exir.backend.utils": {
        "WhyNoPartition.__call__": ("5d3db4361fad04f6",),
        "WhyNoPartitionReporter.report_reject": ("5bf3b550196e97ee",),
    },
    "executorch.exir.dialects.edge._ops": {
        "EdgeOpOverload.__call__": ("e72d6e1844bdf4f7",),
    },
    "executorch.exir.emit._emitter": {
        "_Emitter._emit_delegate": ("736081fe549884ed",),
        "_Emitter._save_new_const_tensor": ("8c0faa623d76b385",),
        "_Emitter._tensor_spec_to_evalue": ("c9ee72edc07d131e",),
    },
    "executorch.exir.lowered_backend_module": {
        "LoweredBackendModule.forward": ("dc4012886036109d",),
    },
    "executorch.exir.pass_base": {
        "ExportPass": ("f4850f1db523b60c",),
        "ProxyValue": ("282821e409b77530",),
        "_ExportPassBase": ("3f8a75de942bfed3",),
        "_TORCH_SYM_OPS": ("9f9a3b1adaa2e6cc",),
    },
    "executorch.exir.pass_manager": {
        "_can_eliminate_common_getitems": ("f32127d0da8a5fd3",),
    },
    "executorch.exir.passes.convert_constant_dim_order_pass": {
        "convert_constant_dim_order_pass": ("29a31f89bcef2968",),
    },
    "executorch.exir.passes.debug_handle_generator_pass": {
        "DebugHandleGeneratorPass": ("26aaa16b39eb1cf3",),
    },
    "executorch.exir.passes.dim_order_ops_registry": {
        "DimOrderOpsMap": ("1b853e391c2f9a5b",),
    },
    "executorch.exir.passes.fold_redundant_qdq_pass": {
        "FoldRedundantDequantizeQuantizePass": ("06d49cecdeb6bd04",),
    },
    "executorch.exir.passes.memory_format_ops_pass": {
        "MemoryFormatOpsPass": ("8b2d382c164f3422",),
    },
    "executorch.exir.passes.normalize_transpose_pass": {
        "NormalizeTransposePass": ("626c3c27bbd3ce65",),
    },
    "executorch.exir.passes.prune_empty_tensors_pass": {
        "PruneEmptyTensorsPass": ("6017ddb22795f717",),
        "PruneEmptyTensorsPass.remove_empty_tensors_from_cat": ("b1242e09a88ceb92",),
    },
    "executorch.exir.passes.remove_graph_asserts_pass": {
        "RemoveNonCoreAtenOpGraphAssertsPass": ("3dd9981d40d28e6c",),
    },
    "executorch.exir.passes.remove_mixed_type_operators": {
        "RemoveMixedTypeOperators": ("5ef813e82449543c",),
    },
    "executorch.exir.passes.remove_noop_pass": {
        "RemoveNoopPass": ("1c919338134bc44d",),
        "RemoveToCopyPass": ("f83a18080b39117d",),
        "_DEQUANT_OPS": ("b90ec1e9e4aff126",),
        "_QUANT_OPS": ("5c0f0c26fd4f3d3b",),
        "eliminate_dq_q": ("a37efce33216a90c",),
    },
    "executorch.exir.passes.remove_unused_parameters_pass": {
        "_is_parameter_used": ("a87908e542a97f7f",),
        "remove_unused_parameters_pass": ("b15b83c2f1e280ef",),
    },
    "executorch.exir.passes.replace_aten_with_edge_pass": {
        "OpReplacePass": ("056e9cca6d955c3b",),
        "aten_to_edge": ("8bc061fc3baed5b9",),
        "should_lower_to_edge": ("96d2b19a83e73d83",),
    },
    "executorch.exir.passes.replace_broken_ops_with_function_ops_pass": {
        "ReplaceBrokenOpsWithFunctionalOpsPass": ("81878086c7a29864",),
    },
    "executorch.exir.passes.replace_sym_size_op_pass": {
        "ReplaceSymSizeOpPass": ("db4960321a3fec6f",),
        "replacements": ("d7687cbdd17507f5",),
    },
    "executorch.exir.passes.scalar_to_tensor_pass": {
        "ScalarToTensorPass": ("f499b0471f9573b4",),
        "ScalarToTensorPass.call_operator": ("acecfcdbda6f6dbb",),
    },
    "executorch.exir.passes.sym_to_tensor_pass": {
        "SymToTensorPass": ("5926dbae20244659",),
    },
    "executorch.exir.passes": {
        "base_post_op_replace_passes": ("26373fa347f288d2",),
        "base_pre_op_replace_passes": ("8ca2870536eee7d0",),
    },
    "executorch.exir.program._program": {
        "_can_skip_using_EDGE_DO_NOT_DECOMP": ("1a585e8da9c472e0",),
        "_default_decomposition_table": ("30f8bcf78f1e8f5a",),
        "_gen_edge_manager_for_partitioners": ("02bda1e094ad593b",),
        "_generate_edge_program": ("880af3d155b868c7",),
        "_get_aten_to_edge_passes": ("8661a1a814cd6423",),
        "_remove_invalid_ops_for_not_decompose": ("3e17892fc8dbf7d8",),
        "_replace_aten_ops_with_transformed_ops": ("80a553326cc44553",),
        "_restore_transformed_ops_to_aten_ops": ("379a5a41d72f53d6",),
        "_transform": ("9359d02c126f183c",),
        "contains_any_call_fn_target_op": ("7759b2b96a716478",),
        "edge_no_decomp_namespace": ("6fa1ed4c17b77089",),
        "lift_constant_tensor_pass": ("b1c3c0bfed44396f",),
    },
    "executorch.exir.tensor": {
        "dim_order_from_stride": ("0ffaacb8b17e529c",),
    },
    "executorch.exir.verification.verifier": {
        "EXIREdgeDialectVerifier": ("4666802eef46e942",),
    },
    "file": {
        "torch/_inductor/fx_passes/post_grad.py": ("dbcdb4f89cb4a523",),
    },
    "torch._compile": {
        "_disable_dynamo": ("3a7a5de33dd0ed05",),
    },
    "torch._export.pass_base": {
        "_ExportPassBaseDeprecatedDoNotUse": ("815db360d35ada1d",),
    },
    "torch._export.passes._node_metadata_hook": {
        "_node_metadata_hook": ("1811fdbb4603db1e",),
        "_set_node_metadata_hook": ("06545174b2985379",),
    },
    "torch._export.passes.replace_view_ops_with_view_copy_ops_pass": {
        "ReplaceViewOpsWithViewCopyOpsPass": ("f34034e1e25380c5",),
        "_NON_FUNCTIONAL_OPS_TO_FUNCTIONAL_OPS": ("c908d491fede578a",),
        "get_view_copy_of_view_op": ("dec8e36476462057",),
        "is_view_op": ("c73bef10fd9ecbc9",),
    },
    "torch._export.utils": {
        "_collect_all_valid_cia_ops": ("1d09a99ea79bd377",),
        "_collect_all_valid_cia_ops_for_aten_namespace": ("538a5262e16f5683",),
        "_collect_all_valid_cia_ops_for_namespace": ("c26d5cd619830773",),
        "_get_decomp_for_cia": ("3ae30c72c7d7bce2",),
        "_is_cia_op": ("4588c37719fb8356",),
        "_is_preservable_cia_op": ("00d78e92c3d6d9f6",),
        "_materialize_cpp_cia_ops": ("51472f6b4e2c3782",),
        "_special_op_to_preserve_cia": ("00b0665a2cdc0355",),
    },
    "torch._export.verifier": {
        "Verifier": ("8380e346186708ef",),
        "_verify_exported_program_signature": ("28e166748f97611d",),
    },
    "torch._higher_order_ops.executorch_call_delegate": {
        "call_delegate_cpu": ("4e7ab5016a0073bc",),
        "call_delegate_fake_tensor_mode": ("d692c8ae03197911",),
    },
    "torch._subclasses.fake_tensor": {
        "FakeTensor.__new__": ("84231dde23a86143",),
    },
    "torch.export._remove_auto_functionalized_pass": {
        "unsafe_remove_auto_functionalized_pass": ("f4e3301f612ca059",),
    },
    "torch.export.exported_program": {
        "ExportedProgram.run_decompositions": ("35daf8fdd887b786",),
        "_common_getitem_elimination_pass": ("ef3aa4a36ace00ca",),
        "_decompose_and_get_gm_with_new_signature_constants": ("93ddd4ba4ed9f3fe",),
        "_decompose_exported_program": ("1949ba42c1237735",),
        "_override_composite_implicit_decomp": ("8b1d12a1e2299797",),
        "_split_decomp_table_to_cia_and_python_decomp": ("a4ccae438dfcc5df",),
    },
    "torch.export.graph_signature": {
        "ExportGraphSignature": ("b7b503db2489649a",),
        "InputSpec": ("2a687f1580f798dc",),
        "OutputSpec": ("65fce754dd8008c4",),
        "SymBoolArgument": ("2f197331a722a95d",),
        "SymFloatArgument": ("2f197331a722a95d",),
        "SymIntArgument": ("2f197331a722a95d",),
        "TensorArgument": ("2f197331a722a95d",),
    },
    "torch.fx.graph_module": {
        "GraphModule.__new__": ("0b3c11fa67a285d4",),
        "GraphModule.__reduce__": ("479fb053d55614ee",),
        "GraphModule.__reduce_package__": ("4bec0f9856baf5d7",),
        "GraphModule._recompile_submodules": ("d8d048e4dfec55eb",),
        "GraphModule.print_readable": ("4cc4d8dc50145fb6",),
        "GraphModule.recompile": ("98adb1519c457ae4",),
    },
    "torch.fx.passes.infra.partitioner": {
        "CapabilityBasedPartitioner.__init__": ("ff5bd8d12e8df1a8",),
        "CapabilityBasedPartitioner._is_node_supported": ("bfeb3c7237d2d2d7",),
        "CapabilityBasedPartitioner.propose_partitions": ("f64014355cd42e0b",),
        "_DependencyViewer": ("ba28877808515577",),
    },
    "torch.fx.passes.infra.pass_base": {
        "PassBase": ("d54f7bd1d0687a52",),
    },
    "torch.fx.passes.runtime_assert": {
        "insert_deferred_runtime_asserts": ("a0dfc231e015c2fc",),
    },
    "torch.fx.proxy": {
        "_COPY_META_FIELDS": ("eb0dd24a09a5424c",),
    },
    "torch.fx.traceback": {
        "NodeSource": ("4b7bb827b1061efe",),
        "NodeSourceAction": ("b8b09d1dd6228b3a",),
    },
}
