"""The cases: single operators, element types, memory layouts and weights; and whole programs.

They need add, sub and mul of float32 only, so that a backend which takes little else is tried in them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from exir_lowering.testing.samples import Case, CaseInput, Hold, case, methods, parameter, tensor, weight

_MATRIX = tensor(2, 3)
_UNIT = tensor(2, 3, values="unit")
_POSITIVE = tensor(2, 3, values="positive")
_INDEX = torch.int64
_IMAGE = tensor(1, 4, 6, 6)

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


def _operators() -> Iterator[Case]:
    for name, function, inputs in _OPERATORS:
        yield case(f"ops/{name}", "The operator matches PyTorch.", function, *inputs)
    for name, hold, function, given in _HOLDING:
        yield case(f"ops/{name}", "The operator matches PyTorch.", function, given, hold=hold)


def _dtypes() -> Iterator[Case]:
    def hold(dtype: torch.dtype) -> Hold:
        return lambda: {"w": weight(3, dtype=dtype)}

    for dtype in _DTYPES:
        given = tensor(2, 3, dtype=dtype, values="large" if dtype in (torch.int64, torch.int32) else "any")
        demand = "Inputs, weights and results keep their element type, and all its digits."
        name = f"dtype/{str(dtype).removeprefix('torch.')}"
        yield case(name, demand, lambda m, x, y: (x + y) * m.w, given, given, hold=hold(dtype))


_BOOLS = tensor(8, dtype=torch.bool)
_LAST = tensor(1, 4, 3, 3, layout="channels_last")


def _weighted(name: str, demand: str, hold: Hold, function: Callable[..., Any] = lambda m, x: x * m.w) -> Case:
    return case(f"weights/{name}", demand, function, tensor(3, 3), hold=hold)


def _views() -> dict[str, Any]:
    whole = weight(4, 3)
    return {"v": whole[:3], "w": whole[1:]}


def _tied() -> dict[str, Any]:
    shared = parameter(3, 3)
    return {"v": shared, "w": shared}


OPERATOR_CASES: tuple[Case, ...] = (
    *_operators(),
    *_dtypes(),
    case("dtype/bool", "Truth values are inputs and results.", lambda m, x, y: torch.logical_and(x, y), _BOOLS, _BOOLS),
    case("dtype/mixed", "An operator of two element types gives the type that PyTorch gives.",
         lambda m, x, y: x + y, _MATRIX, tensor(2, 3, dtype=torch.int32)),
    case("dtype/not-finite", "Weights may be infinite or NaN.", lambda m, x: x + m.w, _MATRIX,
         hold=lambda: {"w": torch.tensor([float("inf"), float("-inf"), float("nan")])}),
    case("layout/channels-last", "Inputs whose channels lie last in memory are read by their strides.",
         lambda m, x, y: x + y, _LAST, _LAST),
    case("layout/transposed-input", "A caller's tensor may be a transposed view.",
         lambda m, x, y: x - y, tensor(2, 3, layout="transposed"), _MATRIX),
    case("layout/strided-input", "A caller's tensor may have gaps in memory.",
         lambda m, x, y: x - y, tensor(2, 3, layout="strided"), _MATRIX),
    _weighted("parameter", "A parameter has its value.", lambda: {"w": parameter(3, 3)}),
    _weighted("buffer", "A buffer has its value.", lambda: {"w": weight(3, 3)}),
    _weighted("constant", "A tensor that the model makes of numbers has its value.", dict,
              lambda m, x: x * torch.tensor([1.5, -2.0, 3.0])),
    _weighted("order", "Parameters, buffers and constants come in the order of the placeholders.",
              lambda: {"b": weight(3, 3), "a": parameter(3, 3)},
              lambda m, x: (x - m.b) * m.a - m.b * torch.tensor([1.0, 2.0, 3.0])),
    _weighted("scalar", "A weight may have no dimension.", lambda: {"w": parameter()}),
    _weighted("zero", "A weight may be all zero.", lambda: {"w": torch.zeros(3, 3)}, lambda m, x: x + m.w),
    _weighted("transposed", "A weight may be a transposed view.", lambda: {"w": nn.Parameter(weight(3, 3).t())}),
    _weighted("non-contiguous", "A weight may have gaps in memory.", lambda: {"w": weight(3, 6)[:, ::2]}),
    _weighted("offset", "A weight may begin inside its memory.", lambda: {"w": weight(5, 3)[2:]}),
    _weighted("views", "Two weights may be views of one memory.", _views, lambda m, x: (x - m.v) * m.w),
    _weighted("tied", "One weight may have two names.", _tied, lambda m, x: (x - m.v) * m.w),
)  # fmt: skip


_BATCH = tensor("n", 3)
_N = {"n": (4, 7)}
_HOST = ("aten.sin",)


def _two_weights() -> dict[str, Any]:
    return {"v": parameter(2, 3), "w": weight(2, 3)}


def _twice(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    difference = x - y
    return difference, x * y, difference


def _chain(m: Any, x: torch.Tensor) -> Any:
    result = x
    for _ in range(12):
        result = result - m.w * result
    return result


def _three(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.sin(torch.sin(x - y) * m.v) - m.w


def _shared() -> dict[str, Any]:
    held = {"w": parameter(2, 3)}
    return {"forward": held, "second": held}


def _subtract(m: Any, x: torch.Tensor) -> Any:
    return x - m.w


def _counter(m: Any, x: torch.Tensor) -> Any:
    m.total.copy_(m.total + x)
    return m.total * x


def _before(m: Any, x: torch.Tensor) -> Any:
    result = m.total - x
    m.total.copy_(m.total + x)
    return result


def _both(m: Any, x: torch.Tensor) -> Any:
    m.sum.copy_(m.sum + x)
    m.total.copy_(m.total - m.sum)
    return m.total * m.sum


def _cache(m: Any, x: torch.Tensor, place: torch.Tensor) -> Any:
    m.total.index_copy_(0, place, x)
    return m.total * 2.0


def _turned(m: Any, x: torch.Tensor) -> Any:
    result = m.turned.permute(1, 0) - x
    m.turned.copy_(x.permute(1, 0))
    return result


def _stateful(
    name: str, demand: str, function: Callable[..., Any], *inputs: CaseInput, hold: Hold | None = None
) -> Case:
    hold = hold or (lambda: {"total": weight(2, 3), "sum": weight(2, 3)})
    return case(f"state/{name}", demand, function, *inputs, hold=hold, check="state", stateful=True)


def _life() -> Iterator[Case]:
    whole = case("", "", lambda m, x: (x - m.v) * m.w, _MATRIX, hold=_two_weights)
    for name, demand in (
        ("life/two-programs", "A file can be loaded twice, and one program dropped while the other one runs."),
        ("life/handles", "What compile returned is released when its program is dropped."),
        ("life/threads", "Threads may share a program."),
        ("life/profile", "A call can be profiled; events have identifiers of the debug_handle_map."),
        ("errors/wrong-number-of-inputs", "execute raises when it is given more or fewer inputs than its payload has."),
        ("errors/no-payload", "compile or execute raises for an empty payload, and for bytes of another kind."),
        ("errors/truncated-payload", "compile or execute raises for a payload that is cut off."),
        ("errors/changed-start", "compile or execute raises for a payload whose first bytes are changed."),
    ):
        yield Case(name, demand, whole.build, check=name.rpartition("/")[2])


PROGRAM_CASES: tuple[Case, ...] = (
    case("dynamic/batch", "Shapes follow the inputs, up and down.",
         lambda m, x, y: (x + y) * x, _BATCH, _BATCH, sizes=_N),
    case("dynamic/batch-and-weight", "A weight is broadcast to the shape of the call.",
         lambda m, x: (x - m.w) * x, _BATCH, hold=lambda: {"w": parameter(3)}, sizes={"n": (2, 1)}),
    case("dynamic/two-sizes", "Two sizes change apart from each other.",
         lambda m, x, y: x - y, tensor("n", "k"), tensor("k"), sizes={"n": (3, 6), "k": (5, 2)}),
    case("dynamic/several-partitions", "Shapes follow the inputs in each partition.",
         lambda m, x: torch.sin(x + x) * x, _BATCH, sizes=_N, host=_HOST, partitions=2),
    case("dynamic/no-rows", "A size may be 0.", lambda m, x: x + x, _BATCH, sizes={"n": (3, 0)}, least=0),
    case("dynamic/size-as-number", "A size can be a number in the computation.",
         lambda m, x: x * x.shape[0], _BATCH, sizes=_N),
    case("dynamic/reshape", "Sizes are computed from sizes.",
         lambda m, x: x.reshape(-1) + x.reshape(x.shape[0] * 3), _BATCH, sizes=_N),
    case("dynamic/cat", "Results grow with their inputs.", lambda m, x: torch.cat([x, x + x]), _BATCH, sizes=_N),
    case("degenerate/no-inputs", "A method may take nothing.", lambda m: m.v - m.w, hold=_two_weights),
    case("degenerate/pass-through", "A method may return an input as it is.", lambda m, x: (x, x + x), _MATRIX),
    case("degenerate/weight-as-output", "A method may return a weight as it is.",
         lambda m, x: (m.w, x - m.w), _MATRIX, hold=_two_weights),
    case("degenerate/duplicated-output", "A method may return a result twice.", _twice, _MATRIX, _MATRIX),
    case("degenerate/equal-outputs", "Two outputs may be computed in the same way.",
         lambda m, x, y: (x - y, x - y), _MATRIX, _MATRIX),
    case("degenerate/input-twice", "An operator may read one input twice.", lambda m, x: x * x - x, _MATRIX),
    case("degenerate/unused-input", "An input may be unused.", lambda m, x, y: y - y * y, _MATRIX, _MATRIX),
    case("degenerate/scalar", "Tensors may have no dimension.", lambda m, x, y: x - y, tensor(), tensor()),
    case("degenerate/empty-tensor", "Tensors may have no element.", lambda m, x: x + x, tensor(0, 3)),
    case("degenerate/one-element", "Tensors may have one element.", lambda m, x: x * x - x, tensor(1)),
    case("degenerate/five-dimensions", "Tensors may have five dimensions.",
         lambda m, x: x - m.w, tensor(1, 2, 1, 3, 2), hold=lambda: {"w": weight(2, 1, 1)}),
    case("degenerate/output-order", "Outputs come in their order, whatever was computed first.",
         lambda m, x, y: (lambda first: (first * y, x - y, first))(x + y), _MATRIX, _MATRIX),
    case("degenerate/long-chain", "A partition may have many operators.", _chain, _MATRIX,
         hold=lambda: {"w": weight(2, 3) / 8}),
    case("partitions/three-with-host-between", "Each partition of a method is its own payload.",
         _three, _MATRIX, _MATRIX, hold=_two_weights, host=_HOST, partitions=3),
    case("partitions/alike", "Partitions of the same operators and shapes are told apart.",
         lambda m, x: torch.sin(x - m.v) - m.w, _MATRIX, hold=_two_weights, host=_HOST, partitions=2),
    case("partitions/result-used-twice", "A partition's result may go to the host and to another partition.",
         lambda m, x, y: (lambda s: (s, torch.sin(s), torch.sin(s) - s))(x - y),
         _MATRIX, _MATRIX, host=_HOST, partitions=2),
    case("partitions/shared-weight", "Two partitions may read one weight.",
         lambda m, x: torch.sin(x - m.w) * m.w, _MATRIX, hold=_two_weights, host=_HOST, partitions=2),
    methods("methods/two", "Each method has its own payload.",
            {"forward": lambda m, x, y: x - y, "second": lambda m, x, y: x * y}, _MATRIX, _MATRIX,
            hold=dict, partitions=2),
    methods("methods/shared-weight", "Methods may share a weight.",
            {"forward": _subtract, "second": lambda m, x: x * m.w}, _MATRIX, hold=_shared, partitions=2),
    methods("methods/same-name-other-weight", "Weights of one name may differ from method to method.",
            {"forward": _subtract, "second": _subtract}, _MATRIX,
            hold=lambda: {"forward": {"w": weight(2, 3)}, "second": {"w": weight(2, 3)}}, partitions=2),
    methods("methods/several-partitions", "Methods may differ in how many partitions they have.",
            {"forward": _subtract, "second": lambda m, x: torch.sin(x - m.w) * m.w}, _MATRIX,
            hold=_shared, host=_HOST, partitions=3),
    _stateful("counter", "A buffer keeps what a call writes.", _counter, _MATRIX),
    _stateful("read-before-write", "What is read before a write is the old value.", _before, _MATRIX),
    _stateful("two-buffers", "Two buffers do not mix.", _both, _MATRIX),
    _stateful("kv-cache", "A part of a buffer can be written.", _cache,
              tensor(1, 3), tensor(1, dtype=_INDEX, values="index")),
    _stateful("view-of-an-input", "What is kept of an input is a copy: the input's memory is used again.",
              _turned, _MATRIX, hold=lambda: {"turned": weight(3, 2)}),
    methods("state/two-methods", "Each method has its own state.", {"forward": _counter, "second": _before}, _MATRIX,
            hold=lambda: {name: {"total": weight(2, 3)} for name in ("forward", "second")},
            partitions=2, check="state", stateful=True),
    case("nested/cond", "The branches of torch.cond are computed in delegates.",
         lambda m, x, y: torch.cond(x.sum() > 0, lambda a, b: a - b, lambda a, b: a * b, (x, y)), _MATRIX, _MATRIX),
    *_life(),
)  # fmt: skip
