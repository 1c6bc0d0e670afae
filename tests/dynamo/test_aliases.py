"""What compiled functions return lies in memory, and shares it, as in eager PyTorch; so do the inputs they write."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiled_functions import same

from exir_lowering.dynamo import FallbackWarning, backend, reports


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _x() -> list[Any]:
    return [torch.randn(3, 4)]


def _image() -> list[Any]:
    return [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]


def _views_of_a_result(x: torch.Tensor) -> Any:
    y = torch.sigmoid(x)
    return y[1:], y.view(-1), y.t(), y


def _two_views(x: torch.Tensor) -> Any:
    y = torch.sigmoid(x)
    return y.view(2, 6), y.chunk(2, 1), y.diagonal()


def _writes(x: torch.Tensor) -> Any:
    x[1:].mul_(2)
    x.t()[0].add_(1)
    return x, x.view(-1), x.sum()


def _writes_a_result(x: torch.Tensor) -> Any:
    y = x.clone()
    y[1] = 0
    y.view(-1)[3:5].mul_(3)
    return y, y[0]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("function", "make"),
    [
        (lambda x: (x, x + 1), _x),
        (lambda x: (x.view(12), x[1:], x.t(), x * 2), _x),
        (lambda x: (x.sin(), None, 3, "text", {"a": x.cos()}), _x),
        (_views_of_a_result, _x),
        (_two_views, _x),
        (lambda x: x.sin()[:, 1:3], _x),
        (lambda x: [x.sin()] * 2, _x),
        (lambda x: (x.detach(), x.sin().detach(), x * 2), _x),
        (lambda x: (x.sin().as_strided((2, 2), (4, 1), 1), x.cos()), _x),
        (lambda x: (x.t().sin(), x.t().reshape(-1) * 2), _x),
        (lambda x: (x.sin(), x.contiguous() * 2, x.permute(0, 2, 3, 1).cos()), _image),
        (lambda x: (x.sin(), x.sum(0)), lambda: [torch.randn(0, 4)]),
        (lambda x: (x.sin(), x.view(1)), lambda: [torch.randn(())]),
        (lambda x: (x.sin(), x.transpose(1, 3) + 1), lambda: [torch.randn(3, 1, 4, 1)]),
        (_writes, _x),
        (_writes_a_result, _x),
    ],
)
def test_memory_is_shared_and_laid_out_as_in_eager(function: Any, make: Any, training: bool) -> None:
    same(function, make, training=training)


@pytest.mark.parametrize(
    "views",
    [
        lambda x: (x.t(), x.t()),
        lambda x: (x[1:, 1:].t(), x[0]),
        lambda x: (x[:, ::2].t(), x.view(-1)[:2]),
        lambda x: (x[:1].expand(4, 4), x[0]),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_inputs_may_be_views(views: Any, training: bool) -> None:
    same(lambda x, y: (x.sin(), x.reshape(-1) + 1, y, x[0] * 2), _x, views=views, training=training)


_AT = torch.tensor([1])


def _put(cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return cache.index_copy_(0, _AT, new)


def _old_and_new(cache: torch.Tensor, new: torch.Tensor) -> Any:
    old = cache * 1.0
    return old, _put(cache, new).clone(), cache * 2


def _from_itself(cache: torch.Tensor, new: torch.Tensor) -> Any:
    _put(cache, cache[2:3] * 2 + new)
    return cache.sum(), cache[0], cache


def _twice(cache: torch.Tensor, new: torch.Tensor) -> Any:
    first = _put(cache, new) * 2
    cache[torch.tensor([0, 2])] = first[:2]
    return first, cache.t()


def _added(cache: torch.Tensor, new: torch.Tensor) -> Any:
    cache.index_put_((torch.tensor([1, 1]),), new, accumulate=True)
    return cache * 3


@pytest.mark.parametrize(
    ("function", "in_place"),
    [
        (lambda cache, new: _put(cache, new.sin()) * 2, True),
        (lambda cache, new: (_put(cache, new) + 0.0, cache.clone()), True),
        (lambda cache, new: (_put(cache, new), cache[1:].t(), cache.view(-1)), False),
        (_added, True),
        (_old_and_new, False),
        (_from_itself, False),
        (_twice, False),
        (lambda cache, new: cache.clone().index_copy_(0, _AT, new), False),
    ],
    ids=["read", "copied", "returned", "added", "old", "itself", "twice", "not its own"],
)
@pytest.mark.parametrize("training", [False, True])
def test_what_is_put_into_an_input_is_written_there_and_the_rest_is_not_copied(
    function: Any, in_place: bool, training: bool
) -> None:
    made = [torch.randn(3, 4), torch.randn(1, 4)]
    same(function, lambda: [one.clone() for one in made], partitioners="xnnpack", training=training, lowered=False)
    if training:
        return
    torch._dynamo.reset()
    called = torch.compile(function, backend=backend, options={"partitioners": "xnnpack", "partitions": "all"})
    called(*made)
    with torch.profiler.profile() as profile:
        called(*made)
    names = {event.key for event in profile.key_averages()}
    assert ("aten::index_put" not in names) == in_place


def test_writes_to_one_tensor_given_twice() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(1)
        return x + y, y

    same(function, _x, views=lambda x: (x, x))


@pytest.mark.filterwarnings("ignore::exir_lowering.dynamo.FallbackWarning")
def test_writes_to_overlapping_inputs() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        y.mul_(2)
        x.add_(1)
        return x + y

    same(function, _x, views=lambda x: (x[:2], x[1:]), lowered=False)


def _pooled(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.adaptive_avg_pool2d(x.to(memory_format=torch.channels_last) * 2, 1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.as_strided((2, 2), (6, 1), 7) * 2,  # of an input, beyond its own elements
        lambda x: (x * 3).as_strided((2, 2), (1, 4), 1) + 1,
        lambda x: _pooled(x.reshape(1, 3, 2, 2)) + (x * 3).as_strided((3, 1, 1), (1, 1, 1), 1),
    ],
)
@pytest.mark.filterwarnings("ignore::exir_lowering.dynamo.FallbackWarning")
def test_what_depends_on_strides_is_left_to_pytorch(function: Any) -> None:
    (report,) = same(function, lambda: [torch.randn(5, 6)], views=lambda x: (x[1:4, :4],), lowered=False)
    assert "depends on a tensor's memory layout" in report.fallbacks[0].reason


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (lambda x: x.t().sin() * 2, _x),
        (lambda x: torch.nn.functional.linear(x, torch.ones(4, 4)), lambda: [torch.randn(2, 3, 4)]),
        (lambda x: x.t().reshape(-1), _x),
        (lambda x: x.sin(), _image),
    ],
)
def test_what_an_autograd_function_returns_can_be_written(function: Any, make: Any) -> None:
    """PyTorch refuses it for views; these are none in eager PyTorch."""
    gradients = []
    for each in (function, torch.compile(function, backend=backend, options={"partitioners": "reference"})):
        torch.manual_seed(0)
        (x,) = make()
        y = each(x.requires_grad_())
        y.mul_(3)
        (y * torch.linspace(0, 1, y.numel()).view(y.shape)).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_an_operator_that_only_does_something_is_not_lost() -> None:
    seen: list[float] = []

    @torch.library.custom_op("exir_lowering_tests::note", mutates_args=())
    def note(x: torch.Tensor) -> None:
        seen.append(float(x.sum()))

    @note.register_fake
    def _(x: torch.Tensor) -> None:
        return None

    torch.fx.node.has_side_effect(torch.ops.exir_lowering_tests.note.default)
    compiled = torch.compile(lambda x: (note(x), x + 1)[1], backend=backend, options={"partitioners": "reference"})
    with pytest.warns(FallbackWarning, match="has side effects"):
        compiled(torch.ones(3))
    assert seen == [3.0]
    assert reports()[0].backend == "eager"
