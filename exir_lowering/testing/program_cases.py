"""The cases of whole programs, made of operators that the backend takes.

A function of a case gets those operators, `k`, the module with its weights, `m`, and the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from exir_lowering.testing.operators import DOMAINS, Operators
from exir_lowering.testing.samples import Case, CaseInput, CaseMethod, tensor, weight

_X, _N = "value", "rows"
_SIZES = {"n": (4, 7)}
_HOST: Mapping[str, Any] = {"host": ("aten.sin",)}
_PLAIN, _FLAT = "elementwise", "elementwise matrix batch"
_USUAL = Operators(DOMAINS[0], "", torch.sub, torch.sub, torch.mul, torch.abs)  # when no backend has been asked

_Hold = Callable[[Operators], Mapping[str, Any]]


@cache
def bind(make: Callable[..., Any], operators: Operators) -> Callable[[], Mapping[str, CaseMethod]]:
    """Return what makes a case of some operators: one for equal ones, so that a sample is made once."""
    return partial(make, operators)


def _case(
    name: str, demand: str, function: Any, *inputs: str | CaseInput, hold: _Hold | None = None,
    needs: str = "two|held|one", domains: str = "", sizes: Any = None, least: int = 1, **rest: Any,
) -> Case:  # fmt: skip
    """Make a case of a function, or of several by method, for which `hold` may differ; by default it is `_weights`."""
    functions = function if isinstance(function, Mapping) else {"forward": function}

    def make(k: Operators) -> Mapping[str, CaseMethod]:
        given = tuple(k.domain.input(one) if isinstance(one, str) else one for one in inputs)
        held = (hold or _weights)(k)
        made = {name: (partial(each, k), given, held.get(name, held)) for name, each in functions.items()}
        return {name: CaseMethod(*each, sizes or {}, least) for name, each in made.items()}

    rest |= {"needs": tuple(needs.split()), "domains": tuple(domains.split())}
    return Case(name, demand, bind(make, _USUAL), fill=make, **rest)


def _weights(k: Operators) -> dict[str, Any]:
    return {"v": nn.Parameter(k.weight()), "w": k.weight()}


def _rows(k: Operators) -> dict[str, Any]:
    return {"w": nn.Parameter(k.weight(*(k.domain.rows or k.domain.weight)))}


_GROW: Mapping[str, Any] = {"needs": "grows", "hold": _rows}


def _state(k: Operators) -> dict[str, Any]:
    return {"total": weight(*k.domain.shape), "sum": weight(*k.domain.shape)}


def _held(name: str, demand: str, hold: _Hold, function: Any = lambda k, m, x: k.held(x, m.w), **rest: Any) -> Case:
    return _case(f"weights/{name}", demand, function, _X, hold=hold, needs="held", **rest)


def _views(k: Operators) -> dict[str, Any]:
    whole = k.weight(k.domain.weight[0] + 1, *k.domain.weight[1:])
    return {"v": whole[:-1], "w": whole[1:]}


def _batch(k: Operators, m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    if k.two and k.domain.same_rows:
        return k.two(k.two(x, y), x)
    return k.grow(x, m.w), k.grow(k.grow(y, m.w), m.w)


def _chain(k: Operators, m: Any, x: torch.Tensor) -> Any:
    for _ in range(12):
        x = k.step(k.step(x, m.w), m.v)
    return x


def _counter(k: Operators, m: Any, x: torch.Tensor) -> Any:
    return k.two(m.total.copy_(k.two(m.total, x)), x)


def _before(k: Operators, m: Any, x: torch.Tensor) -> Any:
    return (k.two(m.total, x), m.total.copy_(k.two(x, m.total)))[0]


def _stateful(name: str, demand: str, function: Any, *inputs: Any, hold: _Hold = _state, **rest: Any) -> Case:
    rest = {"needs": "two", "check": "state", "stateful": True, **rest}
    return _case(f"state/{name}", demand, function, *inputs, hold=hold, **rest)


_WHOLE = _case("", "", lambda k, m, x: k.step(k.step(x, m.v), m.w), _X)
_CHECKED = {
    "life/two-programs": "A file can be loaded twice, and one program dropped while the other one runs.",
    "life/handles": "What compile returned is released when its program is dropped.",
    "life/threads": "Threads may share a program.",
    "life/profile": "A call can be profiled; events have identifiers of the debug_handle_map.",
    "errors/wrong-number-of-inputs": "execute raises when it is given more or fewer inputs than its payload has.",
    "errors/no-payload": "compile or execute raises for an empty payload, and for bytes of another kind.",
    "errors/truncated-payload": "compile or execute raises for a payload that is cut off.",
    "errors/changed-start": "compile or execute raises for a payload whose first bytes are changed.",
    "cache/unread": "The payload depends on nothing that the backend's `unread` says it does not read.",
}

PROGRAM_CASES: tuple[Case, ...] = (
    _case("layout/channels-last", "Inputs whose channels lie last in memory are read by their strides.",
          lambda k, m, x, y: (k.step(x, m.w), k.mix(x, y, m.w)), "channels_last", "channels_last", domains="image"),
    _case("layout/transposed-input", "A caller's tensor may be a transposed view.",
          lambda k, m, x, y: k.mix(x, y, m.w), "transposed", _X),
    _case("layout/strided-input", "A caller's tensor may have gaps in memory.",
          lambda k, m, x, y: k.mix(x, y, m.w), "strided", _X),
    _held("parameter", "A parameter has its value.", lambda k: {"w": nn.Parameter(k.weight())}),
    _held("buffer", "A buffer has its value.", lambda k: {"w": k.weight()}),
    _held("constant", "A tensor that the model makes of numbers has its value.",
          lambda k: {"numbers": k.weight().tolist()}, lambda k, m, x: k.held(x, torch.tensor(m.numbers))),
    _held("order", "Parameters, buffers and constants come in the order of the placeholders.",
          lambda k: {"b": k.weight(), "a": nn.Parameter(k.weight()), "numbers": k.weight().tolist()},
          lambda k, m, x: k.held(k.other(k.held(x, m.b), m.a), torch.tensor(m.numbers))),
    _held("scalar", "A weight may have no dimension.", lambda k: {"w": nn.Parameter(weight())}, domains=_PLAIN),
    _held("zero", "A weight may be all zero.", lambda k: {"w": torch.zeros(k.domain.weight)}),
    _held("transposed", "A weight may be a transposed view.", lambda k: {"w": nn.Parameter(
          k.weight(*k.domain.weight[1::-1], *k.domain.weight[2:]).transpose(0, 1))}),
    _held("non-contiguous", "A weight may have gaps in memory.",
          lambda k: {"w": k.weight(*k.domain.weight[:-1], 2 * k.domain.weight[-1])[..., ::2]}),
    _held("offset", "A weight may begin inside its memory.",
          lambda k: {"w": k.weight(k.domain.weight[0] + 2, *k.domain.weight[1:])[2:]}),
    _held("views", "Two weights may be views of one memory.", _views, lambda k, m, x: k.other(k.held(x, m.v), m.w)),
    _held("tied", "One weight may have two names.", lambda k: dict.fromkeys("vw", nn.Parameter(k.weight())),
          lambda k, m, x: k.other(k.held(x, m.v), m.w)),
    _case("dynamic/batch", "Shapes follow the inputs, up and down.", _batch, _N, _N, **_GROW, sizes=_SIZES),
    _case("dynamic/batch-and-weight", "A weight is broadcast to the shape of the call.",
          lambda k, m, x: k.grow(k.grow(x, m.w), m.w), _N, hold=_rows, needs="held grows", sizes={"n": (2, 1)}),
    _case("dynamic/two-sizes", "Two sizes change apart from each other.", lambda k, m, x, y: k.two(x, y),
          tensor("n", "k"), tensor("k"), needs="two", domains=_PLAIN, sizes={"n": (3, 6), "k": (5, 2)}),
    _case("dynamic/several-partitions", "Shapes follow the inputs in each partition.",
          lambda k, m, x: k.grow(torch.sin(k.grow(x, m.w)), m.w), _N, **_GROW, sizes=_SIZES, partitions=2, **_HOST),
    _case("dynamic/no-rows", "A size may be 0.", lambda k, m, x: k.grow(x, m.w), _N, **_GROW,
          sizes={"n": (3, 0)}, least=0),
    _case("dynamic/size-as-number", "A size can be a number in the computation.",
          lambda k, m, x: k.grow(x, m.w) * x.shape[0], _N, **_GROW, sizes=_SIZES),
    _case("dynamic/reshape", "Sizes are computed from sizes.",
          lambda k, m, x: k.grow(x, m.w).reshape(x.shape[0] * x.shape[1:].numel()), _N, **_GROW, sizes=_SIZES),
    _case("dynamic/cat", "Results grow with their inputs.",
          lambda k, m, x: torch.cat([x, k.grow(x, m.w)]), _N, **_GROW, sizes=_SIZES),
    _case("degenerate/no-inputs", "A method may take nothing.", lambda k, m: k.held(m.x, m.w),
          hold=lambda k: {"x": nn.Parameter(weight(*k.domain.shape)), "w": k.weight()}, needs="held"),
    _case("degenerate/pass-through", "A method may return an input as it is.",
          lambda k, m, x: (x, k.step(x, m.w)), _X),
    _case("degenerate/weight-as-output", "A method may return a weight as it is.",
          lambda k, m, x: (m.w, k.step(x, m.w)), _X),
    _case("degenerate/duplicated-output", "A method may return a result twice.",
          lambda k, m, x, y: (lambda first: (first, k.step(k.step(y, m.w), m.v), first))(k.step(x, m.v)), _X, _X),
    _case("degenerate/equal-outputs", "Two outputs may be computed in the same way.",
          lambda k, m, x: (k.step(x, m.w), k.step(x, m.w)), _X),
    _case("degenerate/input-twice", "An operator may read one input twice.",
          lambda k, m, x: k.two(k.two(x, x), x), _X, needs="two"),
    _case("degenerate/unused-input", "An input may be unused.", lambda k, m, x, y: k.step(y, m.w), _X, _X),
    _case("degenerate/scalar", "Tensors may have no dimension.",
          lambda k, m, x, y: k.two(x, y) if k.two else (k.one(x), k.one(k.one(y))),
          tensor(), tensor(), needs="two|one", domains=_PLAIN),
    _case("degenerate/empty-tensor", "Tensors may have no element.",
          lambda k, m, x: k.grow(x, m.w), "none", **_GROW),
    _case("degenerate/one-element", "Tensors may have one element.",
          lambda k, m, x: k.two(k.two(x, x), x) if k.two else k.one(x), tensor(1), needs="two|one", domains=_PLAIN),
    _case("degenerate/five-dimensions", "Tensors may have five dimensions.", lambda k, m, x: k.step(x, m.w),
          tensor(1, 2, 1, 3, 2), hold=lambda k: {"w": weight(2, 1, 1)}, domains=_PLAIN),
    _case("degenerate/output-order", "Outputs come in their order, whatever was computed first.",
          lambda k, m, x, y: (lambda first: (k.step(first, m.w), k.step(y, m.v), first))(k.step(x, m.v)), _X, _X),
    _case("degenerate/long-chain", "A partition may have many operators.", _chain, _X),
    _case("partitions/three-with-host-between", "Each partition of a method is its own payload.",
          lambda k, m, x: k.step(torch.sin(k.step(torch.sin(k.step(x, m.u)), m.v)), m.w), _X,
          hold=lambda k: {"u": k.weight(), **_weights(k)}, partitions=3, **_HOST),
    _case("partitions/alike", "Partitions of the same operators and shapes are told apart.",
          lambda k, m, x: k.step(torch.sin(k.step(x, m.v)), m.w), _X, partitions=2, **_HOST),
    _case("partitions/result-used-twice", "A partition's result may go to the host and to another partition.",
          lambda k, m, x: (lambda s, host: (s, host, k.mix(host, s, m.w)))(s := k.step(x, m.v), torch.sin(s)), _X,
          partitions=2, **_HOST),
    _case("partitions/shared-weight", "Two partitions may read one weight.",
          lambda k, m, x: k.other(torch.sin(k.held(x, m.w)), m.w), _X, needs="held", partitions=2, **_HOST),
    _case("methods/two", "Each method has its own payload.",
          {"forward": lambda k, m, x, y: k.mix(x, y, m.w), "second": lambda k, m, x, y: k.mix(y, k.step(x, m.w), m.v)},
          _X, _X, partitions=2),
    _case("methods/shared-weight", "Methods may share a weight.",
          {"forward": lambda k, m, x: k.held(x, m.w), "second": lambda k, m, x: k.other(k.held(x, m.w), m.w)}, _X,
          needs="held", partitions=2),
    _case("methods/same-name-other-weight", "Weights of one name may differ from method to method.",
          dict.fromkeys(("forward", "second"), lambda k, m, x: k.held(x, m.w)), _X,
          hold=lambda k: {"forward": {"w": k.weight()}, "second": {"w": k.weight()}}, needs="held", partitions=2),
    _case("methods/several-partitions", "Methods may differ in how many partitions they have.",
          {"forward": lambda k, m, x: k.step(x, m.w),
           "second": lambda k, m, x: k.step(torch.sin(k.step(x, m.w)), m.v)}, _X, partitions=3, **_HOST),
    _stateful("counter", "A buffer keeps what a call writes.", _counter, _X),
    _stateful("read-before-write", "What is read before a write is the old value.", _before, _X),
    _stateful("two-buffers", "Two buffers do not mix.", lambda k, m, x: k.two(
              m.total.copy_(k.two(m.total, m.sum.copy_(k.two(m.sum, x)))), m.sum), _X),
    _stateful("kv-cache", "A part of a buffer can be written.",
              lambda k, m, x, place: k.two(m.total.index_copy_(0, place, x), m.sum), "row",
              tensor(1, dtype=torch.int64, values="index"), domains=_FLAT),
    _stateful("view-of-an-input", "What is kept of an input is a copy: the input's memory is used again.",
              lambda k, m, x: (k.two(m.turned.transpose(0, 1), x), m.turned.copy_(x.transpose(0, 1)))[0], _X,
              hold=lambda k: {"turned": weight(*k.domain.shape).transpose(0, 1).clone()}, domains=_FLAT),
    _stateful("two-methods", "Each method has its own state.", {"forward": _counter, "second": _before}, _X,
              hold=lambda k: {"forward": _state(k), "second": _state(k)}, partitions=2),
    _case("nested/cond", "The branches of torch.cond are computed in delegates.",
          lambda k, m, x, y: torch.cond(x.sum() > 0, k.two, lambda a, b: k.two(b, a), (x, y)), _X, _X, needs="two"),
    *(replace(_WHOLE, name=name, demand=demand, check=name.rpartition("/")[2]) for name, demand in _CHECKED.items()),
)  # fmt: skip
