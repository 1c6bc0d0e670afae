"""What kinds of values, types of elements, operators and control flow a compiled function may have."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled_functions import close, same
from torch.utils import _pytree as pytree

from exir_lowering.dynamo import backend, reports


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _indexing(x: torch.Tensor, i: torch.Tensor) -> Any:
    wide = i.view(3, 1).expand(3, 4)
    y = x.clone()
    y[1] = 0
    y[:, 2:] = y[:, :2]
    return (
        x[i],
        x.gather(0, wide),
        torch.zeros(3, 4).scatter(0, wide, x),
        x.index_put((i,), torch.ones(4)),
        torch.zeros(3, 4).index_add(0, i, x),
        torch.where(x > 0, x, 0.0),
        y,
    )


def _lifted(x: torch.Tensor) -> Any:
    total = torch.tensor(3.0)
    total.add_(x.sum())
    return total, x + torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.arange(4) + 1


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("function", "make"),
    [
        (_indexing, lambda: [torch.randn(3, 4), torch.tensor([2, 0, 1])]),
        (_lifted, lambda: [torch.randn(3, 4)]),
        (lambda x, y: (x + 1, y * 2, x.float() + y, torch.softmax(y, -1)), lambda: [_random(torch.float16), _random()]),
        (lambda x: (x + 1, x.sum(), x @ x.t(), x.float()), lambda: [_random(torch.float64)]),
        (lambda x: (x + 1, x // 2, x % 3, x == 2, x.float() / 2), lambda: [torch.arange(12).view(3, 4)]),
        (lambda x: (x + 200, x * x, x >> 1, x.sum()), lambda: [torch.arange(200, 212, dtype=torch.uint8)]),
        (lambda x: (~x, x & x, x.any(), x.sum()), lambda: [torch.tensor([True, False])]),
        (lambda x, y: (x + 1, y.long(), x / 3, torch.stack([y, y])), lambda: [torch.tensor(5), torch.tensor(2.5)]),
        (lambda x, n, f, s, t: (x * n + f, s, t[0].sin()), lambda: [torch.randn(2), 3, 0.5, "s", (torch.ones(2),)]),
    ],
)
def test_values_are_those_of_eager(function: Any, make: Any, training: bool) -> None:
    same(function, make, training=training, write=False)


def _random(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(3, 4).to(dtype)


def test_a_function_without_inputs() -> None:
    """Scalars become constants; there is no input before which they could stand."""
    same(lambda: (torch.tensor([1.0, 2.0]) + 1, torch.ones(2) * 3, torch.full((2,), 5.0) - 4), list)


def _branches(x: torch.Tensor, w: torch.Tensor) -> Any:
    scale = 2.0

    def yes(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(a * w) + scale, a.sin().t().contiguous()

    def no(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sigmoid(a) - w, (a + 1).t().contiguous()

    first, second = torch.cond(x.sum() > 0, yes, no, (x,))
    return first * 2, second


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_branches_are_partitioned(sign: int, training: bool) -> None:
    (report,) = same(_branches, lambda: [sign * torch.rand(3, 4), torch.rand(4)], training=training)
    assert any(method.partitions for _, one in report.reports for method in one.methods)


def _calls(function: Callable[..., Any], inputs: list[tuple[Any, ...]], *, training: bool = False, **how: Any) -> None:
    """Compare calls with several inputs, outputs and gradients."""
    compiled = torch.compile(function, backend=backend, options={"partitioners": "reference"}, **how)
    for given in inputs:
        found = []
        for each in (function, compiled):
            copies = [_leaf(value, training) for value in given]
            outputs = pytree.tree_leaves(each(*copies))
            if training:
                sum(
                    value.sum() for value in outputs if isinstance(value, torch.Tensor) and value.requires_grad
                ).backward()
            found.append((outputs, [value.grad for value in copies if isinstance(value, torch.Tensor)]))
        close(found[1][0], found[0][0], "outputs")
        close(found[1][1], found[0][1], "gradients")


def _leaf(value: Any, training: bool) -> Any:
    return value.clone().requires_grad_(training) if isinstance(value, torch.Tensor) else value


def _sizes(x: torch.Tensor, n: int) -> Any:
    rows = x.shape[0]
    return x.sin() * rows, rows + n, x[: rows - 1].cos(), x[n:], x.view(-1) * n, x.new_ones(rows + n) * x.mean()


@pytest.mark.parametrize("training", [False, True])
def test_sizes_are_symbolic(training: bool) -> None:
    inputs = [(torch.randn(rows, 4), n) for rows, n in ((7, 3), (5, 2), (9, 4), (6, 3))]
    _calls(_sizes, inputs, training=training, dynamic=True)
    (report,) = reports()
    assert report.backend == "exir_lowering"


def test_layouts_of_symbolic_sizes() -> None:
    def function(x: torch.Tensor) -> Any:
        return x.sin(), x.sum(1), x.permute(0, 2, 3, 1) + 1

    inputs = [(torch.randn(2, 3 + n, 4, 5 + n).to(memory_format=torch.channels_last),) for n in range(3)]
    _calls(function, inputs, dynamic=True)
    compiled = torch.compile(function, backend=backend, options={"partitioners": "reference"}, dynamic=True)
    assert compiled(*inputs[0])[0].stride() == inputs[0][0].stride()


def test_a_break_of_the_graph() -> None:
    def function(x: torch.Tensor) -> Any:
        y = x.sin()
        if y.sum() > 0:
            y = y * 2
        return y.view(-1) + x.sum().item()

    _calls(function, [(torch.ones(3),), (-torch.ones(3),)])
    assert len(reports()) > 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.fft.fft(x).real, "dtype torch.complex64"),
        (lambda x: torch.complex(x, x).abs(), "dtype torch.complex64"),
    ],
)
@pytest.mark.filterwarnings("ignore::exir_lowering.dynamo.FallbackWarning")
def test_what_is_left_to_pytorch_has_a_reason(function: Any, reason: str) -> None:
    (report,) = same(function, lambda: [torch.randn(3, 4)], lowered=False)
    assert report.backend == "eager"
    assert reason in report.fallbacks[0].reason


@pytest.mark.filterwarnings("ignore::exir_lowering.dynamo.FallbackWarning")
def test_sizes_that_depend_on_data_are_left_to_pytorch() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (report,) = same(lambda x: (x.nonzero(), x.sin()), lambda: [torch.randn(3, 4)], lowered=False)
    assert "depend on data" in report.fallbacks[0].reason


def test_hooks_and_parts_of_a_backward_pass() -> None:
    def function(x: torch.Tensor) -> Any:
        return x.sin() * x, x.cos(), x.exp().detach()

    compiled = torch.compile(function, backend=backend, options={"partitioners": "reference"})
    found = []
    for each in (function, compiled):
        seen: list[torch.Tensor] = []
        x = torch.linspace(-1, 1, 5, requires_grad=True)
        first, second, third = each(x)
        first.register_hook(lambda gradient, seen=seen: (seen.append(gradient.clone()), gradient * 2)[1])
        first.sum().backward(retain_graph=True)
        first.sum().backward()
        found.append([*seen, x.grad, second, third])
    close(found[1], found[0], "values")
