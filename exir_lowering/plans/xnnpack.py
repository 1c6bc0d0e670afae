"""What XNNPACK will allocate for a partition that is not lowered yet: an estimate, from its operators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from executorch.exir import sym_util
from torch.export import ExportedProgram
from torch.fx import Node as Call

from exir_lowering import graphs
from exir_lowering._upstream.fakes import is_unbounded, size_hint
from exir_lowering.graphs.measures import tensors
from exir_lowering.pte import xnnpack_memory
from exir_lowering.pte.device_memory import DelegateMemory
from exir_lowering.pte.payloads import XNNPACK
from exir_lowering.pte.xnnpack_memory import Node, Value

_NODES = {
    **dict.fromkeys(("aten.addmm", "aten.linear", "aten.mm"), "FullyConnected"),
    **{"aten.bmm": "BatchMatrixMultiply", "aten.convolution": "Conv2d", "aten.cat": "Concatenate2"},
    **{"aten.mean": "GlobalAvgPooling2d", "aten.max_pool2d": "MaxPooling2d", "aten.avg_pool2d": "AvgPooling2d"},
    **{"aten.permute_copy": "StaticTranspose", "aten.slice_copy": "StaticSlice", "aten._softmax": "Softmax"},
    **{"aten.constant_pad_nd": "StaticConstantPad", "aten.upsample_bilinear2d": "StaticResizeBilinear2D"},
}
"""XNNPACK's names of operators whose result cannot be written over an input."""


def estimate(backend: str, program: ExportedProgram) -> DelegateMemory:
    """Estimate what a delegate will take; what its passes change of layouts and tables is not known yet."""
    values, nodes, ids = dict[int, Value](), list[Node](), dict[Call, int]()
    lifted, (*calls, output) = graphs.lifted_inputs(program), program.graph.nodes
    rounded = set[Call]()  # only what rounds reads them, or what is computed of them
    for call in reversed(calls):
        if len(call.users) == 1 and any(user in rounded or _rounds(user) for user in call.users):
            rounded.add(call)
    for call in calls:
        name = graphs.operator_name(call).rpartition(".")[0]
        given = [ids[one] for one in call.all_input_nodes if one in ids]
        tensor = next(tensors(call.meta.get("val")), None)
        if tensor is None:
            continue
        followed = graphs.is_getitem(call) or ".dequantize" in name
        if given and (followed or (_rounds(call) and not values[given[0]].outside)):
            ids[call] = given[0]
            if -8 in call.args and values[given[0]].element == "torch.int8":  # of four bits, two share a byte
                values[given[0]] = replace(values[given[0]], element="int4", size=values[given[0]].size // 2)
            continue
        computed = call.op == "call_function"
        constant = call in lifted or (computed and all(values[id_].constant for id_ in given))
        ids[call] = made = len(values)
        outside = constant or not computed or call in output.all_input_nodes
        values[made] = _value(tensor, 1 if computed and call in rounded else tensor.element_size(), constant, outside)
        if computed and not constant:
            nodes.append(_node(name, call, ids, values))
    taken = {id_ for node in nodes for name, id_ in node.inputs.items() if name != "filter"}
    own = xnnpack_memory.estimate(nodes, values) if backend == XNNPACK else None
    return DelegateMemory(backend, sum(values[id_].size for id_ in taken if values[id_].constant), own)


def _rounds(call: Call) -> bool:
    """Return whether a call quantises by fixed numbers, which XNNPACK's operator before it does: one byte is left."""
    return ".quantize_per_tensor" in graphs.operator_name(call) and not isinstance(call.args[1], Call)


def _value(tensor: Any, element: int, constant: bool, outside: bool) -> Value:
    """Return a value of the largest size; of an image, the channels come last."""
    dims = [*map(_greatest, tensor.shape)]
    size = math.prod(dims) * element
    dims = [dims[0], *([1] * (4 - len(dims))), *dims[2:], dims[1]] if len(dims) in (3, 4) else dims
    return Value(str(tensor.dtype), dims, size, constant, outside)


def _greatest(size: Any) -> int:
    return size_hint(size) if isinstance(size, int) or is_unbounded(size) else int(sym_util.eval_upper_bound(size))


def _node(name: str, call: Call, ids: Mapping[Call, int], values: dict[int, Value]) -> Node:
    """Return the node of a call; a filter is added to the values as XNNPACK has it."""
    given = (ids[one] for one in call.all_input_nodes if one in ids)
    kind, inputs = _NODES.get(name, name), {f"input{number}": id_ for number, id_ in enumerate(given, 1)}
    if kind in ("FullyConnected", "Conv2d"):
        conv, layer = kind == "Conv2d", name == "aten.linear"
        weight = values[ids[graphs.argument(call, "weight" if conv or layer else "mat2")]]
        transposed = graphs.argument(call, "transposed") if conv else not layer
        if conv and graphs.argument(call, "groups") > 1 and weight.dims[-1] == 1:
            kind = "DepthwiseConv2d"
        if transposed or kind == "DepthwiseConv2d":
            weight = replace(weight, dims=[weight.dims[-1], *weight.dims[1:-1], weight.dims[0]])
        inputs["filter"] = len(values)
        values[inputs["filter"]] = weight
    return Node(kind, inputs, (ids[call],))
