"""What ExecuTorch's conversion gets wrong: numbers beside tensors, concatenations of nothing, graphs of constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import export

from exir_lowering import LoweringOptions, load, lower


class Computes(torch.nn.Module):
    """Programs of one argument."""

    def __init__(self, *programs: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._programs = programs

    def forward(self, x: torch.Tensor) -> Any:
        return tuple(program(x) for program in self._programs)


class Counts(torch.nn.Module):
    """State without dimensions, whose next value is computed with numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(2, dtype=dtype))

    def forward(self, x: torch.Tensor) -> Any:
        now = self.count + 0
        now.fill_(1)
        now.copy_(self.count)
        self.count.copy_(self.count * 3 - 1)
        return now, x * 1


WHOLE = [
    *(lambda x: x + 1, lambda x: 3 * x, lambda x: 1 - x, lambda x: x // 2, lambda x: torch.sub(x, 2, alpha=3)),
    *(lambda x: x * 3_000_000_000, lambda x: x + 2**40),  # which wrap around
]
FRACTIONS = [
    *(lambda x: x + 0.1, lambda x: x * 0.1, lambda x: x / 0.3, lambda x: 0.1 - x, lambda x: x // 0.3),
    *(lambda x: 0.3 / x, lambda x: torch.where(x > 2, x, 0.1), lambda x: x.sum() * 0.1, lambda x: x.pow(0.5)),
    *(lambda x: torch.addcmul(x, x, x, value=0.1), lambda x: torch.lerp(x, x + 1, 0.1)),
]
WHOLE_TYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*WHOLE_TYPES, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_those_of_eager(dtype: torch.dtype, shape: tuple[int, ...], fast: bool) -> None:
    model = Computes(*WHOLE) if dtype in WHOLE_TYPES else Computes(*WHOLE[:5], *FRACTIONS)
    given = torch.full(shape, 3).to(dtype)
    file = lower(export(model, (given,)), options=LoweringOptions(fast=fast)).emit().buffer
    exact: Any = {"rtol": 1e-12, "atol": 0} if dtype is torch.float64 else {}
    results = load(file).run("forward", given)
    torch.testing.assert_close(tuple(results), model(given), **exact)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.float16], ids=str)
def test_state_keeps_its_type(dtype: torch.dtype) -> None:
    given = torch.ones(2)
    program = load(lower(export(Counts(dtype), (given,))).emit().buffer)
    compiled = torch.compile(Counts(dtype), backend="exir_lowering")
    expected = Counts(dtype)
    for _ in range(3):
        results = expected(given)
        torch.testing.assert_close(tuple(program.run("forward", given)), results)
        torch.testing.assert_close(compiled(given), results)


class Empty(torch.nn.Module):
    """Concatenations of nothing, along what is not known too."""

    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        nothing = torch.cat([a, a]), torch.cat([a, a, a], 1), torch.cat([c, a, a], -1)
        return (*nothing, torch.cat([a, b, a]) * 2, torch.stack([a, a], 2), torch.cat([a, a]).sum(0))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("partitioner", [None, "xnnpack", "reference"])
def test_concatenations_of_nothing_have_sizes(partitioner: Any, fast: bool) -> None:
    def given(count: int) -> tuple[torch.Tensor, ...]:
        return torch.ones(0, count), torch.ones(2, count), torch.ones(0)

    columns = torch.export.Dim("columns", min=2, max=9)
    program = export(Empty(), given(4), dynamic_shapes=({1: columns}, {1: columns}, None))
    lowered = lower(program, partitioner, options=LoweringOptions(fast=fast))
    joined = [node.args[0] for node in lowered["forward"].graph.nodes if "aten.cat" in str(node.target)]
    assert all(len(operands) == 1 for operands in joined), joined  # type: ignore[arg-type]
    file = lowered.emit().buffer
    loaded = load(file)
    for count in (4, 2, 9):
        torch.testing.assert_close(tuple(loaded.run("forward", *given(count))), Empty()(*given(count)))


class Constants(torch.nn.Module):
    """State and constants, but no inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor([2.0]))

    def forward(self) -> Any:
        self.count.add_(1)
        return torch.tensor([1.0, 2.0]) + 1, torch.ones(2) * 3, torch.full((2,), 5.0) - 4, self.count * 2


@pytest.mark.parametrize("fast", [True, False])
def test_constants_keep_their_order_where_there_is_no_input(fast: bool) -> None:
    model = Constants()
    loaded = load(lower(export(model, ()), "xnnpack", options=LoweringOptions(fast=fast)).emit().buffer)
    for _ in range(2):
        torch.testing.assert_close(loaded.run("forward"), [*model()])
