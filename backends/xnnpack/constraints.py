"""What ExecuTorch's partitioner takes for XNNPACK, though its preprocess fails on it or its runtime computes it wrong.

Its configurations check most arguments of an operator; these are the others, found by lowering each operator with each
of its arguments. Such an operator stays on the host, and the plan says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.backends.xnnpack.shared_values import BATCH_NORMS, COPIES, base_name as _name
from exir_lowering.graphs import measures

_Refusal = Callable[[Node], "str | None"]  # returns why XNNPACK cannot be given an operator; None if it can

_MOST_DIMENSIONS = 6  # XNN_MAX_TENSOR_DIMS

_MOVING = (*COPIES, "expand_copy", "permute_copy", "squeeze_copy", "unsqueeze_copy", "view_copy")
_PIECES = frozenset(("add", "addmm", "bmm", "mm", *_MOVING))  # what a linear layer is decomposed into


def mend(config: Any, together: Collection[str]) -> None:
    """Leave out of a configuration of ExecuTorch's partitioner what is wrong, given what it may be partitioned with."""
    if config.target_name == "convolution.default":
        config.force_non_static_weights_for_f32_linear = False  # the runtime refuses the result
    refusals = (_refuse_dimensions, _refuse_quantised_scalar, *_REFUSALS.get(config.target_name, ()))
    refuse = {"_softmax.default": _refuse_last_dimension, "max.dim": _refuse_first_reader}.get(config.target_name)
    if refuse is not None:
        names = frozenset(name.partition(".")[0] for name in together)
        refusals = (*refusals, partial(refuse, inside=lambda node: graphs.is_getitem(node) or _name(node) in names))
    config.check_constraints = partial(_check, config.check_constraints, refusals)


def _check(
    check: Callable[[Node, ExportedProgram], bool], refusals: tuple[_Refusal, ...], node: Node, program: ExportedProgram
) -> bool:
    from executorch.exir.backend.utils import WhyNoPartition

    # The partitioner only looks at the outermost graph: what it kept whole in a branch would be left over.
    if node.graph is not program.graph or not check(node, program):
        return False
    reason = next(filter(None, (refuse(node) for refuse in refusals)), None)
    if reason is not None:
        WhyNoPartition(logging.getLogger(__name__))(node, reason)
    return reason is None


def _refuse_quantised_scalar(node: Node) -> str | None:
    """Refuse what reads a quantised tensor without dimensions: ExecuTorch's preprocess looks at its first row."""
    for value in (node, *node.all_input_nodes):
        before = value.args[0] if _name(value).startswith("dequantize") else None
        if isinstance(before, Node) and _quantises(before) and _tensor(before).dim() == 0:
            return "ExecuTorch's preprocess fails on a tensor without dimensions that is quantised"
    return None


def _refuse_copy(node: Node) -> str | None:
    """Refuse a copy of an input, and of what is read elsewhere too: where partitions end is not known yet."""
    shared, source = False, node
    while source.op == "call_function" and _name(source) in COPIES:
        (source,) = source.all_input_nodes
        shared = shared or len(source.users) > 1
    reason = "ExecuTorch removes copies, and then refuses a value that is returned twice or is an unchanged input"
    return reason if shared or source.op == "placeholder" else None


def _refuse_bias(node: Node, bias: str, weight: str) -> str | None:
    """Refuse a weight that is a vector, and a bias that has not an element for each output."""
    if _tensor(graphs.argument(node, weight)).dim() != 2:
        return "the weight has to have two dimensions"
    given = graphs.argument(node, bias)
    outputs = node.meta["val"].shape[-1]
    if given is not None and (_tensor(given).numel() != outputs or _tensor(given).shape[-1:] != (outputs,)):
        return "the bias has to have one element for each output"
    return None


def _refuse_computed_weight(node: Node) -> str | None:
    """Refuse a layer in pieces with more in it than the layer: ExecuTorch replaces all by one of its stored weight."""
    seen, waiting = {node}, [node] if graphs.sources.is_part_of_linear(node) else []
    while waiting:
        piece = waiting.pop()
        if _name(piece) not in _PIECES:
            return f"ExecuTorch's preprocess would leave out {piece.name}, of the same layer"
        for other in (*piece.all_input_nodes, *piece.users):
            if other not in seen and graphs.sources.is_part_of_linear(other) and _layer(other) == _layer(node):
                seen.add(other)
                waiting.append(other)
    return None


def _layer(node: Node) -> tuple[object, ...]:
    """Return what tells the layer that a node is a part of."""
    return node.meta.get("torch_fn"), (node.meta.get("source_fn_stack") or [""])[-1], graphs.module_stack(node)


def _refuse_half_quantised(node: Node) -> str | None:
    """Refuse a convolution over one dimension beside quantisation, if its weight is not: of a layer called twice."""
    if _tensor(node.args[1]).dim() == 3 and not _is_quantised(node.args[1]) and _is_among_quantised(node, *node.users):
        return "its input or output is quantised and its weight is not"
    return None


def _is_among_quantised(node: Node, *results: Node) -> bool:
    """Return whether what a node reads is quantised, or what it makes, perhaps after an activation."""
    return any(map(_is_quantised, (node.args[0], *(user for made in (node, *results) for user in made.users))))


def _refuse_pad(node: Node) -> str | None:
    """Refuse zeros around a quantised value that others than convolutions read: the preprocess quantises the result."""
    value = graphs.argument(node, "value") or 0
    if value != 0 or not _is_quantised(node.args[0]) or any(map(_quantises, node.users)):
        return None
    others = [user for user in node.users if _name(user) != "convolution"]
    return f"ExecuTorch's preprocess would quantise what {others[0].name} reads" if others else None


def _is_quantised(value: Any) -> bool:
    return isinstance(value, Node) and _quantises(value)


def _refuse_weight_order(node: Node) -> str | None:
    weight = node.args[1]
    while isinstance(weight, Node) and _quantises(weight):
        weight = weight.args[0]
    if isinstance(weight, Node) and weight.op == "placeholder" and _is_nhwc(_tensor(weight)):
        return (
            "its weight is in channels-last order, which ExecuTorch's preprocess refuses: export after "
            "`model.to(memory_format=torch.contiguous_format)`"
        )
    return None


def _refuse_dynamic_convolution(node: Node) -> str | None:
    """Refuse a convolution that is quantised dynamically, unless what its input is computed from may be reordered."""
    # ExecuTorch's preprocess follows first operands to where the input comes from, unless this is in channels-last
    # order already, and gives all that read it the order that the convolution needs, without telling them.
    inside, before, follower = node, node.args[0], None
    while isinstance(before, Node) and (inside is not node or _is_quantised_dynamically(before)):
        others = [user for user in before.users if user is not inside and not _quantises(user)]
        if others:
            return f"ExecuTorch's preprocess would give {others[0].name}, which reads {before.name} too, another order"
        if _makes_nhwc(before):
            name = graphs.operator_name(before).partition(".")[2]
            if follower is None or not any(refuse(before) for refuse in _REFUSALS.get(name, ())):
                return None
        if _name(before) in ("constant_pad_nd", "slice_copy", "permute_copy"):
            follower = before
        elif _needs_nchw(before):
            return f"ExecuTorch's preprocess would give {before.name} another order"
        inside, before = before, before.args[0] if before.args else None
    return f"ExecuTorch's preprocess would give the input of {follower.name} another order" if follower else None


def _needs_nchw(node: Node) -> bool:
    """Return whether a node is wrong in another order; operands that are not images keep theirs."""
    if _name(node) in ("add", "sub", "mul", "div"):
        return any(value.op == "placeholder" or _tensor(value).dim() != 4 for value in node.all_input_nodes[1:])
    others = ("linear", "addmm", "mm", "bmm", "_softmax", "minimum", "maximum", "_to_dim_order_copy")
    return _makes_nchw(node) or _name(node) in others


def _refuse_shared_input(node: Node) -> str | None:
    """Refuse a linear layer if its input is quantised dynamically for a convolution too, which needs another order."""
    for read in node.all_input_nodes:
        value: Any = read.args[0] if _name(read) == "view_copy" else read
        others = [user for user in value.users if _name(user).startswith("conv")]  # ATen's, too: not to keep the layer
        if others and _is_quantised_dynamically(value):
            return f"ExecuTorch's preprocess would quantise its input for {others[0].name} too, in another order"
    return None


def _is_quantised_dynamically(value: Any) -> bool:
    return _is_quantised(value) and any(map(graphs.is_getitem, value.all_input_nodes))


def _quantises(node: Node) -> bool:
    return _name(node).startswith(("quantize", "dequantize", "choose_qparams"))


def _refuse_dynamic_shape(node: Node) -> str | None:
    """Refuse what becomes a reshape to more than one dimension that is not known."""
    operand = _tensor(node.args[0])
    if _name(node) == "unsqueeze_copy" or operand.dim() == 3:
        for value in (operand, *_values(node)):
            if sum(not isinstance(size, int) for size in value.shape) > 1:
                return "it is reshaped, and XNNPACK's reshape allows one unknown dimension only"
    return None


def _refuse_start(node: Node) -> str | None:
    dim, start = graphs.argument(node, "dim") or 0, graphs.argument(node, "start")
    if isinstance(start, int) and start < -_tensor(node.args[0]).shape[dim]:
        return "its start is before the first element"
    return None


def _is_image_maximum(node: Node) -> bool:
    return _is_image(node) and node.args[1] in (2, 3) and bool(graphs.argument(node, "keepdim"))


def _is_image(node: Node) -> bool:
    return _tensor(node.args[0]).dim() == 4


def _refuse_scale(node: Node) -> str | None:
    """Refuse what is sampled by given factors that are not those of the sizes, which is what XNNPACK goes by."""
    given = graphs.argument(node, "scale_factors")
    if given is None or graphs.argument(node, "align_corners"):
        return None
    before, after = _tensor(node.args[0]).shape[-2:], node.meta["val"].shape[-2:]
    if any(size != factor * old for size, factor, old in zip(after, given, before, strict=True)):
        return "the scale factors do not match the sizes"
    return None


def _refuse_normalization(node: Node) -> str | None:
    made = node.args[0]
    if isinstance(made, Node) and _name(made) == "convolution" and made.args[6] and made.args[8] != 1:
        return "ExecuTorch's preprocess cannot fuse it with a transposed convolution in groups"
    if isinstance(made, Node) and graphs.is_getitem(made) and _name(made.all_input_nodes[0]) == _name(node):
        return "ExecuTorch's preprocess fails on a normalization right after another one"
    results = [user for made in node.users for user in (made, *made.users)]
    if _tensor(node.args[0]).dim() == 3 and _is_among_quantised(node, *results):
        return "ExecuTorch's preprocess fails on one of three dimensions beside quantisation"
    while isinstance(made, Node) and _name(made) in ("view_copy", "add") and graphs.sources.is_part_of_linear(made):
        made = made.args[0]
    if isinstance(made, Node) and _name(made) in ("addmm", "linear", "mm", "bmm") and _tensor(node.args[0]).dim() != 2:
        return "ExecuTorch's preprocess would fuse it with a linear layer along the last dimension"
    return None


def _refuse_last_dimension(node: Node, inside: Callable[[Node], bool]) -> str | None:
    """Refuse a softmax over the last dimension that may be computed over the channels: XNNPACK takes what lies last."""
    seen, waiting = {node}, [node]
    while waiting:
        for before in waiting.pop().all_input_nodes:
            if any(value.dim() == 4 for value in _values(before)) and before not in seen:
                seen.add(before)
                if (inside(before) and _makes_nhwc(before)) or any(map(_is_nhwc, _values(before))):
                    return f"XNNPACK computes it in channels-last order after {before.name}, over another dimension"
                # What lies before another softmax was looked at for that one.
                if inside(before) and not _makes_nchw(before) and _name(before) != "_softmax":
                    waiting.append(before)
    return None


def _refuse_first_reader(node: Node, inside: Callable[[Node], bool]) -> str | None:
    """Refuse a maximum of a channels-last input of a partition, on which ExecuTorch's preprocess fails."""
    if not inside(node.args[0]) and _is_nhwc(_tensor(node.args[0])):  # type: ignore[arg-type]
        return "it would read a partition's input in channels-last order"
    return None


def _makes_nhwc(node: Node) -> bool:
    """Return whether ExecuTorch's preprocess computes a node, and what follows it, in channels-last order."""
    if _name(node) == "mean":  # of other dimensions, it stays on the host
        return {dim % 4 for dim in node.args[1]} == {2, 3}  # type: ignore[union-attr, operator]
    if _name(node) == "max":
        return _is_image_maximum(node)
    if _name(node) in BATCH_NORMS:  # a convolution is made of it
        return _refuse_normalization(node) is None
    return node.target in _ordering_pass().memory_sensitive_ops_nhwc


def _makes_nchw(node: Node) -> bool:
    """Return whether it returns to contiguous order there."""
    return _name(node) == "view_copy" or node.target in _ordering_pass().memory_sensitive_ops_nchw


def _ordering_pass() -> Any:
    from executorch.backends.xnnpack.operators.node_visitor import ChannelsLastTaggedReshapePass

    return ChannelsLastTaggedReshapePass


def _unless(condition: Callable[[Node], bool], reason: str) -> _Refusal:
    return lambda node: None if condition(node) else reason


_refuse_dimensions = _unless(
    lambda node: all(value.dim() <= _MOST_DIMENSIONS for value in _values(node, *node.all_input_nodes)),
    f"XNNPACK's tensors have at most {_MOST_DIMENSIONS} dimensions",
)
_refuse_factors = _unless(
    lambda node: all(node.kwargs.get(name, 1) == 1 for name in ("alpha", "beta")),
    "alpha and beta are left out of the payload",
)
_refuse_no_dimensions = _unless(
    lambda node: _tensor(node).dim() > 0, "XNNPACK has no transpose of a tensor without dimensions"
)
_refuse_layer = _unless(
    lambda node: not graphs.sources.is_part_of_linear(node),
    "ExecuTorch's preprocess makes a linear layer of it again, whose weight has to have two dimensions",
)
_refuse_single_image = _unless(_is_image, "the input has to have four dimensions")
_refuse_other_maximum = _unless(_is_image_maximum, "expected four dimensions, `dim` 2 or 3, and `keepdim`")

_REFUSALS: dict[str, tuple[_Refusal, ...]] = {
    "clone.default": (_refuse_copy,),
    "_clone_dim_order.default": (_refuse_copy,),
    "addmm.default": (
        _refuse_shared_input,
        _refuse_computed_weight,
        _refuse_factors,
        partial(_refuse_bias, bias="self", weight="mat2"),
    ),
    "bmm.default": (_refuse_layer,),
    "mm.default": (_refuse_shared_input, _refuse_computed_weight),
    "linear.default": (_refuse_shared_input, partial(_refuse_bias, bias="bias", weight="weight")),
    "convolution.default": (
        _refuse_half_quantised,
        _refuse_weight_order,
        _refuse_dynamic_convolution,
        _refuse_dynamic_shape,
    ),
    "unsqueeze_copy.default": (_refuse_dynamic_shape,),
    "permute_copy.default": (_refuse_no_dimensions,),
    "slice_copy.Tensor": (_refuse_start,),
    "constant_pad_nd.default": (_refuse_pad,),
    "max_pool2d.default": (_refuse_single_image,),
    "avg_pool2d.default": (_refuse_single_image,),
    "prelu.default": (_refuse_single_image,),
    "max.dim": (_refuse_other_maximum,),
    "upsample_bilinear2d.vec": (_refuse_scale,),
    "_native_batch_norm_legit_no_training.default": (_refuse_normalization, _refuse_dynamic_shape),
}

_CERTAIN: dict[str, _Refusal] = {
    "convolution": _refuse_dynamic_shape,
    "max": _refuse_other_maximum,
    "_native_batch_norm_legit_no_training": _refuse_dynamic_shape,
    "prelu": _refuse_single_image,
    "unsqueeze_copy": _refuse_dynamic_shape,
}


def refuse_certainly(node: Node) -> str | None:
    """Return why ExecuTorch's preprocess, or its runtime, fails on an operator of a partition, or computes it wrong."""
    if _name(node) == "_softmax" and (tag := node.meta.get(graphs.DELEGATION_TAG)) is not None:
        return _refuse_last_dimension(node, lambda one: one.meta.get(graphs.DELEGATION_TAG) == tag)
    refuse = _CERTAIN.get(_name(node))
    return (refuse and refuse(node)) or _refuse_dimensions(node)


def _tensor(node: Any) -> torch.Tensor:
    made: torch.Tensor = node.meta["val"]
    return made


def _values(*nodes: Node) -> list[torch.Tensor]:
    return [value for node in nodes for value in measures.tensors(node.meta.get("val"))]


def _is_nhwc(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
