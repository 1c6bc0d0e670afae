"""Descriptions of values differ wherever an operator can tell the values apart; what has more to it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from exir_lowering._upstream.value_keys import KeyMaker

MODE = FakeTensorMode(shape_env=ShapeEnv())


class NotAlikeError(Exception):
    """Refused."""


def fake(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with MODE:
        return make()


def like(value: Any, **options: Any) -> Any:
    return KeyMaker(NotAlikeError, **options).key(value)


PLAIN = fake(lambda: torch.empty(2, 3))
OTHERS = {
    "sizes": fake(lambda: torch.empty(3, 2)),
    "strides": fake(lambda: torch.empty(3, 2).t()),
    "offset": fake(lambda: torch.empty(9)[1:7].view(2, 3)),
    "dtype": fake(lambda: torch.empty(2, 3, dtype=torch.int32)),
    "device": fake(lambda: torch.empty(2, 3, device="cuda")),
    "gradients": fake(lambda: torch.empty(2, 3, requires_grad=True)),
    "lazy negation": fake(lambda: torch._neg_view(torch.empty(2, 3))),
}


def symbolic() -> torch.Tensor:
    real = torch.empty(4, 3)
    torch._dynamo.mark_dynamic(real, 0)
    return MODE.from_tensor(real, static_shapes=False)


@pytest.mark.parametrize("what", OTHERS)
def test_a_tensor_that_differs_is_described_differently(what: str) -> None:
    assert like(PLAIN) == like(fake(lambda: torch.empty(2, 3)))
    assert like(PLAIN) != like(OTHERS[what])


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), (0.0, -0.0), (None, "None"), ([1], (1,)), ([1, 2], [2, 1]), ({"a": 1}, {"b": 1})],
)
def test_numbers_and_lists_differ_by_type_and_digits(one: Any, other: Any) -> None:
    assert like(one) != like(other)
    assert like([one, float("nan")]) == like([one, float("nan")])


def test_more_than_is_described_is_refused() -> None:
    constant = fake(lambda: torch.empty(2))
    constant.constant = torch.ones(2)  # type: ignore[attr-defined]
    for value in (constant, torch.ones(2), object(), fake(lambda: torch.eye(2).to_sparse())):
        with pytest.raises(NotAlikeError):
            like([value])
    assert like(constant, constants=True) == like(fake(lambda: torch.empty(2)))


def test_of_one_mode_only_tensors_of_known_form_count() -> None:
    assert like(PLAIN, mode=MODE) == like(PLAIN)
    with FakeTensorMode():
        foreign = torch.empty(2, 3)
    for value in (foreign, OTHERS["offset"], OTHERS["lazy negation"], symbolic()):
        with pytest.raises(NotAlikeError):
            like(value, mode=MODE)


def test_symbols_are_noted() -> None:
    maker = KeyMaker(NotAlikeError)
    described = maker.key([PLAIN, 3])
    assert not maker.symbolic
    assert maker.key([symbolic(), 3]) != described
    assert maker.symbolic
