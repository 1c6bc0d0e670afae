"""Training loops as people write them: losses and weights are those of eager PyTorch, step by step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compile_support import clean, reasons, state
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from exir_lowering.dynamo import backend, reports

__all__ = ["clean"]

Wrap = Callable[[Any], Any]
"""Compiles a model, or leaves it as it is."""

Loop = Callable[[Wrap], Iterator[tuple[list[float], list[torch.nn.Module]]]]
"""Trains, and yields the losses and the models after each step."""


class Blocks(torch.nn.Module):
    """Convolutions with batch norm, depthwise and with a residual, as in timm's small models."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1, bias=False), torch.nn.BatchNorm2d(8))
        self.deep = torch.nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = x + torch.nn.functional.gelu(self.norm(self.deep(x)))
        return self.head(x.mean((2, 3)))


def images(wrap: Wrap, *, amp: bool) -> Iterator[tuple[list[float], list[torch.nn.Module]]]:
    """A convolutional net with an average of its weights and accumulated gradients, with autocast or without."""
    model = Blocks()
    average = copy.deepcopy(model)
    called, averaged = wrap(model), wrap(average)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(4):
        losses = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = cross_entropy(called(torch.randn(4, 3, 8, 8)), torch.randint(0, 4, (4,))) / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, now in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                kept.copy_(kept.lerp(now, 0.1) if kept.is_floating_point() else now)
            average.eval()
            losses.append(averaged(torch.ones(2, 3, 8, 8)).sum().item())
        yield losses, [model, average]


def adversaries(wrap: Wrap) -> Iterator[tuple[list[float], list[torch.nn.Module]]]:
    """A generator and a discriminator, each with an optimizer, in turn."""
    generator = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.LeakyReLU(0.2), torch.nn.Linear(16, 6))
    critic = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.LeakyReLU(0.2), torch.nn.Linear(16, 1))
    make, judge = wrap(generator), wrap(critic)
    making, judging = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (generator, critic))
    for _ in range(5):
        real, false = torch.randn(8, 6) + 1, make(torch.randn(8, 4))
        judging.zero_grad()
        judged = binary_cross_entropy_with_logits(judge(real), torch.ones(8, 1))
        judged = judged + binary_cross_entropy_with_logits(judge(false.detach()), torch.zeros(8, 1))
        judged.backward()
        judging.step()
        making.zero_grad()
        made = binary_cross_entropy_with_logits(judge(false), torch.ones(8, 1))
        made.backward()
        making.step()
        yield [judged.item(), made.item()], [generator, critic]


class Tagger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.lstm = torch.nn.LSTM(8, 8, batch_first=True)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor, memory: Any) -> tuple[torch.Tensor, Any]:
        x, memory = self.lstm(self.embedding(ids), memory)
        return self.head(x), memory


def sequences(wrap: Wrap) -> Iterator[tuple[list[float], list[torch.nn.Module]]]:
    """An LSTM over pieces of a text, whose memory goes on from piece to piece."""
    model = Tagger()
    called = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    memory = (torch.zeros(1, 3, 8), torch.zeros(1, 3, 8))
    for _ in range(4):
        scores, memory = called(torch.randint(0, 20, (3, 5)), memory)
        loss = cross_entropy(scores.flatten(0, 1), torch.randint(0, 5, (15,)))
        memory = tuple(value.detach() for value in memory)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield [loss.item()], [model]


LOOPS: dict[str, tuple[Loop, float]] = {
    "images": (functools.partial(images, amp=False), 1e-4),
    "images with autocast": (functools.partial(images, amp=True), 1e-3),  # bfloat16 has eight bits
    "adversaries": (adversaries, 1e-4),
    "sequences": (sequences, 1e-4),
}
"""The loops, and the difference that rounding makes."""


def _follow(loop: Loop, wrap: Wrap) -> list[tuple[list[float], list[dict[str, torch.Tensor]]]]:
    torch.manual_seed(0)
    return [(losses, [state(model) for model in models]) for losses, models in loop(wrap)]


@pytest.mark.parametrize("partitioners", ["reference", "xnnpack"])
@pytest.mark.parametrize("name", LOOPS)
def test_each_step_equals_eager(name: str, partitioners: str) -> None:
    loop, allowed = LOOPS[name]
    options = {"partitioners": partitioners, "fallback": None}
    with torch._dynamo.config.patch(allow_rnn=True):
        got = _follow(loop, torch.compile(backend=backend, options=options))
    want = _follow(loop, lambda model: model)
    assert len(got) == len(want)
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        told = functools.partial("step {}: {}".format, step)
        torch.testing.assert_close(ours, theirs, rtol=allowed, atol=allowed, msg=told)
    methods = [method for report in reports() for _, one in report.reports for method in one.methods]
    assert any(method.delegated for method in methods)
    assert {report.backend for report in reports()} == {"exir_lowering"}
    assert all("change" in reason for reason in reasons())  # weights that change are passed as inputs
