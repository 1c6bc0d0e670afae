"""What operators cost, relative to each other, on the host and in a delegate: by that one of two forms is chosen.

The figures are nanoseconds of ExecuTorch's host kernels and of XNNPACK on one core (x86-64, AVX-512); ratios count.
"""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import size_hint
from exir_lowering._upstream.operators import operator_packet
from exir_lowering.graphs import measures

_HOST_CALL = 1500.0  # of each host kernel; the rest is for each element that it makes, or reads for a reduction
_HOST = {"add": 0.45, "sub": 0.45, "mul": 0.45, "mean": 0.6, "native_layer_norm": 1.2, "convolution": 3.3}
_HOST_OTHER = 2.0
_HOST_NARROW_NORM, _WIDE = 2.4, 256  # of rows with fewer elements, which legalization computes in several steps
_DELEGATE = {
    **dict.fromkeys(("view_copy", "unsqueeze_copy", "squeeze_copy"), 0.05),
    **dict.fromkeys(("cat", "constant_pad_nd", "slice_copy", "permute_copy", "_clone_dim_order", "clone"), 0.13),
    **dict.fromkeys(("select_copy", "split_copy", "split_with_sizes_copy", "unbind_copy"), 0.13),
    **dict.fromkeys(("cos", "div", "elu", "exp", "gelu", "hardswish", "leaky_relu", "log", "pow", "rsqrt"), 0.4),
    **dict.fromkeys(("sigmoid", "sin", "sqrt", "tanh", "_softmax"), 0.4),
    **dict.fromkeys(("amax", "amin", "sum"), 1.5),
    "mean": 0.2,  # a pooling of the rows as channels
}
_DELEGATE_OTHER = 0.25
_MULTIPLY_ADD, _WEIGHT_BYTE = 0.0103, 0.05  # of products in a delegate
_DEPTHWISE, _DEPTHWISE_LARGE = 0.12, 0.7  # of a multiply-add of a depthwise convolution, and of one above 5 x 5

_PRODUCTS = frozenset({"addmm", "baddbmm", "bmm", "convolution", "linear", "mm"})
_BIASED = ("addmm", "baddbmm")
_REDUCING = frozenset(
    {"all", "amax", "amin", "any", "argmax", "argmin", "max", "mean", "min", "prod", "sum", "topk", "var"}
)
_POOLING = ("avg_pool2d", "max_pool2d", "max_pool2d_with_indices")
_FUSED = frozenset({"clamp", "hardtanh", "relu", "_native_batch_norm_legit_no_training"})  # with the operator before
_FUSING = _FUSED | {"add", "addmm", "convolution", "linear", "mm"}


def on_host(node: Node) -> float:
    """Return what an operator costs on the host."""
    name = _name(node)
    narrow = name == "native_layer_norm" and math.prod(map(size_hint, node.args[1])) < _WIDE  # type: ignore[arg-type]
    return _HOST_CALL + (_HOST_NARROW_NORM if narrow else _HOST.get(name, _HOST_OTHER)) * _work(name, node)


def in_delegate(node: Node) -> float:
    """Return what an operator costs in a delegate, without its call."""
    name, sources = _name(node), node.all_input_nodes
    if name in _PRODUCTS:
        weight: Any = node.args[2 if name in _BIASED else 1]
        shape = [size_hint(size) for size in weight.meta["val"].shape]
        if name == "convolution" and len(shape) > 2 and shape[1] == 1 < shape[0]:
            return _work(name, node) * (_DEPTHWISE if math.prod(shape[1:]) <= 25 else _DEPTHWISE_LARGE)
        return _work(name, node) * _MULTIPLY_ADD + measures.value_bytes(weight) * _WEIGHT_BYTE
    fused = name in _FUSED and bool(sources) and graphs.is_operator(sources[0]) and _name(sources[0]) in _FUSING
    if fused or name.startswith(("quantize_", "dequantize_", "choose_qparams")):
        return 0.0
    moved = name == "constant_pad_nd" or (name in ("permute_copy", "t_copy") and sources[0].op == "placeholder")
    if moved and len(sources) == 1 and node.users and all(_name(user) in _PRODUCTS for user in node.users):
        return 0.0  # done when the model is lowered, or with the product
    return _DELEGATE.get(name, _DELEGATE_OTHER) * _work(name, node)


def _name(node: Node) -> str:
    return getattr(operator_packet(node.target), "__name__", "")


def _work(name: str, node: Node) -> float:
    """Return multiply-adds, the elements that a reduction or the windows of a pooling read, or those of results."""
    if name in _PRODUCTS:
        return measures.flops(node) / 2
    if name in _REDUCING:
        return max(map(measures.value_elements, node.all_input_nodes), default=0)
    window = node.args[1] if name in _POOLING else 1
    sizes = window if isinstance(window, (list, tuple)) else (window, window) if name in _POOLING else ()
    return measures.value_elements(node) * math.prod(size for size in sizes if isinstance(size, int))
