"""Real models through torch.compile: results, gradients and trained weights are eager PyTorch's."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compile_support import (
    assert_near,
    clean,
    compiled,
    delegated,
    delegated_operators,
    gradients,
    reasons,
    state,
    train,
)
from compiled_models import CASES, Case, build

__all__ = ["clean"]

WEIGHTED = {"mobilenet_v2": ("convolution", "addmm"), "vit": ("convolution", "addmm"), "bert": ("addmm",)}
"""The operators with weights of each model, which XNNPACK takes only with weights that are constants; else mm."""

TRAINED = [name for name in CASES if name != "llama_with_cache"]


@pytest.fixture(autouse=True)
def _settings_of_torch() -> Iterator[None]:
    """Trace recurrent layers, and use one thread: operators are too small for two, which would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch._dynamo.config.patch(allow_rnn=True):
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("backend_id", ["reference", "xnnpack"])
@pytest.mark.parametrize("case", CASES)
def test_inference_equals_eager(case: str, backend_id: str) -> None:
    built = build(case)
    built.model.eval()
    called = compiled(built.model, fullgraph=True, partitioners=backend_id)
    with torch.no_grad():
        expected = built.run(built.model)
        assert max(value.abs().max() for value in expected) > 1e-2
        assert_near(built.run(called), expected)
        assert_near(built.run(called), expected)
    assert set(delegated("inference")) == {{"xnnpack": "XnnpackBackend"}.get(backend_id, backend_id)}
    if backend_id == "xnnpack":
        taken = delegated_operators("XnnpackBackend")
        assert all(operator in taken for operator in WEIGHTED.get(case, ("aten_mm_",)))


@pytest.mark.parametrize("case", TRAINED)
def test_gradients_and_ten_steps_equal_eager(case: str) -> None:
    built = build(case)
    called = compiled(built.model.train(), fullgraph=True, partitioners="reference")
    expected, found = _gradients(built, built.model), _gradients(built, called)
    assert max(value.abs().max() for value in expected.values() if value is not None) > 1e-2
    assert_near(found, expected)
    if case == "mobilenet_v2":
        # Batch normalisation of few values makes a hundred times as much of a difference in every step.
        built.model.double()
    _assert_same_steps(built, called, torch.optim.SGD, lr=1e-3, momentum=0.9)
    _assert_same_steps(built, called, torch.optim.Adam, lr=1e-3)
    assert set(delegated("forward")) == {"reference"}
    assert reasons() == []


def _gradients(built: Case, called: Any) -> dict[str, torch.Tensor | None]:
    start = state(built.model)
    torch.manual_seed(1)
    built.loss(called).backward()
    built.model.load_state_dict(start)
    return gradients(built.model)


def _assert_same_steps(built: Case, called: Any, optimizer: type[torch.optim.Optimizer], **settings: float) -> None:
    """Compare what ten steps make of all weights and buffers, with float32's tolerance in float64 too."""
    start = state(built.model)
    ends, losses = [], []
    for function in (built.model, called):
        torch.manual_seed(1)
        losses.append(train(built.model, functools.partial(built.loss, function), optimizer, **settings))
        ends.append({name: value.float() for name, value in state(built.model).items()})
        built.model.load_state_dict(start)
    assert losses[0][-1] < losses[0][0]
    assert max((ends[0][name] - value).abs().max() for name, value in start.items()) > 3e-4
    assert_near(ends[1], ends[0])
