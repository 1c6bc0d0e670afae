"""The cases of single operators and of element types. Those of whole programs are in `program_cases`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from exir_lowering.testing.samples import Case, CaseInput, Hold, case, tensor, weight

_MATRIX = tensor(2, 3)
_UNIT = tensor(2, 3, values="unit")
_POSITIVE = tensor(2, 3, values="positive")
_INDEX = torch.int64
_IMAGE = tensor(1, 4, 6, 6)
_MATCHES = "The operator matches PyTorch."

_Row = tuple[str, Callable[..., Any], tuple[CaseInput, ...]]

_OPERATORS: tuple[_Row, ...] = (
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
    ("view", lambda m, x: x.reshape(3, 4), (tensor(2, 6),)),
    ("permute", lambda m, x: x.permute(2, 0, 1).contiguous(), (tensor(2, 3, 4),)),
    ("expand", lambda m, x: x.expand(4, 3).clone(), (tensor(1, 3),)),
    ("cat", lambda m, x, y: torch.cat([x, y], 1), (_MATRIX, tensor(2, 1))),
    ("split", lambda m, x: tuple(part * 2.0 for part in torch.split(x, [1, 2], 1)), (_MATRIX,)),
    ("slice", lambda m, x: x[:, 1:4:2] * 1.0, (tensor(2, 6),)),
    ("index-select", lambda m, x, i: torch.index_select(x, 1, i), (_MATRIX, tensor(4, dtype=_INDEX, values="index"))),
    ("pad", lambda m, x: F.pad(x, (1, 2), value=0.5), (_MATRIX,)),
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


def _dtypes() -> Iterator[Case]:
    def hold(dtype: torch.dtype) -> Hold:
        return lambda: {"w": weight(3, dtype=dtype)}

    for dtype in _DTYPES:
        given = tensor(2, 3, dtype=dtype, values="large" if dtype in (torch.int64, torch.int32) else "any")
        demand = "Inputs, weights and results keep their element type, and all its digits."
        name = f"dtype/{str(dtype).removeprefix('torch.')}"
        yield case(name, demand, lambda m, x, y: (x + y) * m.w, given, given, hold=hold(dtype))


_BOOLS = tensor(8, dtype=torch.bool)

OPERATOR_CASES: tuple[Case, ...] = (
    *(case(f"ops/{name}", _MATCHES, function, *inputs) for name, function, inputs in _OPERATORS),
    *(case(f"ops/{name}", _MATCHES, function, given, hold=hold) for name, hold, function, given in _HOLDING),
    *_dtypes(),
    case("dtype/bool", "Truth values are inputs and results.", lambda m, x, y: torch.logical_and(x, y), _BOOLS, _BOOLS),
    case("dtype/mixed", "An operator of two element types gives the type that PyTorch gives.",
         lambda m, x, y: x + y, _MATRIX, tensor(2, 3, dtype=torch.int32)),
    case("dtype/not-finite", "Weights may be infinite or NaN.", lambda m, x: x + m.w, _MATRIX,
         hold=lambda: {"w": torch.tensor([float("inf"), float("-inf"), float("nan")])}),
)  # fmt: skip
