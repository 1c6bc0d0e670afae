"""Transfer functions of operators whose results consist of elements of their arguments."""

from __future__ import annotations

from exir_lowering.graphs.operators.names import target_name
from exir_lowering.graphs.ranges.intervals import INF, TOP, Range, convert, point, settle, union, whole
from exir_lowering.graphs.ranges.known_values import FILLED, filling, rounded
from exir_lowering.graphs.ranges.transfers import Call, Result, keeps, product


@keeps(
    "aten.view_copy", "aten.view", "aten.reshape", "aten._unsafe_view", "aten.unsqueeze_copy", "aten.unsqueeze",
    "aten.squeeze_copy.dim", "aten.squeeze_copy.dims", "aten.squeeze_copy", "aten.squeeze.dim", "aten.squeeze.dims",
    "aten.permute_copy", "aten.permute", "aten.transpose_copy.int", "aten.transpose.int", "aten.t_copy", "aten.t",
    "aten.expand_copy", "aten.expand", "aten.repeat", "aten.flip", "aten.roll", "aten.alias_copy", "aten.alias",
    "aten.detach_copy", "aten.detach", "aten.lift_fresh_copy", "aten.contiguous", "aten.slice_copy.Tensor",
    "aten.slice.Tensor", "aten.select_copy.int", "aten.select.int", "aten.squeeze", "aten.as_strided_copy",
    "aten.unfold_copy", "aten.diagonal_copy", "aten.narrow_copy", "aten.pixel_shuffle", "aten.pixel_unshuffle",
    "aten.gather", "aten.index.Tensor", "aten._unsafe_index.Tensor", "aten.index_select", "aten.embedding",
    "aten.upsample_nearest2d.vec", "aten.upsample_nearest2d", "aten.amax", "aten.amin", "aten.max", "aten.min",
    "aten.replication_pad2d", "aten.reflection_pad2d", "aten.replication_pad1d", "aten.reflection_pad1d",
    "aten.channel_shuffle",
)  # fmt: skip
def _pick(call: Call) -> Range:
    """Every element is one of the first argument; an index out of range is an error, not a value."""
    return call.range(call.get(0))


@keeps(
    "aten.split_copy.Tensor", "aten.split_with_sizes_copy", "aten.unbind_copy.int", "aten.chunk", "aten.split.Tensor",
    "aten.split_with_sizes", "aten.unbind.int",
)  # fmt: skip
def _pieces(call: Call) -> Result:
    value = call.node.meta.get("val")
    return (call.range(call.get(0)),) * (len(value) if isinstance(value, (list, tuple)) else 0)


@keeps(
    "aten.max.dim", "aten.min.dim", "aten.topk", "aten.sort", "aten.sort.stable", "aten.adaptive_max_pool2d",
    "aten.median.dim",
)  # fmt: skip
def _pick_with_indices(call: Call) -> Result:
    return call.range(call.get(0)), _INDICES


def _pooled(call: Call) -> Range:
    """Padding takes part in no maximum; a window with gaps may see nothing else, and then gives -inf."""
    found, dilation = call.range(call.get(0)), call.get(4, "dilation", 1)
    apart = dilation if isinstance(dilation, (list, tuple)) else [dilation]
    return found if all(type(each) is int and each == 1 for each in apart) else Range(-INF, found.high, found.nan)


keeps("aten.max_pool2d", "aten.max_pool1d", "aten.max_pool3d")(_pooled)


@keeps("aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices")
def _max_pool_with_indices(call: Call) -> Result:
    found = _pooled(call)
    return found, _INDICES if found.low > -INF else TOP


_INDICES = Range(-1.0, float(2**48), False)


keeps("aten.argmax", "aten.argmin")(lambda call: _INDICES)


@keeps("aten.cat", "aten.stack", "aten.concat")
def _cat(call: Call) -> Range:
    tensors = call.get(0, "tensors")
    if not isinstance(tensors, (list, tuple)) or not tensors:
        return TOP
    return union(call.converted(tensor, call.dtype) for tensor in tensors)


@keeps("aten.constant_pad_nd")
def _pad(call: Call) -> Range:
    return union((call.operand(0), call.converted(call.get(2, "value", 0), call.dtype)))


keeps("aten.tril", "aten.triu")(lambda call: union((call.operand(0), point(0))))
keeps("aten.sym_size.int", "aten.sym_numel")(lambda call: Range(0.0, product([call.node.meta.get("val")]), False))


_WRITTEN = {
    "aten.index_put.default": 2,
    "aten._unsafe_index_put.default": 2,
    "aten.masked_scatter.default": 2,
    "aten.slice_scatter.default": 1,
    "aten.select_scatter.default": 1,
    "aten.fill.Scalar": 1,
    "aten.index_fill.int_Scalar": 3,
    "aten.scatter.src": 3,
    "aten.scatter.value": 3,
    "aten.index_copy.default": 3,
}


@keeps(*_WRITTEN)
def _put(call: Call) -> Range:
    """Every element is one of the first argument, or of what is written into it."""
    position = _WRITTEN[target_name(call.node.target)]
    if position == 2 and call.get(3, "accumulate", False) is not False:
        return TOP
    return union((call.operand(0), call.operand(position)))


@keeps(*FILLED)
def _filled(call: Call) -> Range:
    number = filling(call.node)
    exact = rounded(number, call.dtype) if number is not None else None
    return point(exact) if exact is not None else whole(call.dtype)


@keeps("aten.arange.start_step", "aten.arange.start", "aten.arange")
def _arange(call: Call) -> Range:
    """From the start up to the end, which rounding may reach, but not with integers."""
    ends = [call.range(argument) for argument in call.node.args[:2]] or [TOP]
    if len(ends) == 1:
        ends.append(Range(0.0, 0.0, False))
    found = union(ends)
    if call.dtype is not None and not call.dtype.is_floating_point and len(call.node.args) < 3:
        found = Range(found.low, max(found.low, found.high - 1), found.nan)
    return convert(found, None, call.dtype) if not found.finite else settle(found, call.dtype)
