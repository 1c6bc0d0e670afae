"""Cases of single operators, element types, memory layouts and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from exir_lowering.testing.samples import Case, CaseInput, Hold, case, parameter, tensor, weight

_MATRIX = tensor(2, 3)
_UNIT = tensor(2, 3, values="unit")
_POSITIVE = tensor(2, 3, values="positive")
_INDEX = torch.int64
_IMAGE = tensor(1, 4, 6, 6)

_Row = tuple[str, Callable[..., Any], tuple[CaseInput, ...]]

_ELEMENTWISE: tuple[_Row, ...] = (
    ("add", lambda m, x, y: x + y, (_MATRIX, _MATRIX)),
    ("add-broadcast", lambda m, x, y: x + y, (_MATRIX, tensor(3))),
    ("add-alpha", lambda m, x, y: torch.add(x, y, alpha=2), (_MATRIX, _MATRIX)),
    ("sub", lambda m, x, y: x - y, (_MATRIX, _MATRIX)),
    ("mul", lambda m, x, y: x * y, (_MATRIX, _MATRIX)),
    ("mul-broadcast-both", lambda m, x, y: x * y, (tensor(2, 1, 3), tensor(4, 1))),
    ("mul-number", lambda m, x: x * 2.5, (_MATRIX,)),
    ("div", lambda m, x, y: x / y, (_MATRIX, _POSITIVE)),
    ("maximum", lambda m, x, y: torch.maximum(x, y), (_MATRIX, _MATRIX)),
    ("abs", lambda m, x: torch.abs(x), (_MATRIX,)),
    ("exp", lambda m, x: torch.exp(x), (_UNIT,)),
    ("rsqrt", lambda m, x: torch.rsqrt(x), (_POSITIVE,)),
    ("relu", lambda m, x: torch.relu(x), (_MATRIX,)),
    ("sigmoid", lambda m, x: torch.sigmoid(x), (_MATRIX,)),
    ("tanh", lambda m, x: torch.tanh(x), (_MATRIX,)),
    ("gelu", lambda m, x: F.gelu(x), (_MATRIX,)),
    ("clamp", lambda m, x: torch.clamp(x, -1.0, 0.5), (_MATRIX,)),
    ("where", lambda m, x, y: torch.where(x > y, x, -y), (_MATRIX, _MATRIX)),
    ("greater", lambda m, x, y: x > y, (_MATRIX, _MATRIX)),
    ("cast-to-int", lambda m, x: x.to(torch.int32), (_MATRIX,)),
)

_SHAPING: tuple[_Row, ...] = (
    ("view", lambda m, x: x.reshape(3, 4), (tensor(2, 6),)),
    ("permute", lambda m, x: x.permute(2, 0, 1).contiguous(), (tensor(2, 3, 4),)),
    ("expand", lambda m, x: x.expand(4, 3).clone(), (tensor(1, 3),)),
    ("cat", lambda m, x, y: torch.cat([x, y], 1), (_MATRIX, tensor(2, 1))),
    ("split", lambda m, x: tuple(part * 2.0 for part in torch.split(x, [1, 2], 1)), (_MATRIX,)),
    ("slice", lambda m, x: x[:, 1:4:2] * 1.0, (tensor(2, 6),)),
    ("index-select", lambda m, x, i: torch.index_select(x, 1, i), (_MATRIX, tensor(4, dtype=_INDEX, values="index"))),
    ("pad", lambda m, x: F.pad(x, (1, 2), value=0.5), (_MATRIX,)),
)

_REDUCING: tuple[_Row, ...] = (
    ("sum", lambda m, x: x.sum(1), (_MATRIX,)),
    ("mean-keepdim", lambda m, x: x.mean(-1, keepdim=True), (_MATRIX,)),
    ("argmax", lambda m, x: x.argmax(1), (tensor(3, 5),)),
    ("softmax", lambda m, x: torch.softmax(x, -1), (_MATRIX,)),
    ("mm", lambda m, x, y: torch.mm(x, y), (_MATRIX, tensor(3, 4))),
    ("bmm", lambda m, x, y: torch.bmm(x, y), (tensor(2, 2, 3), tensor(2, 3, 2))),
)

_HOLDING: tuple[tuple[str, Hold, Callable[..., Any], CaseInput], ...] = (
    ("linear", lambda: {"f": nn.Linear(3, 4)}, lambda m, x: m.f(x), _MATRIX),
    ("conv2d", lambda: {"f": nn.Conv2d(4, 3, 3, stride=2, padding=1)}, lambda m, x: m.f(x), _IMAGE),
    ("conv2d-depthwise", lambda: {"f": nn.Conv2d(4, 4, 3, groups=4)}, lambda m, x: m.f(x), _IMAGE),
    ("batch-norm", lambda: {"f": nn.BatchNorm2d(4)}, lambda m, x: m.f(x), _IMAGE),
    ("layer-norm", lambda: {"f": nn.LayerNorm(3)}, lambda m, x: m.f(x), _MATRIX),
    ("max-pool", dict, lambda m, x: F.max_pool2d(x, 2), _IMAGE),
    ("embedding", lambda: {"f": nn.Embedding(4, 3)}, lambda m, i: m.f(i), tensor(2, 2, dtype=_INDEX, values="index")),
)

_DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64,
    torch.int64, torch.int32, torch.int8, torch.uint8,
)  # fmt: skip


def _operators() -> Iterator[Case]:
    for table in (_ELEMENTWISE, _SHAPING, _REDUCING):
        for name, function, inputs in table:
            yield case(f"ops/{name}", "The operator matches PyTorch.", function, *inputs)
    for name, hold, function, given in _HOLDING:
        yield case(f"ops/{name}", "The operator matches PyTorch.", function, given, hold=hold)


def _dtypes() -> Iterator[Case]:
    def hold(dtype: torch.dtype) -> Hold:
        return lambda: {"w": weight(3, dtype=dtype)}

    for dtype in _DTYPES:
        values = "large" if dtype in (torch.int64, torch.int32) else "any"
        yield case(
            f"dtype/{str(dtype).removeprefix('torch.')}",
            "Inputs, weights and results keep their element type, and all its digits.",
            lambda m, x, y: (x + y) * m.w,
            tensor(2, 3, dtype=dtype, values=values),
            tensor(2, 3, dtype=dtype, values=values),
            hold=hold(dtype),
        )
    yield case(
        "dtype/bool",
        "Truth values are inputs and results.",
        lambda m, x, y: torch.logical_and(x, y),
        tensor(8, dtype=torch.bool),
        tensor(8, dtype=torch.bool),
    )
    yield case(
        "dtype/mixed",
        "An operator of two element types gives the type that PyTorch gives.",
        lambda m, x, y: x + y,
        _MATRIX,
        tensor(2, 3, dtype=torch.int32),
    )
    yield case(
        "dtype/not-finite",
        "Weights may be infinite or NaN.",
        lambda m, x: x + m.w,
        _MATRIX,
        hold=lambda: {"w": torch.tensor([float("inf"), float("-inf"), float("nan")])},
    )


def _layouts() -> Iterator[Case]:
    last = tensor(1, 4, 3, 3, layout="channels_last")
    yield case(
        "layout/channels-last",
        "Inputs whose channels lie last in memory are read by their strides.",
        lambda m, x, y: x + y,
        last,
        last,
    )
    for layout, demand in (
        ("transposed", "A caller's tensor may be a transposed view."),
        ("strided", "A caller's tensor may have gaps in memory."),
    ):
        yield case(f"layout/{layout}-input", demand, lambda m, x, y: x - y, tensor(2, 3, layout=layout), _MATRIX)


def _weights() -> Iterator[Case]:
    def one(name: str, demand: str, hold: Hold, function: Callable[..., Any] = lambda m, x: x * m.w) -> Case:
        return case(f"weights/{name}", demand, function, tensor(3, 3), hold=hold)

    yield one("parameter", "A parameter has its value.", lambda: {"w": parameter(3, 3)})
    yield one("buffer", "A buffer has its value.", lambda: {"w": weight(3, 3)})
    yield one(
        "constant", "A tensor that the model makes of numbers has its value.", dict,
        lambda m, x: x * torch.tensor([1.5, -2.0, 3.0]),
    )  # fmt: skip
    yield one(
        "order", "Parameters, buffers and constants come in the order of the placeholders.",
        lambda: {"b": weight(3, 3), "a": parameter(3, 3)},
        lambda m, x: (x - m.b) * m.a - m.b * torch.tensor([1.0, 2.0, 3.0]),
    )  # fmt: skip
    yield one("scalar", "A weight may have no dimension.", lambda: {"w": parameter()})
    yield one("zero", "A weight may be all zero.", lambda: {"w": torch.zeros(3, 3)}, lambda m, x: x + m.w)
    yield one("transposed", "A weight may be a transposed view.", lambda: {"w": nn.Parameter(weight(3, 3).t())})
    yield one("non-contiguous", "A weight may have gaps in memory.", lambda: {"w": weight(3, 6)[:, ::2]})
    yield one("offset", "A weight may begin inside its memory.", lambda: {"w": weight(5, 3)[2:]})

    def views() -> dict[str, Any]:
        whole = weight(4, 3)
        return {"v": whole[:3], "w": whole[1:]}

    yield one("views", "Two weights may be views of one memory.", views, lambda m, x: (x - m.v) * m.w)

    def tied() -> dict[str, Any]:
        shared = parameter(3, 3)
        return {"v": shared, "w": shared}

    yield one("tied", "One weight may have two names.", tied, lambda m, x: (x - m.v) * m.w)


OPERATOR_CASES: tuple[Case, ...] = (*_operators(), *_dtypes(), *_layouts(), *_weights())
