"""Which tests run one after the other in one worker, and about how long that takes.

A file is a group. Files that would be long chains are divided, where their tests share no costly fixture.
"""

from __future__ import annotations

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

SECONDS: dict[str, float] = {
    "model:llama": 110,
    "test_properties": 85,
    "model:mobilenet_v2": 70,
    "model:bert": 60,
    "test_docs:test_python_blocks_run": 70,
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
}
"""About how many seconds the longest groups take on a quiet core. The others take few, and fill the gaps."""


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
