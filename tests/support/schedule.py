"""Which tests run one after the other in one worker, and about how long that takes.

A file is a group. Files that would be long chains are divided, where their tests share no costly fixture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

BY_FUNCTION = frozenset({"test_docs", "test_growth", "test_threads", "test_upstream_rows"})
BY_CLASS = frozenset({"test_delegates", "test_lowered_module", "test_runtime"})
BY_PARAMETER = {
    "test_generation": "file",
    "test_models": "case",
    "test_random_programs": "part",
    "test_random_state": "part",
    "test_transform_passes": "kind",
}
"""Files that are divided by the value of one parameter; tests that do not have it are a group of their own."""

MODELS = frozenset({"bert", "llama", "mobilenet_v2"})
"""Models that several files export: their tests are one group, whose worker exports them once."""

READERS = frozenset({"test_inspect", "test_provenance", "test_signatures"})
"""Files whose tests read the files that pte_files.py makes: they are one group, whose worker makes them once."""

EVERY = """
aliases: inputs_may_be_views/3 memory_is_shared_and_laid_out_as_in_eager/10
backends: reference/12 toy/16 xnnpack/10
bisect: one_operator_of_two_hundred_is_named/3 what_ends_the_process_hangs_or_fails/2
both_ways: operators/3 programs_in_which_they_differed_once/8 random_programs/3
by_support: nested_graphs/2
cache: a_cached_lowering_gives_the_same_bytes/6
channels_last: images_that_are_pooled_to_one_pixel/4
compilation: a_delegate_that_breaks_its_contract/6
composition: lower_does_what_plan_says/2
constants: tables_of_any_dtype/3
control_flow: conditions_on_sizes/3 random_models/12
    results_of_conditions_live_as_long_as_they_are_read/7 tensors_made_in_branches_and_loops/7 with_another_planner/3
convex: on_random_graphs_never_more_than_torch_fx_and_acyclic/3
damaged_files: tables/3 what_ends_a_process_is_an_error_with_limits/2
data_dependent_sizes: a_failure_leaves_the_program_as_it_is/2 what_the_runtime_computes_is_what_the_model_computes/3
decisions: a_partitioners_decision_holds_for_the_sizes_it_was_made_for/2
delegates: nothing_is_kept/2
dynamic_sizes: all_sizes_of_a_range_are_right/5 both_ways_are_equal/6
edge_operators: a_row_of_the_table/3
exporter_defects: files_are_right_without_patches/15
families: what_the_manifest_says_runs/3
faults: a_fault_is_there_and_not_in_our_files/6
fuzz: damage_is_an_error_or_harmless/2
generation: greedy_tokens/7
grouped_attention: any_sizes/12 other_forms/4
growth: delegates_are_collected_while_the_input_lives/2 what_is_dropped_is_collected/2
half_precision: a_model_is_as_exact_as_in_eager_mode/5
higher_order: inference_equals_eager_and_sees_weights/6 training_equals_eager/3
host_memory: the_numbers_are_those_of_eager/6
identity: identities_are_gone/3 what_changes_something_stays/3
inferred_sizes: each_form/4
language_model_files: greedy_tokens_are_those_of_the_quantised_model/20
language_models: exportable_modules_of_transformers_work_as_they_are/4
    few_bits_are_computed_as_executorch_computes_them/2 weights_of_few_bits/4
layer_norm: forms/3
layouts: factors_of_matrices_are_read_as_they_lie/3
limits: random_graphs_with_host_operators_are_cut_within_the_caps/3
memory_planning: the_plan_says_what_the_runtime_allocates/8
mended_passes: concatenations_of_nothing_have_sizes/3 results_are_those_of_eager/6
models: gradients_and_ten_steps_equal_eager/3 inference_equals_eager/8 payloads_are_byte_identical_to_upstream/3
nested: equals_eager/8 runtime_equals_eager/3 weights_reach_their_partition_and_nothing_is_left_over/3
odd_inputs: they_run/3
on_and_off: files_are_the_same/5
one_memory: several_of_them/3 tensors_that_are_no_buffers/3 views/4
patched: executorchs_own_bytes/10
pins: without_a_feature_upstream_does_it/10
planted: a_mistake_is_found/3
planted_in_cpp: a_mistake_is_found/3
pooling: every_geometry_is_equal_or_left_alone/3 window_larger_than_the_input/2
profit: a_max_pooling_is_whole_unless_its_indices_are_read/2 graphs_without_gradients_are_rewritten_by_default/3
    operators_that_rely_on_how_their_input_lies_in_memory/3 partitions_that_are_asked_for_are_kept/3
quantize: dynamic_sizes_and_state_stay/2
quantized: int8_recipes/2 one_partitioner_is_enough_for_dynamic_quantisation/2 rules_leave_the_numbers_alone/5
random_numbers: a_seed_gives_the_same_numbers/2
random_programs: a_random_program_equals_eager/100
random_state: no_number_is_wrong/6
ranges: ranges_hold_for_operators/5 ranges_hold_in_random_attention/7
    ranges_hold_in_random_programs_with_state_and_nested_graphs/4 the_scores_of_attention_are_bounded/12
recovery: a_backend_that_fails_now_and_then/4 random_programs_are_right_whatever_fails/8
reductions: last_dimensions/6 left_alone/3
reports: weights_that_change_again_and_again_become_inputs/3
reused_layers: in_float/160 in_int8/120
safe_softmax: masks_the_other_way_round_that_are_moved/2 rows_that_are_proven_have_a_plain_softmax/2
    scores_may_be_broadcast_to_the_mask/2
scalar_operands: left_alone/3 same_bits/4
settings: a_setting_of_the_caller_changes_no_byte/2
shared_state: a_device_runs_the_same_file/3 functions_that_are_compiled_apart_share_state_too/3 modules_share_it/6
    what_is_shared_can_be_said/2 what_is_written_is_bounded_by_all_methods_together/6
    what_one_method_writes_is_what_the_others_read/10
sharing_operators: results_are_eagers/3
signatures: what_it_takes_and_returns_is_what_run_takes_and_returns/3
skipped_passes: passes_of_a_model/3 passes_of_operators/3
specialized: concatenations_of_nothing/3 threads_with_sizes_of_their_own/3 xnnpack_runs_graphs_with_symbolic_sizes/4
state: each_call_is_eagers/20 through_other_doors/10
suite: a_mistake_is_caught_and_its_case_named/2
torchao_rules: every_form_is_right_wherever_it_is_computed/3 in_branches/3
training: autocast/4 gradients_in_eval_mode/2 inference_between_steps_sees_each_step/6
    the_next_call_sees_changed_weights/18 what_is_partitioned/9
transform_passes: the_result_is_that_of_executorch/8
transport: quantised_programs/2 symbolic_sizes/2
unusual_weights: weights_that_were_replaced_are_let_go/4 what_each_check_sees/3
upstream_rows: m10_branches_are_lowered_own_their_weights_and_are_left_clean/8
    m11_programs_and_weights_die_with_their_last_reference/4
values: values_are_those_of_eager/9
verify: a_planted_fault_is_found_where_plain_inputs_agree/2
wide_depthwise: any_geometry/6 left_alone/3
xnnpack_constraints: a_quantised_operand_without_dimensions/3 a_quantised_result_is_read_inside_too/2
    a_quantised_value_of_two_orders/2 convolutions_after_others/3 convolutions_quantised_dynamically/6
    copies_of_what_is_read_elsewhere/2 dynamic_dimensions/2 each_layer_has_a_bias_rounded_for_it/4
    layers_share_weights/3 what_a_branch_computes/2 zeros_around_a_quantised_value/2
"""
"""Tests of which only each n-th case runs for every change, the first one among them; the others are nightly.

They are among those that take longest, and their further cases reach next to nothing that the other tests do not: when
this was recorded, two small functions of the package. A line is a file and its tests, without `test_`.
"""

NIGHTLY = """
backends/openvino: a_convolutional_model a_map_of_two_methods
backends/reference: real_models(llama) real_models(mobilenet_v2)
cache/cache: a_cached_lowering_gives_the_same_bytes(mobilenet_v2-xnnpack)
    a_cached_lowering_gives_the_same_bytes(convnext-xnnpack)
cache/store: a_kill_at_any_moment_leaves_nothing_wrong
fast/dynamic_sizes: what_is_not_covered_goes_the_other_way_untouched
exporters/detection: libreyolo rfdetr ultralytics
compat/exporters: exporters_of_detectors
compat/patched_by_others: executorchs_bytes_under_the_same_patches
compat/upstream_rows: m3_upstream_copies_the_weight_for_each_method
exporters/exported_classes: several_classes_are_right
exporters/in_cpp: a_file_is_right_in_a_module
contracts/suite: as_pytest_tests mistakes_that_few_programs_show_fail_in_few_cases the_right_one_passes
    the_suite_is_not_loaded_by_the_package
dynamo/compilation: threads_call_one_compiled_function
dynamo/distributed: two_processes_with_several_buckets
dynamo/minifier: *
dynamo/models: gradients_and_ten_steps_equal_eager(mobilenet_v2) inference_equals_eager(mobilenet_v2-reference)
dynamo/profit: partitions_that_take_longer_than_in_pytorch_stay_there
dynamo/registration: torch_lists_the_entry_points_and_imports_nothing_of_ours
dynamo/reports: weights_that_change_seldom_are_packed_again what_dynamo_starts_anew_is_reported_once
    weights_that_change_again_and_again_become_inputs
dynamo/specialized: the_sizes_that_were_not_used_for_longest_are_compiled_again
dynamo/unusual_weights: signs_of_a_large_weight_are_changed_behind_the_back_of_autograd
house/docs: python_blocks_run(command-line) python_blocks_run(farm) python_blocks_run(language-models)
    python_blocks_run(torch-compile) python_blocks_run(warnings) python_blocks_run(*Error)
    python_blocks_run(BackendFailure) python_blocks_run(lowering) python_blocks_run(plans) python_blocks_run(plugins)
    python_blocks_run(partitioners) python_blocks_run(backends) python_blocks_run(graphs) python_blocks_run(rewrites)
    python_blocks_run(running) python_blocks_run(checking) python_blocks_run(testing) python_blocks_run(compat)
    python_blocks_run(dynamo) python_blocks_run(variants) python_blocks_run(memory) python_blocks_run(check)
    python_blocks_run(quantised-models) python_blocks_run(buckets) python_blocks_run(on-a-device)
    python_blocks_run(write-a-rewrite)
house/types: *
house/example_package: *
house/examples: commands_print_what_is_shown(Chat?model?with?three?clients)
    commands_print_what_is_shown(LoRA?adapters) commands_print_what_is_shown(MobileNetV2?in?int8)
    commands_print_what_is_shown(Sentence?search) commands_print_what_is_shown(Whisper)
house/packaging: the_wheel_works_outside_of_the_tree
parallel/farm: a_worker_that_is_killed_in_the_middle_changes_nothing
parallel/jobs: a_backend_that_ends_its_process_does_not_end_this_one
    a_worker_that_dies_is_named_after_a_second_attempt of_xnnpack_are_those_of_one_job
    workers_that_ended_between_two_calls_are_replaced
    workers_import_nothing_from_the_current_folder
pipeline/custom_attention: greedy_tokens_of_executorchs_runner greedy_tokens_of_two_methods the_cache_is_not_copied
pipeline/generation: a_method_is_rewritten_beside_another_one_as_it_is_alone greedy_tokens(reference)
pipeline/growth: a_cycle_leaves_no_more_than_executorchs_own what_failed_is_collected_too
pipeline/language_models: few_bits_are_computed_as_executorch_computes_them
pipeline/models: (convnext) (llama) (mobilenet_v2) (t5) (vit) (whisper_encoder)
pipeline/properties: the_programs_equal_the_modules_that_they_come_from
pte/saving: at_random_moments before_any_line the_old_pair_stays_whole_when_names_differ
rewrites/common_subexpressions: quantised_patterns_are_not_shared
rewrites/inferred_sizes: a_dynamic_batch a_dynamic_batch_of_dynamic_rows the_input_program_keeps_its_sizes
    attention_has_the_partitions_of_the_static_file(eager)
rewriting/random_programs: rewritten_programs_give_the_same_results(ops)
    rewritten_programs_give_the_same_results(random) with_a_partitioner(attention-seeds0)
runtime/delegates: ten_thousand_calls_leak_nothing
runtime/lean: a_wheel_that_looks_different_is_used_by_its_own_wrapper
runtime/run_limits: a_signal_handler_cannot_call_what_is_running
fast/on_and_off: files_are_the_same(mobilenet_v2) files_without_delegates_are_the_same(convnext)
first_day/mistakes: in_a_process_of_its_own
first_day/users: in_python(vision) in_python(text) in_python(speech) in_python(detector)
    on_the_command_line(text) on_the_command_line(speech)
steps/control_flow: random_models_of_many_operators(0)
steps/data_dependent_sizes: a_program_is_converted_again_and_again_and_stays_as_it_is
steps/host_memory: channels_last_are_computed_as_in_eager
fast/pins: all_can_be_turned_off inductor_is_imported_where_a_program_needs_it
    the_compiler_comes_without_inductor_whatever_is_imported_first
steps/recovery: every_order_of_failures_gives_the_same_bytes
fast/skipped_passes: passes_of_a_model
vendors/conformance: *
vendors/payloads: a_model
vendors/several: core_ml_before_xnnpack ethos_u_before_xnnpack
    vulkan_before_xnnpack_with_a_cache_in_two_methods vulkan_before_xnnpack_with_any_batch
planted/planted: the_whole_suite_finds_a_mistake without_a_mistake_it_conforms(elementwise)
    without_a_mistake_it_conforms(attention)
planted/planted_in_cpp: without_a_mistake_it_conforms
verification/verify: models_have_no_fault(mobilenet_v2)
"""
"""Tests that are nightly, and cases, in round brackets; `*` and `?` stand for what they do in names of files."""

SECONDS: dict[str, float] = {
    "test_run_limits": 44, "test_on_and_off": 40, "test_control_flow": 38, "model:bert": 35, "test_bisect": 34,
    "test_jobs": 28, "pte_files": 26, "test_xnnpack_constraints": 25, "test_random_programs": 20,
    "test_docs:test_python_blocks_run": 20, "test_torchao_rules": 18, "test_ranges": 18, "test_shared_state": 16,
    "test_cache": 16, "model:llama": 15, "test_buckets": 15, "test_specialized": 15, "test_one_memory": 15,
    "test_rules": 15, "test_users": 14, "test_farm": 14, "test_reference": 14, "test_training": 14, "test_suite": 14,
    "test_variants": 13, "test_both_ways": 12, "test_determinism": 12, "test_notebook": 12, "test_lean": 12,
    "test_cli": 12, "test_edge_errors": 12, "test_by_pattern": 12, "test_recovery": 12, "test_upstream_suite": 10,
    "test_verify": 10, "test_backends": 10, "test_compilation": 10, "test_profit": 10, "test_reused": 10,
    "test_values": 10, "test_higher_order": 10, "test_properties": 10, "test_quantized": 10, "test_dynamic_sizes": 10,
    "test_constants": 10, "test_language_models": 10, "test_patched": 10, "test_demo": 9, "test_transport": 9,
    "test_safe_softmax": 9, "test_layouts": 8, "test_odd_inputs": 8, "test_operator_database": 8,
    "test_half_precision": 8, "test_data_dependent_sizes": 8, "test_unusual_weights": 8, "test_damaged_files": 8,
    "test_compat": 8, "test_views": 8, "test_fuzz": 8, "test_settings": 8, "test_skipped_passes": 8,
    "test_lowered_module:TestFiles": 6, "test_precision": 30, "test_new_backend": 60, "test_edge_operators": 15,
    "test_planted": 100, "test_planted_in_cpp": 40, "test_aarch64": 700, "test_bucket_choice": 25,
}  # fmt: skip
"""About how many seconds the longest groups take on a quiet core. The others take few, and fill the gaps."""


def _read(table: str) -> dict[str, list[str]]:
    """Return the entries of each file in a table."""
    entries: dict[str, list[str]] = {}
    for word in table.split():
        if word.endswith(":"):
            file = word[:-1]
        else:
            entries.setdefault(file, []).append(word)
    return entries


def choose_nightly(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Return what is left out unless nightly tests are asked for: see `EVERY` and `NIGHTLY`."""
    every = {
        (file, name): int(step)
        for file, entries in _read(EVERY).items()
        for name, _, step in (entry.partition("/") for entry in entries)
    }
    nightly = _read(NIGHTLY)
    counts: Counter[tuple[str, str]] = Counter()
    for item in items:
        path, test = Path(item.path), getattr(item, "originalname", item.name)
        key = path.stem.removeprefix("test_"), test.removeprefix("test_")
        case = f"({item.callspec.id})" if hasattr(item, "callspec") else ""
        if key in every and case:
            counts[key] += 1
        names = (key[1], key[1] + case, case)
        wanted = nightly.get(f"{path.parent.name}/{key[0]}", ())
        left_out = any(fnmatchcase(name, pattern) for pattern in wanted for name in names)
        if left_out or (key in every and case and (counts[key] - 1) % every[key]):
            yield item


def group_of(item: pytest.Item) -> str:
    """Return the name of the group that a test belongs to; without brackets, in which xdist would not find it."""
    file = Path(item.path).stem
    part = ""
    models = MODELS.intersection(map(str, item.callspec.params.values())) if hasattr(item, "callspec") else ()
    if len(models) == 1:
        return f"model:{min(models)}"
    if file in READERS:
        return "pte_files"
    if file in BY_FUNCTION:
        part = getattr(item, "originalname", item.name)
    elif file in BY_CLASS:
        part = getattr(getattr(item, "cls", None), "__name__", "")
    elif file in BY_PARAMETER and hasattr(item, "callspec"):
        part = str(item.callspec.params.get(BY_PARAMETER[file], ""))
    return f"{file}:{part}" if part else file
