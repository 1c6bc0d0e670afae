"""Which tests run one after the other in one worker, and about how long that takes.

A file is a group. Files that would be long chains are divided, where their tests share no costly fixture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

BY_FUNCTION = frozenset({"test_docs", "test_growth", "test_threads", "test_upstream_rows"})
BY_CLASS = frozenset({"test_delegates", "test_lowered_module", "test_runtime"})
BY_PARAMETER = {
    "test_generation": "file",
    "test_side_by_side": "name",
    "test_models": "case",
    "test_random_programs": "part",
    "test_random_state": "part",
    "test_transform_passes": "kind",
    "test_upstream_suite": "part",
}
"""Files that are divided by the value of one parameter; tests that do not have it are a group of their own."""

MODELS = frozenset({"bert", "llama", "mobilenet_v2"})
"""Models that several files export: their tests are one group, whose worker exports them once."""

READERS = frozenset({"test_inspect", "test_method_graph", "test_provenance", "test_signatures"})
"""Files whose tests read the files that pte_files.py makes: they are one group, whose worker makes them once."""

EVERY = {
    "test_patched:test_executorchs_own_bytes": 10,
    "test_reused:test_a_file_is_the_same": 8,
    "test_aliases:test_inputs_may_be_views": 3,
    "test_aliases:test_memory_is_shared_and_laid_out_as_in_eager": 10,
    "test_backends:test_compiler_demo": 5,
    "test_backends:test_reference": 3,
    "test_backends:test_toy": 5,
    "test_backends:test_xnnpack": 3,
    "test_bisect:test_one_operator_of_two_hundred_is_named": 3,
    "test_bisect:test_what_ends_the_process_hangs_or_fails": 2,
    "test_both_ways:test_operators": 3,
    "test_both_ways:test_programs_in_which_they_differed_once": 8,
    "test_both_ways:test_random_programs": 3,
    "test_by_support:test_nested_graphs": 2,
    "test_cache:test_a_cached_lowering_gives_the_same_bytes": 8,
    "test_channels_last:test_images_that_are_pooled_to_one_pixel": 4,
    "test_code:test_a_file_that_was_edited_after_its_import_does_not_matter": 2,
    "test_code:test_what_changes_a_result_is_no_hit": 4,
    "test_compilation:test_a_delegate_that_breaks_its_contract": 6,
    "test_composition:test_lower_does_what_plan_says": 2,
    "test_control_flow:test_conditions_on_sizes": 2,
    "test_control_flow:test_random_models": 4,
    "test_control_flow:test_results_of_conditions_live_as_long_as_they_are_read": 3,
    "test_control_flow:test_tensors_made_in_branches_and_loops": 5,
    "test_control_flow:test_with_any_planner": 2,
    "test_convex:test_on_random_graphs_never_more_than_torch_fx_and_acyclic": 3,
    "test_damaged_files:test_tables": 3,
    "test_data_dependent_sizes:test_a_failure_leaves_the_program_as_it_is": 2,
    "test_data_dependent_sizes:test_what_the_runtime_computes_is_what_the_model_computes": 3,
    "test_decisions:test_a_partitioners_decision_holds_for_the_sizes_it_was_made_for": 2,
    "test_delegates:test_nothing_is_kept": 2,
    "test_dynamic_sizes:test_both_ways_are_equal": 6,
    "test_faults:test_a_fault_is_there_and_not_in_our_files": 3,
    "test_fuzz:test_damage_never_ends_the_process": 28,
    "test_fuzz:test_damage_that_digests_do_not_reveal_never_ends_the_process": 28,
    "test_generation:test_greedy_tokens": 7,
    "test_grouped_attention:test_any_sizes": 12,
    "test_growth:test_delegates_are_collected_while_the_input_lives": 2,
    "test_growth:test_what_is_dropped_is_collected": 2,
    "test_half_precision:test_a_model_is_as_exact_as_in_eager_mode": 3,
    "test_higher_order:test_inference_equals_eager_and_sees_weights": 6,
    "test_higher_order:test_training_equals_eager": 3,
    "test_host_memory:test_the_numbers_are_those_of_eager": 6,
    "test_hostile_serialized:test_random_changes_give_a_program_or_the_error": 3,
    "test_language_models:test_exportable_modules_of_transformers_work_as_they_are": 4,
    "test_language_models:test_few_bits_are_computed_as_executorch_computes_them": 2,
    "test_language_models:test_weights_of_few_bits": 4,
    "test_layer_norm:test_forms": 3,
    "test_limits:test_random_graphs_with_host_operators_are_cut_within_the_caps": 3,
    "test_loops:test_each_step_equals_eager": 20,
    "test_memory_planning:test_the_plan_says_what_the_runtime_allocates": 8,
    "test_mended_passes:test_concatenations_of_nothing_have_sizes": 3,
    "test_mended_passes:test_results_are_those_of_eager": 6,
    "test_minifier:test_a_failure_becomes_a_small_script_that_fails_in_the_same_way": 12,
    "test_models:test_both_ways_are_equal": 2,
    "test_models:test_gradients_and_ten_steps_equal_eager": 3,
    "test_models:test_inference_equals_eager": 8,
    "test_models:test_payloads_are_byte_identical_to_upstream": 3,
    "test_nested:test_equals_eager": 8,
    "test_nested:test_runtime_equals_eager": 3,
    "test_nested:test_weights_reach_their_partition_and_nothing_is_left_over": 3,
    "test_pins:test_without_a_feature_upstream_does_it": 10,
    "test_profit:test_a_max_pooling_is_whole_unless_its_indices_are_read": 2,
    "test_profit:test_graphs_without_gradients_are_rewritten_by_default": 3,
    "test_profit:test_operators_that_rely_on_how_their_input_lies_in_memory": 3,
    "test_profit:test_partitions_that_are_asked_for_are_kept": 3,
    "test_quantize:test_dynamic_sizes_and_state_stay": 2,
    "test_quantized:test_int8_recipes": 2,
    "test_random_numbers:test_a_seed_gives_the_same_numbers": 2,
    "test_random_programs:test_a_random_program_equals_eager": 100,
    "test_random_state:test_no_number_is_wrong": 6,
    "test_ranges:test_ranges_hold_for_operators": 3,
    "test_ranges:test_ranges_hold_in_random_attention": 7,
    "test_ranges:test_ranges_hold_in_random_programs_with_state_and_nested_graphs": 4,
    "test_ranges:test_the_scores_of_attention_are_bounded": 6,
    "test_recovery:test_random_programs_are_right_whatever_fails": 8,
    "test_reductions:test_last_dimensions": 3,
    "test_reports:test_weights_that_change_again_and_again_become_inputs": 3,
    "test_reused_layers:test_in_float": 40,
    "test_reused_layers:test_in_int8": 30,
    "test_serialized:test_models_are_read_as_they_were_written": 6,
    "test_serialized:test_models_that_were_read_lower_to_the_same_bytes": 2,
    "test_serialized:test_quantised_programs": 2,
    "test_serialized:test_random_programs": 3,
    "test_settings:test_a_setting_of_the_caller_changes_no_byte": 2,
    "test_shared_state:test_a_device_runs_the_same_file": 3,
    "test_shared_state:test_functions_that_are_compiled_apart_share_state_too": 3,
    "test_shared_state:test_modules_share_it": 6,
    "test_shared_state:test_what_is_shared_can_be_said": 2,
    "test_shared_state:test_what_is_written_is_bounded_by_all_methods_together": 6,
    "test_shared_state:test_what_one_method_writes_is_what_the_others_read": 10,
    "test_sharing_operators:test_results_are_eagers": 3,
    "test_signatures:test_what_it_takes_and_returns_is_what_run_takes_and_returns": 3,
    "test_skipped_passes:test_passes_of_a_model": 3,
    "test_skipped_passes:test_passes_of_operators": 3,
    "test_specialized:test_concatenations_of_nothing": 3,
    "test_specialized:test_xnnpack_runs_graphs_with_symbolic_sizes": 4,
    "test_state:test_each_call_is_eagers": 20,
    "test_state:test_through_other_doors": 10,
    "test_suite:test_a_mistake_is_caught_and_its_case_named": 2,
    "test_training:test_autocast": 4,
    "test_training:test_gradients_in_eval_mode": 2,
    "test_training:test_inference_between_steps_sees_each_step": 6,
    "test_training:test_the_next_call_sees_changed_weights": 18,
    "test_training:test_what_is_partitioned": 9,
    "test_transform_passes:test_the_result_is_that_of_executorch": 8,
    "test_unusual_weights:test_weights_that_were_replaced_are_let_go": 4,
    "test_unusual_weights:test_what_each_check_sees": 3,
    "test_upstream_rows:test_m10_branches_are_lowered_own_their_weights_and_are_left_clean": 8,
    "test_upstream_rows:test_m11_programs_and_weights_die_with_their_last_reference": 4,
    "test_upstream_suite:test_each_test_that_passes_upstream_passes_here": 2,
    "test_values:test_values_are_those_of_eager": 9,
    "test_verify:test_a_planted_fault_is_found_where_plain_inputs_agree": 2,
    "test_wide_depthwise:test_any_geometry": 3,
    "test_xnnpack_constraints:test_a_quantised_operand_without_dimensions": 3,
    "test_xnnpack_constraints:test_a_quantised_result_is_read_inside_too": 2,
    "test_xnnpack_constraints:test_convolutions_quantised_dynamically": 3,
    "test_xnnpack_constraints:test_each_layer_has_a_bias_rounded_for_it": 2,
    "test_xnnpack_constraints:test_left_on_the_host": 2,
    "test_xnnpack_constraints:test_zeros_around_a_quantised_value": 2,
}
"""Tests of which only each n-th case runs for every change, the first one among them; the others are nightly.

They are among those that take longest, and their further cases reach next to nothing that the other tests do not: when
this was recorded, two small functions of the package.
"""

NIGHTLY = frozenset(
    {
        "backends/test_openvino:test_a_convolutional_model",
        "backends/test_openvino:test_a_map_of_two_methods",
        "backends/test_reference:test_random_programs",
        "backends/test_reference:test_real_models[mobilenet_v2]",
        "cache/test_cache:test_a_cached_lowering_gives_the_same_bytes[mobilenet_v2-xnnpack]",
        "cache/test_code:test_equal_code_is_equal_in_another_process",
        "cache/test_edge:test_another_process_finds_it",
        "cache/test_edge:test_random_programs",
        "cache/test_store:test_a_kill_at_any_moment_leaves_nothing_wrong",
        "fast/test_dynamic_sizes:test_what_is_not_covered_goes_the_other_way_untouched",
        "compat/test_upstream_rows:test_m3_upstream_copies_the_weight_for_each_method",
        "compat/test_upstream_suite:[ours test_lowered_backend_module.py]",
        "contracts/test_suite:test_as_pytest_tests",
        "contracts/test_suite:test_mistakes_that_few_programs_show_fail_in_few_cases",
        "contracts/test_suite:test_the_right_one_passes",
        "contracts/test_suite:test_the_suite_is_not_loaded_by_the_package",
        "dynamo/test_compilation:test_threads_call_one_compiled_function",
        "dynamo/test_distributed:test_two_processes_with_several_buckets",
        "dynamo/test_hugging_face:test_trainer_with_a_model_that_is_compiled_in_place",
        "dynamo/test_models:test_gradients_and_ten_steps_equal_eager[mobilenet_v2]",
        "dynamo/test_models:test_inference_equals_eager[mobilenet_v2-reference]",
        "dynamo/test_models:test_inference_equals_eager[vit-numpy]",
        "dynamo/test_profit:test_partitions_that_take_longer_than_in_pytorch_stay_there",
        "dynamo/test_registration:test_torch_lists_the_entry_points_and_imports_nothing_of_ours",
        "dynamo/test_reports:test_weights_that_change_seldom_are_packed_again",
        "dynamo/test_reports:test_what_dynamo_starts_anew_is_reported_once",
        "dynamo/test_specialized:test_a_graph_is_compiled_while_another_thread_lowers",
        "dynamo/test_specialized:test_the_sizes_that_were_not_used_for_longest_are_compiled_again",
        "dynamo/test_specialized:test_threads_with_sizes_of_their_own",
        "dynamo/test_unusual_weights:test_signs_of_a_large_weight_are_changed_behind_the_back_of_autograd",
        "graphs/test_serialized:test_bytes_depend_on_the_program_only",
        "graphs/test_serialized:test_models_are_read_as_they_were_written[mobilenet_v2]",
        "graphs/test_serialized:test_models_are_read_as_they_were_written[t5]",
        "graphs/test_serialized:test_nested_graphs",
        "house/test_docs:test_python_blocks_run[BackendContractError]",
        "house/test_docs:test_python_blocks_run[BackendFailure]",
        "house/test_docs:test_python_blocks_run[BackendUnavailableError]",
        "house/test_docs:test_python_blocks_run[ConformanceError]",
        "house/test_docs:test_python_blocks_run[CoverageError]",
        "house/test_docs:test_python_blocks_run[LimitError]",
        "house/test_docs:test_python_blocks_run[LoweringError]",
        "house/test_docs:test_python_blocks_run[MemoryRequirementError]",
        "house/test_docs:test_python_blocks_run[PartitionTooLargeError]",
        "house/test_docs:test_python_blocks_run[PartitionerContractError]",
        "house/test_docs:test_python_blocks_run[PluginLoadError]",
        "house/test_docs:test_python_blocks_run[RewriteContractError]",
        "house/test_docs:test_python_blocks_run[UnknownPluginError]",
        "house/test_docs:test_python_blocks_run[command-line]",
        "house/test_docs:test_python_blocks_run[farm]",
        "house/test_docs:test_python_blocks_run[language-models]",
        "house/test_docs:test_python_blocks_run[torch-compile]",
        "house/test_docs:test_python_blocks_run[warnings]",
        "house/test_example_package:test_a_script_lowers_saves_loads_and_executes",
        "house/test_example_package:test_it_passes_its_own_tests",
        "house/test_example_package:test_its_plugins_are_listed_as_ok",
        "house/test_example_package:test_nothing_comes_from_the_tree",
        "house/test_example_package:test_the_command_line_plans_lowers_and_runs",
        "house/test_examples:test_commands_print_what_is_shown[Chat model with three clients]",
        "house/test_examples:test_commands_print_what_is_shown[LoRA adapters]",
        "house/test_examples:test_commands_print_what_is_shown[MobileNetV2 in int8]",
        "house/test_examples:test_commands_print_what_is_shown[Sentence search]",
        "house/test_examples:test_commands_print_what_is_shown[Whisper]",
        "house/test_packaging:test_the_installed_types_refuse_wrong_calls",
        "house/test_packaging:test_the_wheel_works_outside_of_the_tree",
        "lowered_module/test_lowered_module:test_control_flow",
        "parallel/test_farm:test_that_are_lost_twice_are_one_error",
        "parallel/test_jobs:test_a_process_that_is_killed_leaves_no_workers",
        "parallel/test_jobs:test_of_xnnpack_are_those_of_one_job",
        "parallel/test_jobs:test_weights_of_a_process_that_was_ended_are_removed",
        "parallel/test_jobs:test_workers_have_the_options_of_the_callers_python",
        "parallel/test_jobs:test_workers_import_nothing_from_the_current_folder",
        "partitioners/test_by_pattern:test_a_changed_graph_is_matched_again_and_a_dropped_one_is_freed",
        "partitioners/test_limits:test_what_a_partition_saves_is_the_difference_of_two_plans[llama]",
        "pipeline/test_bad_input:test_what_is_marked_holds_under_python_o",
        "pipeline/test_generation:test_a_method_is_rewritten_beside_another_one_as_it_is_alone",
        "pipeline/test_generation:test_greedy_tokens[reference]",
        "pipeline/test_generation:test_the_weights_are_in_the_file_once",
        "pipeline/test_growth:test_a_cycle_leaves_no_more_than_executorchs_own",
        "pipeline/test_growth:test_what_failed_is_collected_too",
        "pipeline/test_language_models:test_few_bits_are_computed_as_executorch_computes_them",
        "pipeline/test_models:[convnext]",
        "pipeline/test_models:[llama]",
        "pipeline/test_models:[mobilenet_v2]",
        "pipeline/test_models:[t5]",
        "pipeline/test_models:[vit]",
        "pipeline/test_models:[whisper_encoder]",
        "pipeline/test_properties:test_the_programs_equal_the_modules_that_they_come_from",
        "pte/test_damaged_files:test_a_loop_that_goes_on_and_on_ends",
        "pte/test_fuzz:test_damage_that_digests_do_not_reveal_never_ends_the_process",
        "pte/test_saving:test_at_random_moments",
        "pte/test_saving:test_before_any_line",
        "pte/test_saving:test_the_old_pair_stays_whole_when_names_differ",
        "rewrites/test_common_subexpressions:test_quantised_patterns_are_not_shared",
        "rewriting/test_random_programs:test_rewritten_programs_give_the_same_results[ops]",
        "rewriting/test_random_programs:test_rewritten_programs_give_the_same_results[random]",
        "rewriting/test_random_programs:test_with_a_partitioner[attention-seeds0]",
        "runtime/test_delegates:test_ten_thousand_calls_leak_nothing",
        "runtime/test_hostile_payloads:test_nothing_is_left_of_a_refused_file",
        "runtime/test_side_by_side:test_models",
        "runtime/test_side_by_side:test_random_programs",
        "runtime/test_lean:test_a_wheel_that_looks_different_is_used_by_its_own_wrapper",
        "runtime/test_run_limits:test_a_signal_handler_cannot_call_what_is_running",
        "runtime/test_runtime:test_damage_never_ends_the_process[-O]",
        "fast/test_reused:test_a_file_is_the_same[mobilenet_v2]",
        "steps/test_data_dependent_sizes:test_a_program_is_converted_again_and_again_and_stays_as_it_is",
        "steps/test_edge_errors:test_a_static_cache_of_transformers_needs_a_strict_export",
        "steps/test_edge_errors:test_the_command_line_names_its_own_options",
        "steps/test_host_memory:test_channels_last_are_computed_as_in_eager",
        "steps/test_narrowed:test_a_real_model",
        "fast/test_pins:test_all_can_be_turned_off",
        "fast/test_pins:test_inductor_is_imported_where_a_program_needs_it",
        "steps/test_recovery:test_every_order_of_failures_gives_the_same_bytes",
        "fast/test_skipped_passes:test_passes_of_a_model",
    }
)
"""Tests, cases, and cases of all tests in a file that are nightly: others of their kind run for every change."""

SECONDS: dict[str, float] = {
    "test_buckets": 32,
    "test_docs:test_python_blocks_run": 45,
    "pte_files": 33,
    "test_edge": 14,
    "test_properties": 12,
    "test_training": 14,
    "test_pins": 11,
    "test_specialized": 11,
    "test_random_programs": 27,
    "test_shared_state": 30,
    "test_profit": 26,
    "test_farm": 16,
    "test_reports": 24,
    "test_distributed": 24,
    "test_ranges": 21,
    "test_serialized": 20,
    "test_compilation": 20,
    "test_minifier": 20,
    "test_both_ways": 20,
    "test_types": 20,
    "test_edge_errors": 19,
    "test_by_pattern": 19,
    "test_bisect": 18,
    "test_suite": 18,
    "test_example_package": 18,
    "test_reference": 17,
    "test_recovery": 18,
    "test_values": 16,
    "test_reused": 18,
    "test_patched": 15,
    "test_language_models": 15,
    "test_backends": 15,
    "test_data_dependent_sizes": 14,
    "test_unusual_weights": 14,
    "test_cli": 14,
    "test_dynamic_sizes": 13,
    "test_determinism": 19,
    "test_higher_order": 13,
    "test_damaged_files": 12,
    "test_compat": 12,
    "test_views": 12,
    "test_notebook": 12,
    "test_nested": 11,
    "test_upstream_suite:ours test_backends_lifted.py": 26,
    "test_state": 11,
    "test_random_state:2": 10,
    "test_integrity": 10,
    "test_run_limits": 10,
    "model:mobilenet_v2": 10,
    "test_aliases": 10,
    "test_xnnpack_constraints": 45,
    "test_growth:test_what_failed_is_collected_too": 9,
    "model:llama": 9,
    "test_delegates:TestRun": 9,
    "test_safe_softmax": 9,
    "test_cache": 9,
    "test_random_state:0": 9,
    "test_plan": 9,
    "test_composition": 8,
}
"""About how many seconds the longest groups take on a quiet core. The others take few, and fill the gaps."""


def choose_nightly(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Return what is left out unless nightly tests are asked for: see `EVERY` and `NIGHTLY`."""
    counts: Counter[str] = Counter()
    for item in items:
        path, test = Path(item.path), getattr(item, "originalname", item.name)
        name = f"{path.stem}:{test}"
        if name in EVERY and hasattr(item, "callspec"):
            if counts[name] % EVERY[name]:
                yield item
            counts[name] += 1
        case = f"[{item.callspec.id}]" if hasattr(item, "callspec") else ""
        file = f"{path.parent.name}/{path.stem}"
        if not NIGHTLY.isdisjoint((f"{file}:{test}", f"{file}:{test}{case}", f"{file}:{case}")):
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
