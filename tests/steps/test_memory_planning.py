"""The memory that is planned is what the runtime allocates; it can be bounded, and planned by others."""

from __future__ import annotations

import gc
import pickle
import subprocess
import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import device_client
import models
import pytest
import quantized_models
import runtime_models
import torch
import wide_models
from executorch.exir import ExecutorchBackendConfig
from executorch.exir.memory_planning import MemoryPlanningAlgorithmSuite, naive
from executorch.exir.passes import MemoryPlanningPass
from torch.export import ExportedProgram, export

import exir_lowering
from exir_lowering import (
    Artifact,
    BackendFailure,
    InputError,
    LoweringOptions,
    MemoryRequirementError,
    inspect,
    lower,
)

SOURCE = r"""
#include <executorch/extension/module/module.h>
#include <cstdio>
using namespace executorch::extension;

// Prints for each method what the runtime has to be given for its planned memory.
int main(int count, char** words) {
  Module module(words[1]);
  auto names = module.method_names();
  for (auto& name : *names) {
    auto meta = module.method_meta(name);
    long long sum = 0;
    for (size_t i = 0; i < meta->num_memory_planned_buffers(); ++i) sum += *meta->memory_planned_buffer_size(i);
    std::printf("%s %lld\n", name.c_str(), sum);
  }
}
"""


@pytest.fixture(scope="module")
def allocated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What ExecuTorch's runtime allocates for the methods of a file."""
    program = device_client.build(tmp_path_factory.mktemp("client"), SOURCE)

    def ask(artifact: Artifact) -> dict[str, int]:
        file = artifact.save(program.parent / "model.pte")
        text = subprocess.run([program, file], check=True, capture_output=True, text=True).stdout
        return {name: int(size) for name, size in map(str.split, text.splitlines())}

    return ask


def _program(kind: type[torch.nn.Module]) -> ExportedProgram:
    model, inputs = wide_models.build(kind)
    return export(model, inputs)


PROGRAMS: dict[str, Any] = {
    "bert": lambda: models.exported("bert")[2],
    "mobilenet_v2": lambda: models.exported("mobilenet_v2")[2],
    "decoder": lambda: _program(wide_models.Decoder),
    "lstm": lambda: _program(wide_models.Recurrent),
    "quantized": lambda: quantized_models.quantized(False),
    "dynamic": lambda: runtime_models.dynamic_net()[1],
}


@pytest.mark.parametrize("partitioner", [None, "xnnpack"], ids=["host", "xnnpack"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_plan_says_what_the_runtime_allocates(name: str, partitioner: str | None, allocated: Any) -> None:
    program = PROGRAMS[name]()
    lowered = lower(program, partitioner)
    for planner in ("greedy",) if name == "mobilenet_v2" else ("greedy", "naive"):
        (planned,) = exir_lowering.plan(program, partitioner, options=LoweringOptions(memory_planner=planner)).methods  # type: ignore[arg-type]
        artifact = replace(lowered, memory_planner=planner).emit()  # type: ignore[arg-type]
        (report,) = inspect(artifact.buffer).methods
        assert planned.memory is not None
        assert planned.memory.device is not None
        for part in ("planned", "state", "constants", "packed", "workspace", "running", "peak"):
            found = getattr(report.device, part)
            assert getattr(planned.memory.device, part) == pytest.approx(found, rel=0.1, abs=32_000), part  # of tables
        assert artifact.report.methods[0].memory == planned.memory
        assert allocated(artifact) == {"forward": planned.memory.bytes}
        assert planned.memory.bytes == sum(arena.bytes for arena in report.memory.arenas)
        assert sum(arena.peak for arena in report.memory.arenas) <= planned.memory.peak <= planned.memory.bytes


def test_shared_state_is_counted_in_each_method(allocated: Any) -> None:
    model, inputs = wide_models.build(wide_models.Decoder)
    programs = {name: export(model, inputs) for name in ("prefill", "decode")}
    found = {method.name: method.memory for method in exir_lowering.plan(programs).methods}
    assert allocated(lower(programs).emit()) == {name: memory.bytes for name, memory in found.items()}
    assert {tensor.name for tensor in found["decode"].tensors if tensor.made_by == "state"} == {"keys", "values"}


@cache
def _experts() -> ExportedProgram:
    return _program(wide_models.Experts)


class Never(exir_lowering.Backend):
    """A backend that must not be called."""

    def preprocess(self, program: Any, compile_specs: Any) -> Any:
        raise AssertionError("it was called")


def test_a_bound_fails_before_a_backend_is_called_with_lines() -> None:
    backends = {"XnnpackBackend": Never()}
    with pytest.raises(BackendFailure):
        lower(_experts(), "xnnpack", backends=backends, options=LoweringOptions(require_memory="1 MiB"))
    with pytest.raises(MemoryRequirementError) as caught:
        lower(_experts(), "xnnpack", backends=backends, options=LoweringOptions(require_memory=20_000))
    lines = str(caught.value).splitlines()
    memory = caught.value.memory["forward"]
    assert lines[0].startswith(
        f"Method 'forward': ExecuTorch's runtime allocates {memory.bytes:,} B for its tensors, required: at most "
        "20,000 B. At the peak, "
    )
    sizes = [int(line.split(" B:")[0].replace(",", "")) for line in lines[1:-1] if " B:" in line]
    assert sizes == sorted(sizes, reverse=True) and sum(tensor.bytes for tensor in memory.tensors) == memory.peak
    assert "XNNPACK's workspace, is not counted" in lines[-1]
    with pytest.raises(MemoryRequirementError) as planned:
        exir_lowering.plan(_experts(), options=LoweringOptions(require_memory="20 KB"))
    assert 'wide_models.py", line' in str(planned.value) and "return" not in str(planned.value).splitlines()[-1]


def test_emit_checks_the_bound_for_what_it_plans() -> None:
    lowered = lower(_experts(), options=LoweringOptions(require_memory="400 KB"))
    lowered.emit()
    with pytest.raises(MemoryRequirementError, match="required: at most 400,000 B"):
        replace(lowered, memory_planner="naive").emit()


@pytest.mark.parametrize("given", ["8 XB", "MB", "", "9" * 400, -1, 2.5, True, "-3 KB"])
def test_a_size_that_is_none(given: Any) -> None:
    with pytest.raises(InputError, match="expected a number of bytes"):
        LoweringOptions(require_memory=given)


def test_planners_by_name() -> None:
    lowered = lower(_experts())
    found = {}
    for name in ("naive", "greedy"):
        artifact = replace(lowered, memory_planner=name).emit()  # type: ignore[arg-type]
        (method,) = inspect(artifact.buffer).methods
        found[name] = sum(arena.bytes for arena in method.memory.arenas)
    theirs = MemoryPlanningPass(memory_planning_algo=MemoryPlanningAlgorithmSuite([naive]))
    config = ExecutorchBackendConfig(memory_planning_pass=theirs)
    kept = lowered.emit(config).report.methods[0].memory
    assert found["greedy"] < found["naive"] == kept.bytes
    with pytest.raises(InputError, match=r"memory_planner='best'\): expected one of .'greedy', 'naive'"):
        LoweringOptions(memory_planner="best")  # type: ignore[arg-type]


def test_a_plan_plans_memory_when_it_is_asked_and_lets_the_programs_go_then() -> None:
    program = _program(wide_models.Decoder)
    weights = [weakref.ref(weight) for weight in program.state_dict.values()]
    plan = exir_lowering.plan(program)
    del program
    copied = pickle.loads(pickle.dumps(plan))
    gc.collect()
    assert copied == plan and copied.methods[0].memory == plan.methods[0].memory is not None
    assert weights and not any(weight() is not None for weight in weights)


class Counted(torch.nn.Module):
    """A method that the default configuration cannot emit: a custom operator has no out variant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.memory_tests.twice(x) + 1


def test_without_a_figure_plan_refuses_a_bound_and_lower_leaves_it_to_emit() -> None:
    with torch.library._scoped_library("memory_tests", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        program = export(Counted(), (torch.ones(2),))
        assert exir_lowering.plan(program, options=LoweringOptions(unsupported="allow")).methods[0].memory is None
        options = LoweringOptions(require_memory=1, unsupported="allow")
        with pytest.raises(InputError, match="Missing out variants"):
            exir_lowering.plan(program, options=options)
        lowered = lower(program, options=options)
        with pytest.raises(InputError, match="Missing out variants"):
            lowered.emit()
