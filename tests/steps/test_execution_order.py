"""Calls in another order compute the same bits, in less memory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import wide_models
from executorch.exir import ExecutorchBackendConfig
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from random_programs import random_program
from torch.export import export

from exir_lowering import InputError, InvariantError, LoweredMethods, inspect, load, lower
from exir_lowering.backends.reference import reference_partitioner
from exir_lowering.partitioners import SupportPartitioner, ops
from exir_lowering.steps import memory_planning

CONVOLUTIONS = ("aten.convolution.default", "aten.addmm.default", "aten.mm.default")


def require_equal(
    lowered: LoweredMethods,
    calls: Mapping[str, Sequence[tuple[Any, ...]]],
    config: ExecutorchBackendConfig | None = None,
) -> int:
    """Check that both files return the same bits in consecutive calls of both engines; return what was saved."""
    before, after = (replace(lowered, memory_planner=name).emit(config) for name in ("greedy", "smallest"))  # type: ignore
    programs = [load(artifact.buffer) for artifact in (before, after)]
    for method, given in calls.items():
        for inputs in given:
            results = []
            for program in programs:
                with contextlib.suppress(InputError):  # numbers that ExecuTorch's files have no room for
                    results.append(program.run(method, *copy.deepcopy(inputs)))
            assert len(results) != 1
            for one, other in zip(*results, strict=True) if results else ():
                assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    saved = 0
    for one, other in zip(before.report.methods, after.report.methods, strict=True):
        assert other.memory.bytes <= other.memory.greedy_bytes == one.memory.bytes
        saved += one.memory.bytes - other.memory.bytes
    return saved


def some(backend: str = "reference") -> SupportPartitioner:
    """Give convolutions and products to a backend, so that there are many delegates with host operators between."""
    return SupportPartitioner({backend: ops(*CONVOLUTIONS)})


@pytest.mark.parametrize("partitioner", ["host", "some"])
@pytest.mark.parametrize(
    "kind",
    [wide_models.Experts, wide_models.Detector, wide_models.Dense, wide_models.UNet, wide_models.Inception,
     wide_models.Decoder, wide_models.Recurrent],
)  # fmt: skip
def test_models(kind: type[torch.nn.Module], partitioner: str) -> None:
    model, inputs = wide_models.build(kind)
    lowered = lower(export(model, inputs), some() if partitioner == "some" else None)
    saved = require_equal(lowered, {"forward": [inputs] * 2})
    assert saved > 0 or kind not in (wide_models.Experts, wide_models.Inception)


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6, 7, 8, 9, 21])
def test_random_programs(seed: int) -> None:
    """Several methods, state, lists, higher-order operators, dynamic sizes."""
    random = random_program(seed)
    state = InitializedMutableBufferPass(["f0", "f1", "f2", "count"])
    lowered = lower(random.methods, "xnnpack" if seed % 2 else None)
    require_equal(lowered, random.inputs, ExecutorchBackendConfig(passes=[state]))


class Fenced(torch.nn.Module):
    """Reads its state before and after it writes it, between branches that could run at any time; in whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(8, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [torch.relu(torch.cat([x - i] * 8)).sum(0, keepdim=True) for i in range(6)]
        old = self.state * 2
        self.state.add_(x)
        again = [torch.abs(torch.cat([x - one] * 8)).sum(0, keepdim=True) for one in made]
        self.state.mul_(2)
        return torch.stack([old + self.state, *(each.expand(8, 64) for each in made + again)])


@pytest.mark.parametrize("partitioner", [None, "xnnpack", reference_partitioner(own_state=True)])
def test_state_is_read_and_written_in_its_order(partitioner: Any) -> None:
    inputs = (torch.arange(512.0).reshape(8, 64) % 7,)
    lowered = lower(export(Fenced(), inputs), partitioner)
    eager, program = Fenced(), load(replace(lowered, memory_planner="smallest").emit().buffer)
    for _ in range(3):
        assert torch.equal(program.run("forward", *inputs)[0], eager(*inputs))
    require_equal(lowered, {"forward": [inputs] * 3})


def test_methods_that_share_state() -> None:
    model, inputs = wide_models.build(wide_models.Decoder)
    lowered = lower({name: export(model, inputs) for name in ("prefill", "decode")})
    assert any(state.shared for state in lowered.report.states)
    require_equal(lowered, {"prefill": [inputs], "decode": [inputs] * 2})


def _calls(name: str, lowered: LoweredMethods) -> list[str]:
    (method,) = inspect(replace(lowered, memory_planner=name).emit().buffer).methods  # type: ignore[arg-type]
    return [call.name for call in method.calls]


def test_the_same_calls_in_another_order_and_always_the_same_one() -> None:
    model, inputs = wide_models.build(wide_models.Experts)
    lowered = lower(export(model, inputs), some())
    given, ordered = _calls("greedy", lowered), _calls("smallest", lowered)
    assert given != ordered and sorted(given) == sorted(ordered) == sorted(_calls("smallest", lowered))
    again = lower(export(model, inputs), some())
    one, other = (replace(each, memory_planner="smallest").emit().buffer for each in (lowered, again))
    assert one == other


def test_debug_handles_lead_to_the_same_lines() -> None:
    model, inputs = wide_models.build(wide_models.Experts)
    lowered = lower(export(model, inputs))
    found = []
    for name in ("greedy", "smallest"):
        artifact = replace(lowered, memory_planner=name).emit()  # type: ignore[arg-type]
        (method,) = inspect(artifact.buffer).methods
        debug = artifact.methods["forward"]
        kernels = [call for call in method.calls if call.kind == "kernel"]
        named = [(call.name, handle) for call in kernels for handle in debug.kernels.get(call.number, ())]
        lines = [(name, tuple(node.name for node in debug.nodes[handle])) for name, handle in named]
        found.append(lines)
    assert found[0] != found[1] and sorted(found[0]) == sorted(found[1])


def test_an_order_that_breaks_a_dependence_is_refused() -> None:
    before = [set(), {0}, {1}]
    memory_planning.check_order([0, 1, 2], before)
    for order in ([1, 0, 2], [0, 1], [0, 1, 1]):
        with pytest.raises(InvariantError, match="Another order of calls"):
            memory_planning.check_order(order, before)


def test_what_does_more_than_compute_is_a_fence() -> None:
    aten = torch.ops.aten
    assert all(map(memory_planning._is_pure, (aten.add.out, aten.cat.out, aten.topk.values, aten.convolution.out)))
    for operator in (aten.rand.out, aten.bernoulli.out, aten.native_dropout.out, aten.index_put_.default):
        assert not memory_planning._is_pure(operator)
    assert not memory_planning._is_pure(aten.copy_.default) and not memory_planning._is_pure(print)
