"""Training through torch.compile: what is partitioned, updates of weights, modes, checkpoints, random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_support import (
    Recording,
    assert_near,
    clean,
    compiled,
    delegated,
    gradients,
    reasons,
    state,
)
from torch.utils.checkpoint import checkpoint

from exir_lowering.dynamo import reports

__all__ = ["clean"]


class Layers(torch.nn.Module):
    """A model with parameters, buffers that training writes, and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
        self.norm = torch.nn.BatchNorm1d(8)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.dropout(torch.relu(self.norm(self.first(x))))).tanh()


def _pair(**settings: Any) -> tuple[Layers, Layers]:
    """Return two equal models: one for eager PyTorch, one to compile."""
    torch.manual_seed(0)
    model = Layers(**settings)
    return model, copy.deepcopy(model)


def _step(model: torch.nn.Module, called: Callable[..., torch.Tensor], x: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(2)
    loss = called(x).square().sum()
    loss.backward()
    return {"loss": loss.detach(), "gradients": gradients(model), "state": state(model)}


@pytest.mark.parametrize(
    ("training", "kinds"),
    [("both", ["forward"]), ("forward", ["forward"]), ("backward", ["backward"]), ("none", [])],
)
@pytest.mark.parametrize("partitioner", ["reference", "xnnpack"])
def test_what_is_partitioned(partitioner: str, training: str, kinds: list[str]) -> None:
    eager, model = _pair(dropout=0.3)
    called = compiled(model, partitioners=partitioner, training=training)
    for _ in range(3):
        x = torch.randn(5, 6)
        assert_near(_step(model, called, x), _step(eager, eager, x))
    assert [kind for report in reports() for kind, _ in report.reports] == kinds
    assert bool(delegated()) == bool(kinds)
    with torch.no_grad():
        model.eval()
        assert_near(called(x), eager.eval()(x))
    assert delegated("inference")  # `training` is about functions that are differentiated


def test_forward_and_backward_partitions_are_lowered_in_one_call() -> None:
    recording = Recording()
    model = Layers()
    called = compiled(model, partitioners="reference", backends={"reference": recording})
    _step(model, called, torch.randn(5, 6))
    _step(model, called, torch.randn(5, 6))
    assert recording.calls == [{"forward": 1, "backward": 1}]


def _in_place(model: torch.nn.Module, others: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(0.1)


def _in_place_of_data(model: torch.nn.Module, others: dict[str, torch.Tensor]) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def _loaded(model: torch.nn.Module, others: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(others)


def _assigned(model: torch.nn.Module, others: dict[str, torch.Tensor]) -> None:
    model.load_state_dict({name: value.clone() for name, value in others.items()}, assign=True)


def _new_data(model: torch.nn.Module, others: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = others[name].clone()


def _new_parameters(model: torch.nn.Module, others: dict[str, torch.Tensor]) -> None:
    model.first.weight = torch.nn.Parameter(others["first.weight"].clone())


def _by_numpy(model: torch.nn.Module, others: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.detach().numpy()[...] = others[name].numpy()


def _buffers(model: torch.nn.Module, others: dict[str, torch.Tensor]) -> None:
    model.norm.running_mean.add_(1)
    model.norm.running_var = torch.full((8,), 3.0)


CHANGES = [_in_place, _in_place_of_data, _loaded, _assigned, _new_data, _new_parameters, _by_numpy, _buffers]


@pytest.mark.parametrize("mode", ["train", "no_grad"])
@pytest.mark.parametrize("partitioner", ["reference", "xnnpack"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_the_next_call_sees_changed_weights(change: Any, partitioner: str, mode: str) -> None:
    eager, model = _pair()
    torch.manual_seed(7)
    others = state(Layers())
    for each in (eager, model):
        each.train(mode == "train")
    called = compiled(model, partitioners=partitioner)
    with torch.set_grad_enabled(mode != "no_grad"):
        for _ in range(3):
            x = torch.randn(5, 6)
            for each in (eager, model):
                change(each, others)
            if mode == "no_grad":
                assert_near(called(x), eager(x))
            else:
                assert_near(_step(model, called, x), _step(eager, eager, x))
            with torch.no_grad():
                for each in (eager, model):
                    for parameter in each.parameters():
                        parameter.add_(0.25)


@pytest.mark.parametrize("partitioner", ["reference", "xnnpack"])
def test_gradients_in_eval_mode(partitioner: str) -> None:
    eager, model = _pair(dropout=0.5)
    for each in (eager, model):
        each.norm.running_mean.fill_(0.5)
    called = compiled(model.eval(), partitioners=partitioner)
    x = torch.randn(5, 6)
    assert_near(_step(model, called, x), _step(eager.eval(), eager, x))
    for each in (eager, model):
        each.train()
    assert_near(_step(model, called, x), _step(eager, eager, x))


@pytest.mark.parametrize("partitioner", ["reference", "xnnpack"])
@pytest.mark.parametrize(("optimizer", "settings"), [(torch.optim.SGD, {}), (torch.optim.AdamW, {"eps": 1e-2})])
def test_inference_between_steps_sees_each_step(optimizer: Any, settings: Any, partitioner: str) -> None:
    eager, model = _pair()
    called = compiled(model, partitioners=partitioner)
    x = torch.randn(5, 6)
    results = []
    for each, function in ((eager, eager), (model, called)):
        stepping = optimizer(each.parameters(), lr=0.05, **settings)
        seen = []
        for _ in range(4):
            each.train()
            stepping.zero_grad()
            function(x).square().sum().backward()
            stepping.step()
            each.eval()
            with torch.no_grad():
                seen.append(function(x).clone())
            with torch.inference_mode():
                seen.append(function(x).clone())
        results.append(seen)
    assert not torch.allclose(results[0][0], results[0][-1], atol=1e-2)
    assert_near(results[1], results[0])


def test_frozen_parameters_get_no_gradient() -> None:
    eager, model = _pair()
    for each in (eager, model):
        each.first.requires_grad_(False)
    called = compiled(model, partitioners="reference")
    x = torch.randn(5, 6)
    found, expected = _step(model, called, x), _step(eager, eager, x)
    assert_near(found, expected)
    assert found["gradients"]["first.weight"] is None and found["gradients"]["second.weight"] is not None
    for each in (eager, model):  # and it is seen when they are thawed
        each.first.requires_grad_(True)
    found, expected = _step(model, called, x), _step(eager, eager, x)
    assert_near(found, expected)
    assert found["gradients"]["first.weight"] is not None


@pytest.mark.parametrize("partitioner", ["reference", "xnnpack"])
def test_autocast(partitioner: str) -> None:
    eager, model = _pair()
    called = compiled(model, partitioners=partitioner)
    x = torch.randn(5, 6)
    results = []
    for each, function in ((eager, eager), (model, called)):
        with torch.autocast("cpu", torch.bfloat16):
            result = function(x)
        result.float().square().sum().backward()
        results.append((result.detach(), gradients(each)))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            results[-1] += (function(x),)
    assert results[0][0].dtype is torch.bfloat16
    torch.testing.assert_close(results[1], results[0], rtol=5e-2, atol=5e-2)
    # Without it, the same function is in float32 again.
    assert_near(_step(model, called, x), _step(eager, eager, x))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_activation_checkpoints(dropout: float) -> None:
    eager, model = _pair(dropout=dropout)
    eager.norm, model.norm = torch.nn.LayerNorm(8), torch.nn.LayerNorm(8)  # no buffers, which would be written twice

    def function(each: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: (
            checkpoint(each, x * 2, use_reentrant=False) + checkpoint(torch.sin, x, use_reentrant=False).sum()
        )

    called = compiled(function(model), partitioners="reference", fallback="eager")
    for _ in range(2):
        x = torch.randn(5, 6)
        assert_near(_step(model, called, x), _step(eager, function(eager), x))
    assert delegated("forward") and reasons() == []


def test_dropout_draws_what_eager_draws() -> None:
    eager, model = _pair(dropout=0.5)
    called = compiled(model, partitioners="reference")
    x = torch.randn(50, 6)
    results = []
    for function in (eager, called):
        torch.manual_seed(3)
        results.append([function(x).detach() for _ in range(3)] + [torch.rand(3)])
    assert not torch.equal(results[0][0], results[0][1])
    assert_near(results[1], results[0])


def test_gradients_accumulate() -> None:
    eager, model = _pair()
    called = compiled(model, partitioners="reference")
    inputs = [torch.randn(5, 6) for _ in range(3)]
    for function in (eager, called):
        for x in inputs:
            function(x).square().sum().backward()
    assert_near(gradients(model), gradients(eager))


def test_backward_twice_through_a_retained_graph() -> None:
    eager, model = _pair()
    called = compiled(model, partitioners="reference")
    x = torch.randn(5, 6)
    results = []
    for each, function in ((eager, eager), (model, called)):
        loss = function(x).square().sum()
        loss.backward(retain_graph=True)
        once = {name: parameter.grad.clone() for name, parameter in each.named_parameters()}
        loss.backward()
        twice = gradients(each)
        assert_near({name: 2 * value for name, value in once.items()}, twice)
        results.append(twice)
    assert_near(results[1], results[0])


def test_two_forwards_before_their_backwards() -> None:
    eager, model = _pair()
    called = compiled(model, partitioners="reference")
    one, other = torch.randn(5, 6), torch.randn(5, 6)
    for function in (eager, called):
        losses = [function(x).square().sum() for x in (one, other)]
        losses[0].backward()
        losses[1].backward()
    assert_near(gradients(model), gradients(eager))


def test_gradients_of_inputs_and_of_part_of_the_results() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        return x * y.sin(), y.exp(), 3

    called = compiled(function, partitioners="reference")
    results = []
    for each in (function, called):
        torch.manual_seed(0)
        x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
        first, second, number = each(x, y)
        assert number == 3
        results.append([*torch.autograd.grad(first.sum(), [x, y], retain_graph=True)])
        results[-1].extend(torch.autograd.grad(second.sum(), [y]))
        first, second, _ = each(x.detach(), y)
        results[-1].extend(torch.autograd.grad(first.sum() + second.sum(), [y]))
    assert_near(results[1], results[0])
