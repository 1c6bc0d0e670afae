"""What operators cost where nothing was measured: figures of ExecuTorch's host kernels and of XNNPACK, as a model.

Measured with ExecuTorch 1.5.1 on one core of a server (x86-64 with AVX-512, 2.6 GHz): the host's figures by
`tests/benchmarks/calibrate.py`, those of delegates fitted to profiles of 15 transformers and convolutional models.
Another device has other times, and so has the same machine when it is busy. What holds elsewhere are the ratios, such
as that `where` costs about as much per element on the host as 400 multiply-adds in XNNPACK. A `CostTable` with figures
of the device is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import size_hint
from exir_lowering._upstream.operators import operator_packet
from exir_lowering.graphs import measures
from exir_lowering.plugins.costs import HOST

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
