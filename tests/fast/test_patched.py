"""ExecuTorch's own scripts, accelerated: their own bytes, as long as the patch lasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import quantized_models
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeProgramManager, to_edge, to_edge_transform_and_lower
from executorch.exir.program import _program

from exir_lowering import compat
from exir_lowering.fast import accelerated, current

PLACES = [
    *((EdgeProgramManager, name) for name in ("__init__", "transform", "to_backend", "to_executorch")),
    *((_program, name) for name in ("_generate_edge_program", "_gen_edge_manager_for_partitioners")),
]
BEFORE = [getattr(*place) for place in PLACES]


def in_one_call(program: Any, partitioners: Callable[[], list[Any]]) -> bytes:
    return bytes(to_edge_transform_and_lower(program, partitioner=partitioners()).to_executorch().buffer)


def in_steps(program: Any, partitioners: Callable[[], list[Any]]) -> bytes:
    edge = to_edge(program)
    for partitioner in partitioners():
        edge = edge.to_backend(partitioner)
    return bytes(edge.to_executorch().buffer)


CASES: dict[str, Callable[[], tuple[Any, Callable[[], list[Any]]]]] = {
    "quantised": lambda: (quantized_models.quantized(False), lambda: quantized_models.partitioners(False)),
    "convnext": lambda: (models.exported("convnext")[2], lambda: [XnnpackPartitioner()]),
    "t5": lambda: (models.exported("t5")[2], lambda: [XnnpackPartitioner()]),
    "quantised dynamically": lambda: (quantized_models.quantized(True), lambda: quantized_models.partitioners(True)),
    "on the host": lambda: (models.exported("convnext")[2], list),
}


@pytest.mark.parametrize("script", [in_one_call, in_steps])
@pytest.mark.parametrize("case", CASES)
def test_executorchs_own_bytes(script: Callable[..., bytes], case: str) -> None:
    """ExecuTorch's engine, accelerated with what the patch puts around its calls."""
    program, partitioners = CASES[case]()
    expected = script(program, partitioners)
    with accelerated():
        assert script(program, partitioners) == expected
    with compat.patch_executorch(fast=False):
        plain = script(program, partitioners)
    with compat.patch_executorch():
        assert script(program, partitioners) == plain


def test_the_patch_is_taken_back() -> None:
    seen: list[bool] = []

    class Seen(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu()

    class Pass:
        def __call__(self, module: torch.fx.GraphModule) -> None:
            seen.append(current() is not None)

    edge = to_edge(torch.export.export(Seen(), (torch.ones(2),)))
    for fast in (True, False):
        with compat.patch_executorch(fast=fast):
            edge.transform([Pass()])
            assert current() is None
        assert [getattr(*place) for place in PLACES] == BEFORE
    assert seen == [True, False]
