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
    "test_interpreter": "name",
    "test_models": "case",
    "test_random_programs": "part",
    "test_random_state": "part",
    "test_transform_passes": "kind",
    "test_upstream_suite": "part",
}
"""Files that are divided by the value of one parameter; tests that do not have it are a group of their own."""

MODELS = frozenset({"bert", "llama", "mobilenet_v2"})
"""Models that several files export: their tests are one group, whose worker exports them once."""

EVERY = {
    "test_acceleration:test_a_file_is_the_same": 4,
    "test_aliases:test_memory_is_shared_and_laid_out_as_in_eager": 3,
    "test_backends:test_compiler_demo": 5,
    "test_backends:test_reference": 3,
    "test_backends:test_toy": 5,
    "test_both_ways:test_operators": 3,
    "test_both_ways:test_programs_in_which_they_differed_once": 3,
    "test_both_ways:test_random_programs": 3,
    "test_cache:test_a_cached_lowering_gives_the_same_bytes": 4,
    "test_code:test_what_changes_a_result_is_no_hit": 2,
    "test_compilation:test_a_delegate_that_breaks_its_contract": 3,
    "test_composition:test_lower_does_what_plan_says": 2,
    "test_convex:test_on_random_graphs_never_more_than_torch_fx_and_acyclic": 3,
    "test_data_dependent_sizes:test_a_failure_leaves_the_program_as_it_is": 2,
    "test_data_dependent_sizes:test_a_program_is_converted_again_and_again_and_stays_as_it_is": 4,
    "test_data_dependent_sizes:test_what_the_runtime_computes_is_what_the_model_computes": 3,
    "test_debugging:test_explain_has_the_graphs_that_would_be_lowered": 4,
    "test_dynamic_sizes:test_both_ways_are_equal": 3,
    "test_fuzz:test_damage_never_ends_the_process": 7,
    "test_fuzz:test_damage_that_digests_do_not_reveal_never_ends_the_process": 7,
    "test_generation:test_greedy_tokens": 7,
    "test_grouped_attention:test_any_sizes": 3,
    "test_host_memory:test_the_numbers_are_those_of_eager": 3,
    "test_language_models:test_exportable_modules_of_transformers_work_as_they_are": 4,
    "test_language_models:test_few_bits_are_computed_as_executorch_computes_them": 2,
    "test_language_models:test_weights_of_few_bits": 2,
    "test_limits:test_random_graphs_with_host_operators_are_cut_within_the_caps": 3,
    "test_loops:test_each_step_equals_eager": 3,
    "test_mended_passes:test_results_are_those_of_eager": 3,
    "test_models:test_gradients_and_ten_steps_equal_eager": 3,
    "test_models:test_inference_equals_eager": 5,
    "test_nested:test_equals_eager": 3,
    "test_nested:test_runtime_equals_eager": 3,
    "test_pins:test_without_a_feature_upstream_does_it": 5,
    "test_quantized:test_int8_recipes": 2,
    "test_random_programs:test_a_random_program_equals_eager": 25,
    "test_random_state:test_random_programs": 3,
    "test_ranges:test_ranges_hold_for_operators": 3,
    "test_ranges:test_ranges_hold_in_random_attention": 7,
    "test_ranges:test_ranges_hold_in_random_programs_with_state_and_nested_graphs": 4,
    "test_ranges:test_the_scores_of_attention_are_bounded": 3,
    "test_reductions:test_last_dimensions": 3,
    "test_serialized:test_models_are_read_as_they_were_written": 3,
    "test_serialized:test_random_programs": 3,
    "test_shared_state:test_a_device_runs_the_same_file": 2,
    "test_shared_state:test_functions_that_are_compiled_apart_share_state_too": 3,
    "test_shared_state:test_modules_share_it": 3,
    "test_shared_state:test_what_is_written_is_bounded_by_all_methods_together": 3,
    "test_shared_state:test_what_one_method_writes_is_what_the_others_read": 5,
    "test_sharing_operators:test_results_are_eagers": 3,
    "test_skipped_passes:test_passes_of_a_model": 3,
    "test_skipped_passes:test_passes_of_operators": 3,
    "test_specialized:test_xnnpack_runs_graphs_with_symbolic_sizes": 2,
    "test_state:test_each_call_is_eagers": 7,
    "test_state:test_through_other_doors": 5,
    "test_training:test_inference_between_steps_sees_each_step": 3,
    "test_training:test_the_next_call_sees_changed_weights": 9,
    "test_training:test_what_is_partitioned": 3,
    "test_upstream_rows:test_m10_branches_are_lowered_own_their_weights_and_are_left_clean": 5,
    "test_upstream_suite:test_each_test_that_passes_upstream_passes_here": 2,
    "test_values:test_values_are_those_of_eager": 3,
    "test_verify:test_a_planted_fault_is_found_where_plain_inputs_agree": 2,
    "test_wide_depthwise:test_any_geometry": 3,
    "test_xnnpack_constraints:test_convolutions_quantised_dynamically": 3,
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
        "cache/test_store:test_a_kill_at_any_moment_leaves_nothing_wrong",
        "contracts/test_suite:test_as_pytest_tests",
        "contracts/test_suite:test_mistakes_that_few_programs_show_fail_in_few_cases",
        "dynamo/test_compilation:test_threads_call_one_compiled_function",
        "dynamo/test_hugging_face:test_trainer_with_a_model_that_is_compiled_in_place",
        "dynamo/test_models:test_gradients_and_ten_steps_equal_eager[mobilenet_v2]",
        "dynamo/test_models:test_inference_equals_eager[mobilenet_v2-reference]",
        "dynamo/test_models:test_inference_equals_eager[vit-numpy]",
        "graphs/test_serialized:test_models_are_read_as_they_were_written[mobilenet_v2]",
        "graphs/test_serialized:test_nested_graphs",
        "house/test_docs:test_python_blocks_run[farm]",
        "house/test_docs:test_python_blocks_run[language-models]",
        "house/test_docs:test_python_blocks_run[torch-compile]",
        "house/test_example_package:test_it_passes_its_own_tests",
        "parallel/test_jobs:test_a_process_that_is_killed_leaves_no_workers",
        "parallel/test_jobs:test_weights_of_a_process_that_was_ended_are_removed",
        "parallel/test_jobs:test_workers_have_the_options_of_the_callers_python",
        "parallel/test_jobs:test_workers_import_nothing_from_the_current_folder",
        "partitioners/test_limits:test_what_a_partition_saves_is_the_difference_of_two_plans[llama]",
        "pipeline/test_bad_input:test_what_is_marked_holds_under_python_o",
        "pipeline/test_generation:test_the_weights_are_in_the_file_once",
        "pipeline/test_growth:test_a_cycle_leaves_no_more_than_executorchs_own",
        "pipeline/test_models:[llama]",
        "pipeline/test_models:[mobilenet_v2]",
        "pipeline/test_models:[t5]",
        "pipeline/test_models:[vit]",
        "pte/test_saving:test_at_random_moments",
        "pte/test_saving:test_before_any_line",
        "runtime/test_interpreter:test_random_programs",
        "runtime/test_run_limits:test_a_signal_handler_cannot_call_what_is_running",
        "runtime/test_runtime:test_damage_never_ends_the_process[-O]",
        "steps/test_acceleration:test_a_file_is_the_same[mobilenet_v2]",
        "steps/test_host_memory:test_channels_last_are_computed_as_in_eager",
        "steps/test_skipped_passes:test_passes_of_a_model",
    }
)
"""Tests, cases, and cases of all tests in a file that are nightly: others of their kind run for every change."""

SECONDS: dict[str, float] = {
    "model:llama": 110,
    "test_properties": 85,
    "model:mobilenet_v2": 70,
    "model:bert": 60,
    "test_docs:test_python_blocks_run": 90,
    "test_language_models": 65,
    "test_example_package": 60,
    "test_bad_input": 50,
    "test_farm": 50,
    "test_run_limits": 50,
    "test_hugging_face": 45,
    "test_loops": 45,
    "test_jobs": 40,
    "test_openvino": 40,
    "test_suite": 50,
    "test_generation:xnnpack": 45,
    "test_models:t5": 22,
    "test_models:vit": 20,
    "test_types": 22,
    "test_packaging": 20,
    "test_backends": 45,
    "test_growth:test_a_cycle_leaves_no_more_than_executorchs_own": 40,
    "test_reference": 38,
    "test_interpreter": 33,
    "test_upstream_rows:test_m10_branches_are_lowered_own_their_weights_and_are_left_clean": 30,
    "test_quantized": 30,
    "test_upstream_suite:ours others": 30,
    "test_upstream_suite:convex others": 30,
    "test_upstream_suite:ours test_backends_lifted.py": 28,
    "test_upstream_suite:convex test_backends_lifted.py": 28,
    "test_verify": 25,
    "test_bisect": 35,
    "test_runtime": 25,
    "test_determinism": 25,
    "test_both_ways": 50,
    "test_host_memory": 50,
    "test_state": 70,
    "test_integrity": 25,
    "test_threads:test_what_four_threads_make_is_what_one_makes": 24,
    "test_data_dependent_sizes": 20,
    "test_debug_info": 20,
    "test_saving": 20,
    "test_fuzz": 19,
    "test_rules": 18,
    "test_edge_errors": 18,
    "test_upstream_rows:test_m8_state_equals_eager_over_three_calls": 17,
    "test_cli": 16,
    "test_choices": 16,
    "test_upstream_suite:ours test_lowered_backend_module.py": 14,
    "test_upstream_suite:convex test_lowered_backend_module.py": 14,
    "test_generation:reference": 13,
    "test_upstream_suite:ours test_group_partitioner.py": 12,
    "test_upstream_suite:convex test_group_partitioner.py": 12,
    "test_upstream_rows:test_m11_programs_and_weights_die_with_their_last_reference": 12,
    "test_models:llama": 11,
    "test_models:mobilenet_v2": 11,
    "test_composition": 11,
    "test_delegates:TestShim": 10,
    "test_demo": 10,
    "test_settings": 10,
    "test_views": 10,
    "test_transform_passes": 10,
    "test_inspect": 20,
    "test_provenance": 20,
    "test_signatures": 20,
    "test_inspection_page": 12,
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
    if file in BY_FUNCTION:
        part = getattr(item, "originalname", item.name)
    elif file in BY_CLASS:
        part = getattr(getattr(item, "cls", None), "__name__", "")
    elif file in BY_PARAMETER and hasattr(item, "callspec"):
        part = str(item.callspec.params.get(BY_PARAMETER[file], ""))
    return f"{file}:{part}" if part else file
