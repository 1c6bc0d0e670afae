"""Random numbers are those of eager PyTorch for a seed, whatever is partitioned between the draws."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiled_functions import same

from exir_lowering.dynamo import GraphReport
from exir_lowering.partitioners import SupportPartitioner


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _x() -> list[Any]:
    return [torch.randn(6, 8)]


def _one_after_the_other(x: torch.Tensor) -> Any:
    y = torch.dropout(x.sin(), 0.5, True)
    z = torch.dropout(y.cos() + torch.rand_like(x), 0.3, True)
    return z, torch.randn(3), torch.bernoulli(torch.sigmoid(x)), torch.randperm(5), torch.randint(0, 9, (4,))


def _side_by_side(x: torch.Tensor) -> Any:
    """What is alike in both branches would be one partition, with which the draws cannot be in order."""
    a, b = x.sin(), x.cos()
    a = torch.dropout(torch.dropout(a, 0.5, True).exp(), 0.3, True)
    b = torch.dropout(torch.dropout(b, 0.5, True).exp(), 0.2, True)
    return a.sin() + b.sin()


def _of_all_kinds(x: torch.Tensor) -> Any:
    noisy = torch.nn.functional.rrelu(x, training=True) + torch.nn.functional.gumbel_softmax(x)
    return noisy * torch.normal(x.detach(), 1.0), torch.nn.functional.alpha_dropout(noisy, 0.2, True)


def _in_branches(x: torch.Tensor) -> Any:
    before = torch.rand_like(x)
    y = torch.cond(x.sum() > -1e9, lambda a: torch.rand_like(a) + a.sin(), lambda a: a * torch.rand_like(a), (x,))
    return y * torch.rand_like(x) + before


def _partitions(reports: tuple[GraphReport, ...]) -> int:
    return sum(len(method.partitions) for each in reports for _, one in each.reports for method in one.methods)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("function", [_one_after_the_other, _side_by_side, _of_all_kinds])
def test_a_seed_gives_the_same_numbers(function: Any, training: bool) -> None:
    assert _partitions(same(function, _x, training=training))


def test_a_seed_gives_the_same_numbers_in_branches() -> None:
    assert _partitions(same(_in_branches, _x))


def test_random_numbers_need_no_input() -> None:
    assert _partitions(same(lambda: (torch.rand(2) * 3, torch.rand(2) + 1), list))


def test_partitions_are_divided_only_where_the_order_asks_for_it() -> None:
    both = SupportPartitioner({"reference": lambda node: "sin" in str(node.target) or "cos" in str(node.target)})
    assert _partitions(same(lambda x: torch.dropout(x.sin(), 0.5, True) + torch.dropout(x.cos(), 0.5, True), _x)) == 2
    torch._dynamo.reset()
    assert _partitions(same(_side_by_side, _x, partitioners=both)) == 2
