"""What does not depend on inputs is computed ahead of time; weights stay as backends look for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rewriting_support import versions

from exir_lowering import LoweringOptions, lower
from exir_lowering.rewrites import CommonSubexpressions, Constants, Identity

INF = float("inf")


class One(torch.nn.Module):
    """A function with the tables that it uses."""

    def __init__(self, apply: Any, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.apply_to = apply
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply_to(self, x)


def causal(self: Any, x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[-1])
    return x + torch.where(positions[:, None] >= positions, 0.0, -INF)


def test_masks() -> None:
    found = versions(One(causal), (torch.randn(2, 8, 8),), [Constants()])
    assert found.after == ["aten.add.Tensor"]
    found.check(torch.randn(2, 8, 8), exact=True)
    found.check(torch.full((2, 8, 8), INF))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_tables_of_any_dtype(dtype: torch.dtype) -> None:
    table = torch.tensor([[3, 1, 0], [0, 5, 1]]).to(dtype)
    model = One(
        lambda self, x: torch.where(x[:, None] > 0, torch.cat([self.table, self.table.flip(0)]), self.table[:1]),
        table=table,
    )
    x = torch.tensor([1.0, -1.0, INF, float("nan")])
    found = versions(model, (x,), [Constants()])
    assert len(found.after) < len(found.before)
    found.check(x, exact=True)


def test_bfloat16_empty_tensors_and_state_are_left_alone() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shown = x + self.count.exp()
            self.count.add_(1)
            return shown

    half = One(lambda self, x: x + self.table.exp(), table=torch.randn(3).bfloat16())
    empty = One(lambda self, x: torch.cat([x, self.table.exp()]), table=torch.zeros(0))
    for model, x in ((Counter(), torch.randn(3)), (half, torch.randn(3).bfloat16()), (empty, torch.randn(3))):
        found = versions(model, (x,), [Constants()])
        assert found.before.count("aten.exp.default") == found.after.count("aten.exp.default")


def test_what_is_returned_is_computed() -> None:
    found = versions(One(lambda self, x: torch.arange(4.0).exp() + 1), (torch.randn(4),), [Constants()])
    assert "aten.add.Tensor" in found.after and "aten.arange.start_step" not in found.after
    found.check(torch.randn(4))


def test_weights_stay_where_backends_look_for_them() -> None:
    linear = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    plain = versions(linear, (torch.randn(2, 8),), [Constants()])
    assert plain.before == plain.after
    with_xnnpack = versions(linear, (torch.randn(2, 8),), [Constants()], partitioners="xnnpack")
    assert with_xnnpack.before == with_xnnpack.after
    assert with_xnnpack.after == ["executorch_call_delegate", "getitem"]


def test_weights_that_are_computed_are_stored_once() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(64, 512, 3))
    x = torch.randn(1, 64, 20)
    found = versions(layer, (x,), [Constants(), Identity()], partitioners="xnnpack")
    assert found.after == ["executorch_call_delegate", "getitem"] != found.before
    found.check(x, rtol=1e-4, atol=1e-5)
    program = torch.export.export(layer, (x,))
    sizes = [
        len(lower(program, options=LoweringOptions(rewrites=chosen)).emit().buffer)
        for chosen in ("none", [Constants()])
    ]
    assert sizes[1] < sizes[0]


def test_files_do_not_grow() -> None:
    model = One(lambda self, x: x + torch.arange(float(1 << 18)).exp(), table=torch.zeros(1))
    found = versions(model, (torch.randn(1 << 18),), [Constants()])
    assert found.before.count("aten.exp.default") == found.after.count("aten.exp.default")
    found.check(torch.randn(1 << 18))


def test_equal_values_are_stored_once() -> None:
    def apply(self: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = (x + torch.arange(float(20000)).exp()).relu()
        return x

    found = versions(One(apply), (torch.randn(20000),), [Constants(), CommonSubexpressions()])
    assert set(found.after) == {"aten.add.Tensor", "aten.relu.default"}
    found.check(torch.randn(20000))


def test_layouts() -> None:
    last = torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last)
    model = One(lambda self, x: x * self.table.exp(), table=last.clone())
    found = versions(model, (last,), [Constants()])
    found.check(last)
    assert found.after == ["aten.mul.Tensor"]


def test_sizes_known_at_runtime() -> None:
    def apply(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.shape[0])[:, None] + torch.arange(4.0).exp()

    shapes = {"x": {0: torch.export.Dim("n", min=1, max=9)}}
    found = versions(One(apply), (torch.randn(3, 4),), [Constants()], dynamic_shapes=shapes)
    assert "aten.exp.default" not in found.after and "aten.arange.start_step" in found.after
    for size in (1, 9):
        found.check(torch.randn(size, 4), rtol=1e-5)


def test_quantised_weights_stay() -> None:
    from quantized_models import partitioners, quantized

    for dynamic in (False, True):
        program = quantized(dynamic)
        payloads = [
            lower(program, partitioners(dynamic), options=LoweringOptions(rewrites=chosen)).emit().buffer
            for chosen in ("none", [Constants()])
        ]
        assert payloads[0] == payloads[1]
