"""What operators cost, for plans and partitioners: the contract of models, the default one, and how a plan asks one.

Measured with ExecuTorch 1.5.1 on one core of a server (x86-64 with AVX-512, 2.6 GHz): the host's figures by
`tests/benchmarks/calibrate.py`, those of delegates fitted to profiles of 15 transformers and convolutional models.
Another device has other times, and so has the same machine when it is busy. What holds elsewhere are the ratios, such
as that `where` costs about as much per element on the host as 400 multiply-adds in XNNPACK. A `CostTable` with figures
of the device is better.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import torch
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import size_hint
from exir_lowering._upstream.operators import operator_packet
from exir_lowering.errors import InputError, let_through
from exir_lowering.graphs import measures
from exir_lowering.graphs.walking import OPERAND_LAYOUTS

HOST = "host"
"""The place of operators that no backend takes, in tables and models."""


class CostModel(Protocol):
    """Costs for plans and `Limits(min_gain=...)`: finite, not negative, and all in one unit."""

    @property
    def unit(self) -> str:
        """The unit of all costs, for messages; a plan takes models in "seconds" only."""

    @property
    def byte_cost(self) -> float:
        """What it costs to bring one byte from one place to another."""

    def node_cost(self, node: Node, place: str) -> float | None:
        """Return what an operator costs at a place, "host" or a backend; None if it is unknown or cannot be there.

        Args:
            node: The operator.
            place: The place.
        """

    def call_cost(self, place: str) -> float:
        """Return what each call of a partition of a backend costs, on top of its operators."""


_FUSED = frozenset({"clamp", "hardtanh", "relu", "_native_batch_norm_legit_no_training"})
"""Operators that backends compute with the one before them."""

_FUSING = _FUSED | {"add", "addmm", "convolution", "linear", "mm"}
_BIASED = frozenset({"addmm", "baddbmm"})
_PRODUCTS = frozenset({"addmm", "baddbmm", "bmm", "convolution", "linear", "mm"})
_REDUCING = frozenset(
    {"all", "amax", "amin", "any", "argmax", "argmin", "max", "mean", "min", "prod", "sum", "topk", "var"}
)
_POOLING = frozenset({"avg_pool2d", "max_pool2d", "max_pool2d_with_indices"})

_CALLING = frozenset({"cond", "map_impl", "scan", "while_loop"})
"""Operators that cost what the graphs cost that they call."""

_NANO = 1e-9

# All of these are nanoseconds.
_HOST_CALL = 1500.0  # of each call of a host kernel, with the caches of a model that runs
_DELEGATE_CALL = 5000.0  # of each call of a delegate
_PER_BYTE = 0.05  # for each byte between the host and a delegate
_HOST_ELEMENT = 2.0  # per unit of work of a host operator that the table does not have
_WINDOW_ELEMENT = 12.0  # of each element that a pooling reads inside its input, on the host
_MULTIPLY_ADD = 0.0103  # of a multiply-add of a matrix product or convolution in a delegate
_WEIGHT_BYTE = 0.05  # to read a byte of a matrix, which small products wait for
_DEPTHWISE = 0.12  # of a multiply-add of a depthwise convolution in a delegate
_DEPTHWISE_LARGE = 0.7  # of one with a kernel above 5 x 5
_DELEGATE_ELEMENT = 0.25  # per unit of work of a delegated operator that the table does not have


def _by_operator(table: Mapping[float, str]) -> dict[str, float]:
    return {name: cost for cost, names in table.items() for name in names.split()}


_HOST = _by_operator(
    {
        0.065: "mm bmm linear",
        0.22: "any all logical_not",
        0.25: "view_copy unsqueeze_copy squeeze_copy alias_copy _clone_dim_order",
        0.3: (
            "slice_copy select_copy split_with_sizes_copy cat stack repeat full full_like zeros ones "
            "scalar_tensor copy _native_batch_norm_legit_no_training"
        ),
        0.45: "relu abs add sub mul div neg leaky_relu hardtanh clone",
        0.5: "embedding index index_select constant_pad_nd",
        0.6: "bitwise_and bitwise_or bitwise_xor bitwise_not mean sum arange expand_copy",
        0.77: "max_pool2d_with_indices avg_pool2d max_pool2d",
        0.85: "addmm baddbmm",
        0.9: "clamp logical_and logical_or logical_xor",
        1.0: "amax amin max min var argmax argmin",
        1.2: "native_layer_norm native_group_norm",
        1.5: "eq ne ge gt le lt sign sqrt rsqrt reciprocal ceil floor",
        2.0: "maximum minimum _to_dim_order_copy _to_copy",
        2.2: "upsample_nearest2d",
        2.8: "exp log sigmoid sin pow cumsum",
        3.2: "permute_copy transpose_copy t_copy",
        3.3: "convolution",
        4.0: "where",
        4.5: "_softmax _log_softmax",
        6.5: "cos gelu round tanh remainder fmod scatter flip gather",
        7.7: "upsample_bilinear2d",
        12.0: "erf",
        24.0: "index_put",
    }
)
"""Nanoseconds per unit of work (`count_work`) of a host kernel."""

_HOST_SPREAD = {"expand_copy": 3.8, "where": 8.5}
"""The same where elements are repeated: an operand of `where` is a single number, the last dimension is expanded."""

_DELEGATE = _by_operator(
    {
        0.05: "view_copy unsqueeze_copy squeeze_copy",
        0.13: "cat constant_pad_nd slice_copy permute_copy _clone_dim_order clone",
        0.25: "avg_pool2d max_pool2d max_pool2d_with_indices",
        0.4: "cos div elu exp gelu hardswish leaky_relu log pow rsqrt sigmoid sin sqrt tanh _softmax",
        1.5: "amax amin mean sum",
    }
)
"""Nanoseconds per unit of work in a delegate."""


@dataclass(frozen=True, slots=True)
class DefaultCosts:
    """The costs of operators on the host and in any delegate, in seconds, from tables in this module; a `CostModel`."""

    @property
    def unit(self) -> str:
        """The unit of all costs."""
        return "seconds"

    @property
    def byte_cost(self) -> float:
        """What it costs to bring one byte from one place to another."""
        return _PER_BYTE * _NANO

    def call_cost(self, place: str) -> float:
        """Return what each call of a partition costs."""
        return 0.0 if place == HOST else _DELEGATE_CALL * _NANO

    def node_cost(self, node: Node, place: str) -> float:
        """Return what an operator in Edge dialect costs on the host, or in a delegate, whichever backend it is."""
        if not graphs.is_operator(node):
            return 0.0
        name = _name(node)
        if name in _CALLING:
            return 0.0
        return (_host_cost(name, node) if place == HOST else _delegate_cost(name, node)) * _NANO


def count_work(node: Node) -> float:
    """Return the units of which an operator takes much the same time; a symbolic size counts with its hint."""
    return _work(_name(node), node)


def _work(name: str, node: Node) -> float:
    """Return multiply-adds, elements of what a pooling's windows or a reduction reads, or those of the results."""
    if name in _PRODUCTS:
        return _multiply_adds(name, node)
    if name == "index_put":
        return _index_put_work(node)
    if name in _REDUCING:
        return max(map(measures.value_elements, node.all_input_nodes), default=0)
    if name in _POOLING:
        return measures.value_elements(node) * _window(node)
    return measures.value_elements(node)


def _name(node: Node) -> str:
    """Return the name of an operator without namespace and overload."""
    return getattr(operator_packet(node.target), "__name__", "")


def _shape(argument: Any) -> list[int]:
    value = argument.meta.get("val") if isinstance(argument, Node) else None
    return [size_hint(size) for size in value.shape] if isinstance(value, torch.Tensor) else []


def _argument(node: Node, position: int) -> Any:
    return node.args[position] if position < len(node.args) else None


def _multiply_adds(name: str, node: Node) -> float:
    out = measures.value_elements(node)
    if name != "convolution":
        return out * (_shape(_argument(node, 1 if name in _BIASED else 0)) or [1])[-1]
    per_result = math.prod(_shape(_argument(node, 1))[1:])
    if _argument(node, 6):  # transposed: each element that is read is spread
        return math.prod(_shape(_argument(node, 0))) * per_result
    return out * per_result


def _index_put_work(node: Node) -> float:
    """Count the values that are put; the tensor is copied first, which takes a thirtieth as long per element."""
    values = _argument(node, 2)
    put = measures.value_elements(values) if isinstance(values, Node) else 0
    return put + measures.value_elements(node) / 30


def _window(node: Node) -> int:
    kernel = _argument(node, 1)
    sizes = kernel if isinstance(kernel, (list, tuple)) else (kernel, kernel)
    return math.prod(size for size in sizes if isinstance(size, int))


# -- on the host -------------------------------------------------------------------------------------------------------


def _host_cost(name: str, node: Node) -> float:
    each = _HOST.get(name, _HOST_ELEMENT)
    if name in _HOST_SPREAD and _spreads(name, node):
        each = _HOST_SPREAD[name]
    inside = 0.0
    if name in _POOLING:
        plane = math.prod(_shape(_argument(node, 0))[-2:])
        inside = measures.value_elements(node) * min(_window(node), plane) * _WINDOW_ELEMENT
    return _HOST_CALL + each * _work(name, node) + inside


def _spreads(name: str, node: Node) -> bool:
    if name == "expand_copy":
        return _shape(_argument(node, 0))[-1:] != _shape(node)[-1:]
    given = [measures.value_elements(source) for source in node.all_input_nodes]
    return 1 in given and measures.value_elements(node) > 1


# -- in a delegate -----------------------------------------------------------------------------------------------------


def _delegate_cost(name: str, node: Node) -> float:
    if name in _PRODUCTS:
        return _product_cost(name, node)
    if name.startswith(("quantize_", "dequantize_", "choose_qparams")):  # a mark at the operator that is quantized
        return 0.0
    sources = node.all_input_nodes
    if name in _FUSED and sources and graphs.is_operator(sources[0]) and _name(sources[0]) in _FUSING:
        return 0.0
    if name in ("permute_copy", "t_copy", "constant_pad_nd") and _is_prepared(sources, node):
        return 0.0
    return _DELEGATE.get(name, _DELEGATE_ELEMENT) * _work(name, node)


def _is_prepared(sources: list[Node], node: Node) -> bool:
    """Return whether a product's weight is transposed, which is done when the model is lowered, or its input padded."""
    prepared = len(sources) == 1 and (sources[0].op == "placeholder" or _name(node) == "constant_pad_nd")
    return prepared and bool(node.users) and all(_name(user) in _PRODUCTS for user in node.users)


def _product_cost(name: str, node: Node) -> float:
    work = _multiply_adds(name, node)
    weight = _argument(node, 2 if name in _BIASED else 1)
    shape = _shape(weight)
    if name == "convolution" and len(shape) > 2 and shape[1] == 1 < shape[0]:
        return work * (_DEPTHWISE if math.prod(shape[1:]) <= 25 else _DEPTHWISE_LARGE)
    read = measures.value_bytes(weight) if isinstance(weight, Node) else 0
    return work * _MULTIPLY_ADD + read * _WEIGHT_BYTE


_DEFAULT = DefaultCosts()

_planned: ContextVar[CostModel | None] = ContextVar("exir_lowering_planned_costs", default=None)


@contextmanager
def planning_with(model: CostModel | None) -> Iterator[None]:
    """Tell partitioners, while the context lasts, by which model the latency will be predicted; None: the default."""
    token = _planned.set(model)
    try:
        yield
    finally:
        _planned.reset(token)


def planned_costs() -> AskedCosts:
    """Return the costs by which the latency will be predicted: those of the options, or the default ones."""
    return AskedCosts(_planned.get())


def cost_of(nodes: Iterable[Node], place: str, model: CostModel | None = None) -> float:
    """Return the seconds that operators take at a place, without calls of delegates and moving data."""
    costs = AskedCosts(model)
    return sum((costs.node(node, place, calls=False) for node in nodes if graphs.is_operator(node)), 0.0)


class AskedCosts:
    """A model's answers, checked; where it has none, those of the default model."""

    def __init__(self, model: CostModel | None) -> None:
        self.model: CostModel = _DEFAULT if model is None else model
        self.trusted = self.model is _DEFAULT
        self.guessed = 0
        self.per_byte = self._check("byte_cost", self._ask("byte_cost"))
        self._calls: dict[str, float] = {}

    def _ask(self, what: str, *arguments: Any) -> Any:
        """Return the model's answer to a method, or to a property, which takes no arguments."""
        try:
            answer = getattr(self.model, what)
            return answer(*arguments) if arguments else answer
        except Exception as error:
            let_through(error)
            given = ", ".join(map(repr, arguments))
            raise InputError(
                f"The cost model {type(self.model).__name__} raised {type(error).__name__}: {error}. It was asked for "
                f"{what}{f'({given})' if given else ''}, expected a number."
            ) from error

    def _check(self, what: str, cost: Any) -> float:
        number = isinstance(cost, Real) and not isinstance(cost, bool)
        if not number or not 0 <= cost <= sys.float_info.max:
            raise InputError(
                f"The cost model {type(self.model).__name__} has {what} = {cost!r}, expected a finite number of at "
                "least 0."
            )
        return float(cost)

    def node(self, node: Node, place: str, *, calls: bool) -> float:
        """Return what an operator costs at a place, without the graphs that it calls."""
        if self.trusted:
            return _DEFAULT.node_cost(node, place)
        cost = self._ask("node_cost", node, place)
        if cost is not None:
            return self._check(f"node_cost({graphs.operator_name(node)}, {place!r})", cost)
        if calls or not any(True for _ in measures.tensors(node.meta.get("val"))):
            return 0.0
        self.guessed += 1
        return _DEFAULT.node_cost(node, place)

    def nodes(self, module: GraphModule, nodes: Iterable[Node], place: str) -> float:
        """Return what operators of a graph cost at a place, with everything in the graphs that they call."""
        total = 0.0
        for node in filter(graphs.is_operator, nodes):
            inner = [each.module for each in graphs.nested_graphs(module, node)]
            total += self.node(node, place, calls=bool(inner))
            called = [self.nodes(each, each.graph.nodes, place) for each in inner]
            if graphs.operator_name(node) == "cond":
                called = [max(called)]
            total += sum(called) * count_trips(node)
        return total

    def call(self, place: str) -> float:
        """Return what a call of a partition costs."""
        if place not in self._calls:
            self._calls[place] = self._check(f"call_cost({place!r})", self._ask("call_cost", place))
        return self._calls[place]


def count_trips(node: Node) -> int:
    """Return how often an operator runs its graphs: once for each element of what a map or scan goes over."""
    if graphs.operator_name(node) not in ("map_impl", "scan") or node.target not in OPERAND_LAYOUTS:
        return 1
    mapped: Any = node.args[OPERAND_LAYOUTS[node.target].before[-1]]
    first = mapped[0] if isinstance(mapped, (list, tuple)) and mapped else mapped
    shape: Any = getattr(first.meta.get("val"), "shape", ()) if isinstance(first, Node) else ()
    return size_hint(shape[0]) if len(shape) else 1
