"""Models that a delegate executes right except for some values: faults that normally distributed inputs miss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim, ExportedProgram, export

from exir_lowering.backends.reference import ReferenceDelegate

Fault = Callable[[list[Any], list[Any], int], list[Any]]
"""Is given the inputs and outputs of a payload, and the number of the call from 1; returns what is wrong instead."""


@dataclass(frozen=True)
class Planted:
    """A model, its fault, and inputs that do not show it.

    Attributes:
        name: What is wrong.
        model: Computes what the delegate gets wrong.
        inputs: Makes the inputs that anyone would try.
        fault: What the delegate makes of it.
        shown_by: Names of cases, of which one has to show it.
        dynamic: The dynamic shapes.
    """

    name: str
    model: Callable[..., Any]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    fault: Fault
    shown_by: tuple[str, ...]
    dynamic: Any = None

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def export(self) -> ExportedProgram:
        torch.manual_seed(0)
        shapes = None if self.dynamic is None else (self.dynamic,)
        return export(_Model(self.model).eval(), self.inputs(), dynamic_shapes=shapes)

    def delegate(self) -> ReferenceDelegate:
        return Faulty(self.fault)


class _Model(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.table = torch.nn.Embedding(50, 4)
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(1, 8, 4))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


class Faulty(ReferenceDelegate):
    """Executes payloads of the reference backend, with a fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault, self.calls = fault, 0

    def execute(self, handle: Any, inputs: list[Any]) -> Any:
        self.calls += 1
        given = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
        return self.fault(given, list(super().execute(handle, inputs)), self.calls)


def _numbers(*shape: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randn(*shape, generator=torch.Generator().manual_seed(3)),)


def _write(m: Any, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    m.cache[:, place] = x
    return m.cache.sum(-1) + 1


def _count(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.total.add_(x)
    return m.total * 2


PLANE = (2, 3)


def _centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(PLANE, keepdim=True)


def _unwritten(given: list[Any], outputs: list[Any], call: int) -> list[Any]:
    return [torch.cat([o[:, :-1], 0 * o[:, -1:] + 1], 1) if o.dim() == 2 else o for o in outputs]


def _all_false(given: list[Any], outputs: list[Any], call: int) -> list[Any]:
    return outputs if any(v.any() for v in given if v.dtype == torch.bool) else [o * 0 for o in outputs]


def _last_argmax(given: list[Any], outputs: list[Any], call: int) -> list[Any]:
    x = given[0]
    return [x.shape[-1] - 1 - x.flip(-1).argmax(-1)]


def _in_int32(given: list[Any], outputs: list[Any], call: int) -> list[Any]:
    return [(given[0].to(torch.int32) * 3 + 1).to(torch.int64)]


def _in_float32(given: list[Any], outputs: list[Any], call: int) -> list[Any]:
    return [(given[0].float() * 3 + 1).to(torch.int64)]


def _plain_softmax(given: list[Any], outputs: list[Any], call: int) -> list[Any]:
    powers = given[0].exp()
    return [powers / powers.sum(-1, keepdim=True)]


def _without(ids: torch.Tensor, last: int, outputs: list[Any]) -> list[Any]:
    return [torch.where((ids == last).reshape(*ids.shape, *[1] * (o.dim() - ids.dim())), 0 * o, o) for o in outputs]


PLANTED = (
    Planted("saturation above 8", lambda m, x: x * 1.5 + 1, _numbers(2, 8),
            lambda given, outputs, call: [outputs[0].clamp(max=8)], ("values beyond 8", "large magnitudes")),
    Planted("the last of equal maxima", lambda m, x: x.argmax(-1), _numbers(2, 8), _last_argmax, ("ties", "zeros")),
    Planted("halves rounded up", lambda m, x: x.round(), _numbers(2, 8),
            lambda given, outputs, call: [(given[0] + 0.5).floor()], ("ties",)),
    Planted("an image of variance 0", lambda m, x: _centred(x) * (x.var(PLANE, keepdim=True) + 1e-5).rsqrt(),
            _numbers(1, 3, 4, 4),
            lambda given, outputs, call: [_centred(given[0]) / given[0].std(PLANE, keepdim=True)],
            ("constant 0.5", "zeros")),
    Planted("the third call", lambda m, x: m.linear(x), _numbers(2, 4),
            lambda given, outputs, call: [outputs[0] + (call == 3)], ("randn",)),
    Planted("state is lost at the third call", _count, _numbers(4),
            lambda given, outputs, call: [o * 0 if call == 3 else o for o in outputs], ("randn",)),
    Planted("the last token id", lambda m, x: m.table(x) * 2, lambda: (torch.tensor([[3, 7, 11, 2]]),),
            lambda given, outputs, call: _without(given[0], 49, outputs), ("last token id",)),
    Planted("0 / 0 is 0", lambda m, x: x / x.abs(), _numbers(2, 8),
            lambda given, outputs, call: [outputs[0].nan_to_num(0.0)], ("zeros", "one-hot, first")),
    Planted("the greatest batch", lambda m, x: m.linear(x), _numbers(2, 4),
            lambda given, outputs, call: [torch.cat([outputs[0][:-1], outputs[0][-1:] * (len(outputs[0]) < 7)])],
            ("greatest sizes",), ({0: Dim("batch", min=1, max=7)},)),
    Planted("an even size only", lambda m, x: x.reshape(-1, 2).sum(1), lambda: (torch.randn(8),),
            lambda given, outputs, call: [outputs[0] * (1 if len(given[0]) < 24 else 0)],
            ("greatest sizes",), ({0: Dim("half", min=2, max=12) * 2},)),
    Planted("int64 in 32 bits", lambda m, x: x * 3 + 1, lambda: (torch.arange(8),), _in_int32,
            ("integers beyond int32",)),
    Planted("int64 as float32", lambda m, x: x * 3 + 1, lambda: (torch.arange(8),), _in_float32,
            ("integers beyond float32",)),
    Planted("the last position of a cache", _write, lambda: (torch.randn(2, 4), torch.tensor([1, 2])),
            _unwritten, ("last positions",)),
    Planted("-128 has no negative", lambda m, x: x.to(torch.int32) * -1,
            lambda: (torch.arange(-4, 4, dtype=torch.int8),), lambda given, outputs, call: [outputs[0].clamp(max=127)],
            ("limits of the dtype", "random bytes")),
    Planted("a channel that stands out", lambda m, x: x.softmax(-1).matmul(x), _numbers(1, 8, 8),
            lambda given, outputs, call: [outputs[0].clamp(-50, 50)], ("outlier channel", "large magnitudes")),
    Planted("nothing but false", lambda m, x, k: torch.where(k, x, -x),
            lambda: (torch.randn(6), torch.tensor([True, False] * 3)), _all_false, ("mask of zeros",)),
    Planted("a maximum that starts at 0", lambda m, x: x.amax(-1), _numbers(2, 8),
            lambda given, outputs, call: [outputs[0].clamp(min=0)], ("negative",)),
    Planted("a softmax whose powers overflow", lambda m, x: x.softmax(-1), _numbers(2, 8), _plain_softmax,
            ("large magnitudes",)),
    Planted("the first token id", lambda m, x: m.table(x) * 2, lambda: (torch.tensor([[3, 7, 11, 2]]),),
            lambda given, outputs, call: _without(given[0], 0, outputs), ("first token id",)),
    Planted("a variance as a difference of squares", lambda m, x: x.var(-1, correction=0), _numbers(2, 64),
            lambda given, outputs, call: [(given[0] ** 2).mean(-1) - given[0].mean(-1) ** 2],
            ("mean of 100 deviations",)),
    Planted("small numbers are 0", lambda m, x: x * 3, _numbers(2, 8),
            lambda given, outputs, call: [torch.where(outputs[0].abs() < 1e-3, 0.0, outputs[0])],
            ("small magnitudes",)),
)  # fmt: skip
