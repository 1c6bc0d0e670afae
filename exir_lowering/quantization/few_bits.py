"""Linear layers in 8da4w, as torchao makes them: weights of 4 bits in groups, activations of 8 bits in each call."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering.quantization.results import LayerError

GROUP = 32  # how many weights of a row have one scale; rows of no multiple of it have 8 bits and one scale
_INT4 = "int4"  # torch's stubs do not have it
_PIECE = 2**18  # how many weights are quantised at once: torchao makes several copies, and the heap keeps what is large


def find_layers(module: GraphModule, takes: Callable[[Node], bool]) -> tuple[dict[str, LayerError], tuple[str, ...]]:
    """Return the layers by the names of their nodes, and the modules of those whose weight others read in float."""
    parameters: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    layers, weights = dict[str, LayerError](), dict[Node, Any]()
    for node in filter(takes, module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)):
        held: list[Any] = [one.op == "get_attr" and parameters.get(str(one.target)) for one in node.all_input_nodes[1:]]
        if held and all(getattr(one, "dtype", None) == torch.float32 for one in held) and held[0].ndim == 2:
            saved = held[0].numel() * (3 if held[0].shape[1] % GROUP else 3.5)
            layers[node.name] = LayerError(graphs.module_stack(node), "aten.linear.default", math.nan, int(saved))
            weights[node] = held[0].untyped_storage().data_ptr()
    others = [node for node in module.graph.find_nodes(op="get_attr") if not node.users.keys() <= weights.keys()]
    read = [parameters[str(node.target)] for node in others if str(node.target) in parameters]
    memories = {one.untyped_storage().data_ptr() for one in read}
    shared = [layers.pop(node.name).path for node, memory in weights.items() if memory in memories]
    return layers, tuple(dict.fromkeys(shared))


def quantize_layers(module: GraphModule, names: Collection[str]) -> GraphModule:
    """Put torchao's layers in the place of those; the nodes keep their names."""
    from torchao.utils import unwrap_tensor_subclass

    for node in [one for one in module.graph.nodes if one.name in names]:
        operands = node.all_input_nodes[1:]
        name = "_".join(["quantized", *(one.name for one in operands)])
        if not hasattr(module, name):  # a layer that is called twice is one
            weight, bias = [*(graphs.attribute(module, str(one.target)) for one in operands), None][:2]
            layer: Any = torch.nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
            layer.weight, layer.bias = weight, bias
            quantize_layer(layer)
            module.add_module(name, layer)
        node.op, node.target, node.args = "call_module", name, node.args[:1]
    unwrap_tensor_subclass(module)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def quantize_layer(layer: torch.nn.Linear, bits: int = 4, scales: torch.dtype = torch.float32) -> None:
    """Put torchao's tensor in the place of a weight, some rows at a time, as torchao makes several copies in float.

    Scales of groups are numbers of the type `scales`, and the weights are those that fit them.
    """
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig as Config, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup

    in_groups = bits == 4 and not layer.weight.shape[1] % GROUP
    groups = Config(getattr(torch, _INT4), PerGroup(GROUP), weight_scale_dtype=scales)
    config = groups if in_groups else Config(torch.int8, PerAxis(0))
    pieces: list[Any] = []
    for rows in torch.split(layer.weight.detach(), max(1, _PIECE // layer.weight.shape[1])):
        part = torch.nn.Linear(rows.shape[1], rows.shape[0], device="meta")
        part.weight = torch.nn.Parameter(rows, False)
        quantize_(part, config)
        pieces.append(part.weight)
    data, scale, zeros = (torch.cat([getattr(one, key) for one in pieces]) for key in ("qdata", "scale", "zero_point"))
    layer.weight = _remade(pieces[0], data, scale.float(), zeros, pieces[0].activation_quantization)


def quantize_embedding(embedding: torch.nn.Embedding, layer: torch.nn.Linear) -> None:
    """Put the weight of a layer, in 8 bits, in the place of an embedding's, and share its memory."""
    weight: Any = layer.weight
    embedding.weight = _remade(weight, weight.qdata, weight.scale, weight.zero_point, None)


def _remade(like: Any, qdata: Any, scale: Any, zero_point: Any, activation: Any) -> torch.nn.Parameter:
    made = type(like)(qdata, scale, zero_point, like.target_dtype, like.block_size, like.dtype, activation)
    return torch.nn.Parameter(made, False)
