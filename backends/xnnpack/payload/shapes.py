"""The shapes of the values in a graph of XNNPACK, computed as XNNPACK does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from exir_lowering.backends.xnnpack.payload.graph import MAX_RANK, NO_VALUE, GraphValue, Node
from exir_lowering.plugins.payload import CorruptError

Dims = tuple[int, ...]
_LIMIT = 1 << 40


class _Mismatch(Exception):
    """The shapes of a node's inputs do not match."""


class _Unequal(_Mismatch):
    """Dimensions that have to be equal have other sizes: if these are bounds, the least one holds."""

    def __init__(self, message: str, made: Dims) -> None:
        super().__init__(message)
        self.made = made


def check_nodes(values: Mapping[int, GraphValue], nodes: Sequence[Node]) -> None:
    """Check that each value is made once, before it is read; CorruptError if not."""
    made = {id_ for id_, value in values.items() if value.constant or value.given}
    for node in nodes:
        for id_ in node.inputs:
            if id_ not in made and id_ != NO_VALUE:
                raise CorruptError(f"{node} takes value {id_}, which no earlier node makes")
        for id_ in node.outputs:
            if id_ in made:
                raise CorruptError(f"{node} makes value {id_}, which already exists")
            made.add(id_)
    lost = [id_ for id_, value in values.items() if value.returned and id_ not in made]
    if lost:
        raise CorruptError(f"value {lost[0]} is returned, but no node makes it")


def infer(
    values: Mapping[int, GraphValue], nodes: Sequence[Node], given: Mapping[int, Dims], *, bounds: bool
) -> dict[int, Dims]:
    """Return the shapes of all values of a checked graph, by ids; CorruptError if a node cannot take its inputs.

    Given sizes may be `bounds` of dynamic ones, which differ although the sizes are equal when the graph runs: XNNPACK
    computes and checks the shapes then.
    """
    shapes = {id_: value.dims for id_, value in values.items() if value.constant}
    shapes.update(given)
    for node in nodes:
        taken = [shapes[id_] for id_ in node.inputs if id_ != NO_VALUE]
        try:
            made = _RULES.get(node.type.name, _same)(node, taken)
        except _Mismatch as error:
            if not (bounds and isinstance(error, _Unequal)):
                raise CorruptError(f"{node}, takes {', '.join(map(str, map(list, taken)))}: {error}") from None
            made = error.made
        if len(made) > MAX_RANK or math.prod(made) >= _LIMIT:
            raise CorruptError(f"{node}, makes a value of shape {list(made)}")
        shapes.update(dict.fromkeys(node.outputs, made))
    return shapes


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise _Mismatch(message)


def _same(node: Node, taken: Sequence[Dims]) -> Dims:
    return taken[0]


def _broadcast(first: Dims, second: Dims) -> Dims:
    rank = max(len(first), len(second))
    pairs = [*zip((1,) * (rank - len(first)) + first, (1,) * (rank - len(second)) + second, strict=True)]
    made = tuple(max(pair) if 1 in pair else min(pair) for pair in pairs)
    if any(one != other and 1 not in (one, other) for one, other in pairs):
        raise _Unequal("their dimensions must be equal, or 1", made)
    return made


def _slope(node: Node, taken: Sequence[Dims]) -> Dims:
    _require(_broadcast(*taken) == taken[0], "the slope is larger than the input")
    return taken[0]


def _linear(node: Node, taken: Sequence[Dims]) -> Dims:
    rows, filter_, *bias = taken
    _require(len(filter_) == 2 and len(rows) > 0, "the filter must have two dimensions, and the input at least one")
    outputs, inputs = reversed(filter_) if node.numbers["flags"] & 1 else filter_
    _require(rows[-1] == inputs, "the last dimension of the input must be that of the filter")
    _require(all(math.prod(one) == outputs for one in bias), "the bias must have an element for each output")
    return (*rows[:-1], outputs)


def _product(node: Node, taken: Sequence[Dims]) -> Dims:
    left, right = taken
    _require(min(len(left), len(right)) >= 2, "both must be matrices")
    inner, outer = right[-2:] if not node.numbers["flags"] & 1 else right[:-3:-1]
    try:
        made, message = _broadcast(left[:-2], right[:-2]), ""
    except _Unequal as error:
        made, message = error.made, str(error)
    if left[-1] != inner:
        message = "the rows of one must be as long as the columns of the other"
    if message:
        raise _Unequal(message, (*made, left[-2], outer))
    return (*made, left[-2], outer)


def _windows(node: Node, height: int, width: int) -> tuple[int, int]:
    """Return how often a window fits into both dimensions of an image."""
    return _window(node, height, "top", "bottom", "height"), _window(node, width, "left", "right", "width")


def _window(node: Node, size: int, before: str, after: str, axis: str) -> int:
    numbers = node.numbers
    kernel, dilation = numbers[f"kernel_{axis}"], numbers.get(f"dilation_{axis}", 1)
    if node.type.name == "AvgPooling2d":
        dilation = 1  # XNNPACK does not get this field
    stride = numbers.get(f"stride_{axis}", kernel)
    _require(kernel > 0 and dilation > 0 and stride > 0, "its kernel, stride and dilation must be positive")
    space = size + numbers[before] + numbers[after] - ((kernel - 1) * dilation + 1)
    _require(space >= 0, "its kernel is larger than the input")
    return space // stride + 1


def _image(taken: Sequence[Dims]) -> tuple[int, int, int, int]:
    _require(len(taken[0]) == 4 and min(taken[0]) > 0, "the input must have four dimensions")
    batch, height, width, channels = taken[0]
    return batch, height, width, channels


def _pooled(node: Node, taken: Sequence[Dims]) -> Dims:
    batch, height, width, channels = _image(taken)
    return (batch, *_windows(node, height, width), channels)


def _averaged(node: Node, taken: Sequence[Dims]) -> Dims:
    batch, _, _, channels = _image(taken)
    return (batch, 1, 1, channels) if node.numbers["flags"] else (batch, channels)


def _channels(node: Node, taken: Sequence[Dims], filter_: Dims) -> tuple[int, int, int, int]:
    """Check the filter, bias and channels of a convolution; return the input's shape."""
    batch, height, width, channels = _image(taken)
    numbers = node.numbers
    groups, inputs, outputs = numbers["groups"], numbers["group_inputs"], numbers["group_outputs"]
    _require(min(groups, inputs, outputs) > 0, "its groups and their channels must be positive")
    _require(taken[1] == filter_, f"the filter must have the shape {list(filter_)}")
    _require(channels == groups * inputs, f"the input must have {groups} x {inputs} channels")
    _require(
        all(math.prod(one) == groups * outputs for one in taken[2:]), "the bias must have an element for each channel"
    )
    return batch, height, width, channels


def _convolved(node: Node, taken: Sequence[Dims]) -> Dims:
    numbers = node.numbers
    kernel = (numbers["kernel_height"], numbers["kernel_width"])
    groups, inputs, outputs = numbers["groups"], numbers["group_inputs"], numbers["group_outputs"]
    depthwise = node.type.name == "DepthwiseConv2d"
    filter_ = (1, *kernel, groups * outputs) if depthwise else (groups * outputs, *kernel, inputs)
    batch, height, width, _ = _channels(node, taken, filter_)
    _require(inputs == 1 or not depthwise, "each of its groups must have one channel")
    return (batch, *_windows(node, height, width), groups * outputs)


def _transposed(node: Node, taken: Sequence[Dims]) -> Dims:
    numbers = node.numbers
    groups, inputs, outputs = numbers["groups"], numbers["group_inputs"], numbers["group_outputs"]
    filter_ = (groups * outputs, numbers["kernel_height"], numbers["kernel_width"], inputs)
    batch, height, width, _ = _channels(node, taken, filter_)
    made = []
    for size, before, after, axis in ((height, "top", "bottom", "height"), (width, "left", "right", "width")):
        kernel, stride, dilation = (numbers[f"{name}_{axis}"] for name in ("kernel", "stride", "dilation"))
        _require(min(kernel, stride, dilation) > 0, "its kernel, stride and dilation must be positive")
        _require(numbers[f"adjustment_{axis}"] < stride, "its adjustment must be smaller than its stride")
        full = (size - 1) * stride + (kernel - 1) * dilation + 1 + numbers[f"adjustment_{axis}"]
        _require(full > numbers[before] + numbers[after], "its padding is larger than its output")
        made.append(full - numbers[before] - numbers[after])
    return batch, made[0], made[1], groups * outputs


def _resized(node: Node, taken: Sequence[Dims]) -> Dims:
    batch, _, _, channels = _image(taken)
    height, width = node.numbers["new_height"], node.numbers["new_width"]
    _require(min(height, width) > 0, "its new size must be positive")
    return batch, height, width, channels


def _permuted(node: Node, taken: Sequence[Dims]) -> Dims:
    order = node.lists["perm"]
    _require(sorted(order) == list(range(len(taken[0]))), f"its order of dimensions is {list(order)}")
    return tuple(taken[0][dim] for dim in order)


def _padded(node: Node, taken: Sequence[Dims]) -> Dims:
    before, after = node.lists["before"], node.lists["after"]
    _require(len(before) == len(after) == len(taken[0]), "its padding must have an entry for each dimension")
    return tuple(map(sum, zip(before, taken[0], after, strict=True)))


def _reshaped(node: Node, taken: Sequence[Dims]) -> Dims:
    shape, count = node.lists["shape"], math.prod(taken[0])
    _require(shape.count(0) <= 1, "its new shape has two unknown dimensions")
    known = math.prod(size for size in shape if size)
    made = tuple(size or count // known for size in shape)
    _require(math.prod(made) <= count, f"its new shape is {list(shape)}")
    if math.prod(made) != count:
        raise _Unequal(f"its new shape is {list(shape)}", made)
    return made


def _sliced(node: Node, taken: Sequence[Dims]) -> Dims:
    offsets, sizes = node.lists["offsets"], node.lists["sizes"]
    _require(len(offsets) == len(sizes) == len(taken[0]), "it must have a slice for each dimension")
    made = []
    for offset, size, dim in zip(offsets, sizes, taken[0], strict=True):
        _require(offset < dim and offset + size <= dim, f"it takes {size} from {offset} of {dim}")
        made.append(size or dim - offset)
    return tuple(made)


def _concatenated(node: Node, taken: Sequence[Dims]) -> Dims:
    axis = node.numbers["axis"]
    axis -= 1 << 32 if axis >= 1 << 31 else 0
    first = taken[0]
    _require(-len(first) <= axis < len(first), f"its axis is {axis}")
    axis %= len(first)
    _require({len(dims) for dims in taken} == {len(first)}, "they must have as many dimensions")
    least = [min(sizes) for sizes in zip(*taken, strict=True)]
    made = (*least[:axis], sum(dims[axis] for dims in taken), *least[axis + 1 :])
    if any((*dims[:axis], made[axis], *dims[axis + 1 :]) != made for dims in taken):
        raise _Unequal("they may differ in one dimension only", made)
    return made


_ELEMENTWISE = ("Add", "Div", "Minimum", "Multiply", "Subtract", "Maximum")
_RULES: Mapping[str, Callable[[Node, Sequence[Dims]], Dims]] = MappingProxyType(
    {
        **dict.fromkeys(_ELEMENTWISE, lambda node, taken: _broadcast(*taken)),
        **dict.fromkeys(("AvgPooling2d", "MaxPooling2d", "ArgMaxPooling2d"), _pooled),
        **{f"Concatenate{count}": _concatenated for count in range(2, 6)},
        "PReLU": _slope,
        "FullyConnected": _linear,
        "BatchMatrixMultiply": _product,
        "GlobalAvgPooling2d": _averaged,
        "Conv2d": _convolved,
        "DepthwiseConv2d": _convolved,
        "ConvTranspose2d": _transposed,
        "StaticResizeBilinear2D": _resized,
        "StaticTranspose": _permuted,
        "StaticConstantPad": _padded,
        "StaticReshape": _reshaped,
        "StaticSlice": _sliced,
    }
)
"""How the shapes of outputs are computed; most nodes keep the shape of their input."""
