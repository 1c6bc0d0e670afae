"""Conversion by cases makes what ExecuTorch's conversion makes: of operators, layers and random programs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import both_ways
import operator_programs
import pytest
import random_modules
import torch
from torch import nn
from torch.export import ExportedProgram, export


class Of(nn.Module):
    """Calls a function, with a weight and two buffers at hand."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("kept", torch.ones(4, 4))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def write_into_input(m: Of, x: torch.Tensor) -> Any:
    return x.add_(1), x.sum()


def write_through_slice(m: Of, x: torch.Tensor) -> Any:
    y = torch.block_diag(x, x)
    y[0:1].mul_(2)
    return y + 1


def write_through_reshape(m: Of, x: torch.Tensor) -> Any:
    y = torch.linspace(0, 1, 4) * x
    y.reshape(-1).div_(3)
    return y + 1


def write_through_slice_of_plain(m: Of, x: torch.Tensor) -> Any:
    y = x + 1
    y[0:1].mul_(2)
    return y + 1


def write_into_buffer(m: Of, x: torch.Tensor) -> Any:
    m.kept[0].zero_()
    return x + m.kept


def write_twice(m: Of, x: torch.Tensor) -> Any:
    y = x.clone()
    z = y.t()
    z.add_(y)
    y.relu_()
    return y, z


def view_what_was_written(m: Of, x: torch.Tensor) -> Any:
    y = torch.mm(x, x)
    y += x
    return y.view(2, 8) + 1, y.t().relu()


def written_and_asserted(m: Of, x: torch.Tensor) -> Any:
    y = torch.matmul(x[None], x)
    y.view(4, 4).div_(2)
    return y.to(torch.float32).transpose(0, 1), y.to(torch.float16)


def asserted_only(m: Of, x: torch.Tensor) -> Any:
    torch.nn.functional.pad(x, (1, 1)).to(torch.float16)
    return torch.selu(x)


def known_constant_without_gradients(m: Of, x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = x.double().to(torch.float32) + torch.tensor([1.0, 2.0, 3.0, 4.0])
    return y * x


def unused_random_operator(m: Of, x: torch.Tensor) -> Any:
    torch.alpha_dropout(torch.nn.functional.pad(x, (1, 1)), 0.5, True)
    return torch.selu(x)


def unused_attention(m: Of, x: torch.Tensor) -> Any:
    q = x[None, None]
    nn.functional.scaled_dot_product_attention(q, q, q)
    return x + 1


def decompositions_of_their_own_dtype(m: Of, x: torch.Tensor) -> Any:
    return torch.addcmul(x, x, x, value=0.5), torch.frac(x), torch.nn.functional.glu(x)


def same_operand_twice(m: Of, x: torch.Tensor) -> Any:
    return torch.matmul(x, x), torch.where(x > 0, x, x), x - x


def numbers(m: Of, x: torch.Tensor) -> Any:
    return x + 1, x * 1.0, x + True, 1 - x, x**2, x**-0.0, 2**x, torch.full((2,), 1), torch.full((2,), 1.0)


def outputs_that_are_inputs(m: Of, x: torch.Tensor) -> Any:
    return {"x": x, "again": [x, m.weight, m.kept], "same": (x.contiguous(), x.to(torch.float32)), "none": None, "n": 3}


def promoted(m: Of, x: torch.Tensor) -> Any:
    return x + torch.arange(4), x * torch.ones(4, dtype=torch.float64), x.half() + x, x + torch.tensor(2)


FUNCTIONS = [
    write_into_input,
    write_through_slice,
    write_through_reshape,
    write_through_slice_of_plain,
    write_into_buffer,
    write_twice,
    view_what_was_written,
    written_and_asserted,
    asserted_only,
    known_constant_without_gradients,
    unused_random_operator,
    unused_attention,
    decompositions_of_their_own_dtype,
    same_operand_twice,
    numbers,
    outputs_that_are_inputs,
    promoted,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("way", ["xnnpack unchecked", "none unchecked"])
def test_programs_in_which_they_differed_once(function: Callable[..., Any], way: str) -> None:
    program = export(Of(function), (torch.randn(4, 4),), strict=False)
    assert both_ways.compare(program, way).differences == []


def numbers_of_default_dtype(m: Of, i: torch.Tensor) -> Any:
    return i / i, i.sqrt(), i * 1.5, torch.full((4,), 1.5) + i, torch.linspace(0, 1, 4)


def test_another_default_dtype_is_another_case() -> None:
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            program = export(Of(numbers_of_default_dtype), (torch.arange(4),), strict=False)
        finally:
            torch.set_default_dtype(torch.float32)
        outcome = both_ways.compare(program, "xnnpack unchecked")
        assert (outcome.differences, outcome.left) == ([], ())


def _of_operators(first: int) -> ExportedProgram:
    """Return a program of the calls of some seeds that can be exported."""
    calls = []
    for seed in range(first, first + 10):
        call = operator_programs.call(seed)
        if call is not None and call.module.variant in ("inputs", "strided", "stored", "twice"):
            with contextlib.suppress(Exception):  # some samples cannot be exported
                operator_programs.export_calls([call])
                calls.append(call)
    return operator_programs.export_calls(calls)


@pytest.mark.parametrize(
    ("first", "way"), [(200, "xnnpack unchecked"), (400, "none unchecked"), (540, "keeping some without dim order")]
)
def test_operators(first: int, way: str) -> None:
    program = _of_operators(first)
    assert both_ways.compare(program, way).differences == []


@pytest.mark.parametrize("seed", [1, 4, 5, 11])
def test_random_programs(seed: int) -> None:
    _, program = random_modules.make(seed)
    assert both_ways.compare(program, "xnnpack unchecked").differences == []
