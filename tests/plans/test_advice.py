"""What a plan advises has been tried: who follows it gets what the plan says, and the backend takes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

from exir_lowering import LoweringOptions, LoweringPlan, lower, plan
from exir_lowering.backends.xnnpack import xnnpack


class Net(nn.Module):
    """A convolution, a view with a dynamic size, and attention over a mask."""

    def __init__(self, unknown: bool = False) -> None:
        super().__init__()
        self.conv, self.layer = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8)
        self.unknown = unknown

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> Any:
        image = self.conv(x)
        heads = self.layer(tokens).view(1, -1 if self.unknown else tokens.shape[1], 2, 4)
        scores = torch.softmax(image.flatten(1) + mask, -1)
        return image, torch.relu(heads) + 1, scores


def exported(model: nn.Module, dynamic: bool = True) -> ExportedProgram:
    dtype = next(model.parameters()).dtype
    inputs = (torch.ones(1, 3, 4, 4, dtype=dtype), torch.ones(1, 5, 8, dtype=dtype), torch.zeros(1, 128, dtype=dtype))
    shapes = (None, {1: Dim("length", min=2, max=16)}, None)
    return export(model.eval(), inputs, dynamic_shapes=shapes if dynamic else None)


class Attends(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, mask)


def attends() -> ExportedProgram:
    return export(Attends(), (torch.ones(1, 2, 4, 8), torch.zeros(4, 4)))


PLAIN = {"rewrites": "none"}  # which would write the dynamic size as -1

Planned = tuple[ExportedProgram, Any, dict[str, Any]]

CASES: dict[str, tuple[Callable[[], Planned], Callable[[], Planned]]] = {
    "export it in float32": (
        lambda: (exported(Net().double()), "xnnpack", {}), lambda: (exported(Net()), "xnnpack", {}),
    ),
    "give xnnpack(enable_bf16=True)": (
        lambda: (exported(Net().bfloat16()), "xnnpack", {}),
        lambda: (exported(Net().bfloat16()), xnnpack(enable_bf16=True), {}),
    ),
    "lower it for fixed sizes": (
        lambda: (exported(Net()), "xnnpack", PLAIN), lambda: (exported(Net(), dynamic=False), "xnnpack", PLAIN),
    ),
    "write -1 for the dynamic size": (
        lambda: (exported(Net()), "xnnpack", PLAIN), lambda: (exported(Net(unknown=True)), "xnnpack", PLAIN),
    ),
    'give a partitioner, "xnnpack"': (
        lambda: (exported(Net(unknown=True)), None, {}), lambda: (exported(Net(unknown=True)), "xnnpack", {}),
    ),
    'pass assume={"x": "finite"}': (
        lambda: (attends(), "xnnpack", {"assume": {"mask": "finite"}}),
        lambda: (attends(), "xnnpack", {"assume": {"mask": "finite", "x": "finite"}}),
    ),
}  # fmt: skip


def made(case: Planned) -> LoweringPlan:
    program, partitioner, options = case
    return plan(program, partitioner, options=LoweringOptions(**options))


@pytest.mark.parametrize("what", CASES)
def test_who_follows_it_gets_what_the_plan_says(what: str) -> None:
    before, after = (case() for case in CASES[what])
    (method,) = (planned := made(before)).methods
    (advice,) = [one for one in method.advice if one.startswith(what)]
    assert what in planned.to_text(width=1000)
    (followed,) = made(after).methods
    found = re.search(r": (\d+) operators? on the host, (\d+) partitions?, instead of (\d+) and (\d+)", advice)
    assert found and [int(found[3]), int(found[4])] == [len(method.host), len(method.partitions)]
    assert abs(len(followed.host) - int(found[1])) <= 1 and len(followed.host) < len(method.host)
    assert len(followed.partitions) == int(found[2])
    program, partitioner, options = after
    lower(program, partitioner, options=LoweringOptions(**options))  # no backend fails on it


class Joins(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.reshape(x.shape[0] * 2, x.shape[1], 4)) + 1


def test_what_a_partitioner_refuses_is_not_advised() -> None:
    """A reshape of two dynamic sizes stays on the host, however it is written."""
    sizes = {0: Dim("batch", min=2, max=8), 1: Dim("length", min=2, max=8)}
    planned = plan(export(Joins(), (torch.ones(3, 5, 8),), dynamic_shapes=(sizes,)), "xnnpack")
    (method,) = planned.methods
    assert any("view_copy" in host.operator for host in method.host)
    (advice,) = method.advice
    assert advice.startswith("lower it for fixed sizes") and "-1" not in planned.to_text()


def test_it_is_not_found_out_before_somebody_asks() -> None:
    options = LoweringOptions(rewrites="none")
    report = lower(exported(Net()), "xnnpack", options=options).report
    (method,) = plan(exported(Net()), "xnnpack", options=options).methods
    assert report.methods[0].advice == ()
    assert method == report.methods[0]
    assert all("test_advice.py:" in one for one in method.advice) and method.advice
