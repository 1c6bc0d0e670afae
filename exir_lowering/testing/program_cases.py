"""Cases of whole programs: shapes, degenerate graphs, partitions, methods, state, life, errors.

They need add, sub and mul of float32 only, so that a backend which takes little else is tried in them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from exir_lowering.testing.samples import Case, case, methods, parameter, tensor, weight

_MATRIX = tensor(2, 3)
_BATCH = tensor("n", 3)
_HOST = ("aten.sin",)


def _two_weights() -> dict[str, Any]:
    return {"v": parameter(2, 3), "w": weight(2, 3)}


def _dynamic() -> Iterator[Case]:
    n = {"n": (4, 7)}
    yield case(
        "dynamic/batch", "Shapes follow the inputs, up and down.", lambda m, x, y: (x + y) * x, _BATCH, _BATCH, sizes=n
    )
    yield case(
        "dynamic/batch-and-weight", "A weight is broadcast to the shape of the call.",
        lambda m, x: (x - m.w) * x, _BATCH, hold=lambda: {"w": parameter(3)}, sizes={"n": (2, 1)},
    )  # fmt: skip
    yield case(
        "dynamic/two-sizes", "Two sizes change apart from each other.",
        lambda m, x, y: x - y, tensor("n", "k"), tensor("k"), sizes={"n": (3, 6), "k": (5, 2)},
    )  # fmt: skip
    yield case(
        "dynamic/several-partitions", "Shapes follow the inputs in each partition.",
        lambda m, x: torch.sin(x + x) * x, _BATCH, sizes=n, host=_HOST, partitions=2,
    )  # fmt: skip
    yield case("dynamic/no-rows", "A size may be 0.", lambda m, x: x + x, _BATCH, sizes={"n": (3, 0)}, least=0)
    yield case(
        "dynamic/size-as-number", "A size can be a number in the computation.",
        lambda m, x: x * x.shape[0], _BATCH, sizes=n,
    )  # fmt: skip
    yield case(
        "dynamic/reshape", "Sizes are computed from sizes.",
        lambda m, x: x.reshape(-1) + x.reshape(x.shape[0] * 3), _BATCH, sizes=n,
    )  # fmt: skip
    yield case("dynamic/cat", "Results grow with their inputs.", lambda m, x: torch.cat([x, x + x]), _BATCH, sizes=n)


def _degenerate() -> Iterator[Case]:
    yield case("degenerate/no-inputs", "A method may take nothing.", lambda m: m.v - m.w, hold=_two_weights)
    yield case("degenerate/pass-through", "A method may return an input as it is.", lambda m, x: (x, x + x), _MATRIX)
    yield case(
        "degenerate/weight-as-output", "A method may return a weight as it is.",
        lambda m, x: (m.w, x - m.w), _MATRIX, hold=_two_weights,
    )  # fmt: skip

    def twice(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        difference = x - y
        return difference, x * y, difference

    yield case("degenerate/duplicated-output", "A method may return a result twice.", twice, _MATRIX, _MATRIX)
    yield case(
        "degenerate/equal-outputs", "Two outputs may be computed in the same way.",
        lambda m, x, y: (x - y, x - y), _MATRIX, _MATRIX,
    )  # fmt: skip
    yield case("degenerate/input-twice", "An operator may read one input twice.", lambda m, x: x * x - x, _MATRIX)
    yield case("degenerate/unused-input", "An input may be unused.", lambda m, x, y: y - y * y, _MATRIX, _MATRIX)
    yield case("degenerate/scalar", "Tensors may have no dimension.", lambda m, x, y: x - y, tensor(), tensor())
    yield case("degenerate/empty-tensor", "Tensors may have no element.", lambda m, x: x + x, tensor(0, 3))
    yield case("degenerate/one-element", "Tensors may have one element.", lambda m, x: x * x - x, tensor(1))
    yield case("degenerate/five-dimensions", "Tensors may have five dimensions.", lambda m, x: x - m.w,
               tensor(1, 2, 1, 3, 2), hold=lambda: {"w": weight(2, 1, 1)})  # fmt: skip
    yield case(
        "degenerate/output-order", "Outputs come in their order, whatever was computed first.",
        lambda m, x, y: (lambda first: (first * y, x - y, first))(x + y), _MATRIX, _MATRIX,
    )  # fmt: skip

    def chain(m: Any, x: torch.Tensor) -> Any:
        result = x
        for _ in range(12):
            result = result - m.w * result
        return result

    yield case(
        "degenerate/long-chain", "A partition may have many operators.", chain, _MATRIX,
        hold=lambda: {"w": weight(2, 3) / 8},
    )  # fmt: skip


def _partitions() -> Iterator[Case]:
    def three(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        first = torch.sin(x - y)
        second = torch.sin(first * m.v)
        return second - m.w

    yield case(
        "partitions/three-with-host-between", "Each partition of a method is its own payload.",
        three, _MATRIX, _MATRIX, hold=_two_weights, host=_HOST, partitions=3,
    )  # fmt: skip
    yield case(
        "partitions/alike", "Partitions of the same operators and shapes are told apart.",
        lambda m, x: torch.sin(x - m.v) - m.w, _MATRIX, hold=_two_weights, host=_HOST, partitions=2,
    )  # fmt: skip
    yield case(
        "partitions/result-used-twice", "A partition's result may go to the host and to another partition.",
        lambda m, x, y: (lambda s: (s, torch.sin(s), torch.sin(s) - s))(x - y),
        _MATRIX, _MATRIX, host=_HOST, partitions=2,
    )  # fmt: skip
    yield case(
        "partitions/shared-weight", "Two partitions may read one weight.",
        lambda m, x: torch.sin(x - m.w) * m.w, _MATRIX, hold=_two_weights, host=_HOST, partitions=2,
    )  # fmt: skip


def _methods() -> Iterator[Case]:
    def weighted(m: Any, x: torch.Tensor) -> Any:
        return x - m.w

    def shared() -> dict[str, Any]:
        held = {"w": parameter(2, 3)}
        return {"forward": held, "second": held}

    yield methods(
        "methods/two", "Each method has its own payload.",
        {"forward": lambda m, x, y: x - y, "second": lambda m, x, y: x * y}, _MATRIX, _MATRIX, hold=dict, partitions=2,
    )  # fmt: skip
    yield methods(
        "methods/shared-weight", "Methods may share a weight.",
        {"forward": weighted, "second": lambda m, x: x * m.w}, _MATRIX, hold=shared, partitions=2,
    )  # fmt: skip
    yield methods(
        "methods/same-name-other-weight", "Weights of one name may differ from method to method.",
        {"forward": weighted, "second": weighted}, _MATRIX,
        hold=lambda: {"forward": {"w": weight(2, 3)}, "second": {"w": weight(2, 3)}}, partitions=2,
    )  # fmt: skip
    yield methods(
        "methods/several-partitions", "Methods may differ in how many partitions they have.",
        {"forward": weighted, "second": lambda m, x: torch.sin(x - m.w) * m.w}, _MATRIX,
        hold=shared, host=_HOST, partitions=3,
    )  # fmt: skip


def _state() -> Iterator[Case]:
    def counter(m: Any, x: torch.Tensor) -> Any:
        m.total.copy_(m.total + x)
        return m.total * x

    def before(m: Any, x: torch.Tensor) -> Any:
        result = m.total - x
        m.total.copy_(m.total + x)
        return result

    def both(m: Any, x: torch.Tensor) -> Any:
        m.sum.copy_(m.sum + x)
        m.total.copy_(m.total - m.sum)
        return m.total * m.sum

    def cache(m: Any, x: torch.Tensor, place: torch.Tensor) -> Any:
        m.total.index_copy_(0, place, x)
        return m.total * 2.0

    def turned(m: Any, x: torch.Tensor) -> Any:
        result = m.turned.permute(1, 0) - x
        m.turned.copy_(x.permute(1, 0))
        return result

    total: dict[str, Any] = {
        "check": "state",
        "stateful": True,
        "hold": lambda: {"total": weight(2, 3), "sum": weight(2, 3)},
    }
    yield case("state/counter", "A buffer keeps what a call writes.", counter, _MATRIX, **total)
    yield case("state/read-before-write", "What is read before a write is the old value.", before, _MATRIX, **total)
    yield case("state/two-buffers", "Two buffers do not mix.", both, _MATRIX, **total)
    yield case(
        "state/kv-cache", "A part of a buffer can be written.", cache,
        tensor(1, 3), tensor(1, dtype=torch.int64, values="index"), **total,
    )  # fmt: skip
    yield case(
        "state/view-of-an-input", "What is kept of an input is a copy: the input's memory is used again.",
        turned, _MATRIX, **{**total, "hold": lambda: {"turned": weight(3, 2)}},
    )  # fmt: skip
    yield methods(
        "state/two-methods", "Each method has its own state.", {"forward": counter, "second": before}, _MATRIX,
        hold=lambda: {name: {"total": weight(2, 3)} for name in ("forward", "second")},
        partitions=2, check="state", stateful=True,
    )  # fmt: skip


def _nested() -> Iterator[Case]:
    yield case(
        "nested/cond", "The branches of torch.cond are computed in delegates.",
        lambda m, x, y: torch.cond(x.sum() > 0, lambda a, b: a - b, lambda a, b: a * b, (x, y)), _MATRIX, _MATRIX,
    )  # fmt: skip


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
    *_dynamic(),
    *_degenerate(),
    *_partitions(),
    *_methods(),
    *_state(),
    *_nested(),
    *_life(),
)
