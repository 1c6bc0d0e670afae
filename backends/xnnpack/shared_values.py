"""Values that several operators of a partition read, which ExecuTorch's preprocess prepares for one of them only.

It has each weight once: in the order of the first layer that reads it, folded with the normalization after that layer
under a name made of the weight's, and a bias rounded by the scales of that layer. A layer that needs something else of
a weight gets an input of its own, which holds the same tensor; normalizations without weights, whose names would be the
same, get ones and zeros. A quantised value is put into the order of one reader, or of the caller, also for others that
read the same dequantisation: each reads another one. Of two activations in a row, both fused with the operator before
them, it keeps the last only: the last one gets the bounds of both. It has no copies: what is returned twice is computed
anew.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputSpec, TensorArgument
from torch.fx import Node

from exir_lowering import graphs

_LAYERS = {"convolution": (1, 2), "linear": (1, 2), "addmm": (2, 0), "mm": (1,)}
"""Where layers have their weight and their bias."""

COPIES = ("clone", "_clone_dim_order")
BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit_no_training")
_ON_THE_WAY = ("dequantize", "quantize", "permute_copy", "t_copy")
"""How the names begin of operators that lie between a weight and its layer."""


def separate(program: ExportedProgram) -> None:
    """Give operators that need something else of a value one of their own; the program is changed in place."""
    _combine_activations(program)
    _separate_factors(program)
    _separate_weights(program)
    _separate_dequantisations(program)
    _order_images(program)
    _keep_copies(program)


def _keep_copies(program: ExportedProgram) -> None:
    """Return what is returned already as a maximum of itself: copies are removed, but those of inputs."""
    from executorch.backends.transforms.remove_clone_ops import exir_ops

    returned: Any = program.graph.output_node().args[0]
    leaving, left = {*returned}, dict[Any, Any]()  # what is there in the place of a copy, perhaps itself
    for node in filter(_is_copy, program.graph.nodes):
        source = left.get(node.args[0], node.args[0])
        left[node] = node if source.op == "placeholder" and node in leaving else source
    seen = {value for value in returned if left.get(value, value) is value}
    for value in (value for value in returned if left.get(value, value) is not value):
        if left[value] in seen:
            value.target, value.args, value.kwargs = exir_ops.edge.aten.maximum.default, (value.args[0],) * 2, {}
        seen.add(left[value])


def _is_copy(value: Any) -> bool:
    copies = isinstance(value, Node) and value.op == "call_function" and base_name(value) in COPIES
    return copies and value.meta["val"].dim_order() == value.args[0].meta["val"].dim_order()


def _combine_activations(program: ExportedProgram) -> None:
    """Let an activation of an activation compute both, from what the first one reads."""
    for node in [node for node in program.graph.nodes if _bounds(node) and _bounds(node.args[0])]:
        before, (low, high) = node.args[0], _bounds(node)
        bounds = [min(max(bound, low), high) for bound in _bounds(before)]
        if base_name(node) == "relu":  # of two, it has no bounds; of a hardtanh, it becomes one
            node.target = before.target
        node.args, node.kwargs = (before.args[0], *(bounds if base_name(node) == "hardtanh" else ())), {}
        if not before.users:
            program.graph.erase_node(before)


def _bounds(node: Any) -> Any:
    """Return the least and the greatest value of an activation that is fused with the operator before it."""
    name = base_name(node) if isinstance(node, Node) and node.op == "call_function" else None
    if name == "hardtanh":
        low, high = graphs.argument(node, "min_val"), graphs.argument(node, "max_val")
        return -1.0 if low is None else low, 1.0 if high is None else high
    return (0.0, math.inf) if name == "relu" else None


def _order_images(program: ExportedProgram) -> None:
    """Let linear layers quantise images in contiguous order: two reshapes, which nothing but that order is given to."""
    from executorch.backends.xnnpack.operators.node_visitor import ChannelsLastTaggedReshapePass as ordering

    unordered = ordering.memory_sensitive_ops_nhwc
    if not any(node.target in unordered or base_name(node) in BATCH_NORMS for node in program.graph.nodes):
        return
    targets = {target.__name__: target for target in ordering.memory_sensitive_ops_nchw}
    for node in program.graph.find_nodes(op="call_function", target=targets["aten.linear.default"]):
        chosen = [value.args[0] for value in node.args[0].all_input_nodes if graphs.is_getitem(value)]
        image = chosen[0].args[0] if chosen and base_name(node.args[0]).startswith("dequantize") else None
        unknown = [size for size in node.meta["val"].shape if not isinstance(size, int)]  # a reshape allows one
        if image is None or image.op == "placeholder" or node.meta["val"].dim() != 4 or len(unknown) > 1:
            continue
        with program.graph.inserting_before(chosen[0]):
            widened = program.graph.call_function(targets["aten.unsqueeze_copy.default"], (image, -1))
            ordered = program.graph.call_function(targets["aten.squeeze_copy.dim"], (widened, -1))
        widened.meta, ordered.meta = {**image.meta, "val": image.meta["val"].unsqueeze(-1)}, dict(image.meta)
        for reader in (chosen[0], node.args[0].args[0]):
            reader.replace_input_with(image, ordered)


def _separate_factors(program: ExportedProgram) -> None:
    """Give normalizations without factors ones of their own: what they become has the same name for all of them."""
    norms = [node for node in program.graph.nodes if node.op == "call_function" and base_name(node) in BATCH_NORMS]
    specs = graphs.lifted_inputs(program)
    bare = [node for node in norms if node.args[1] is None and node.args[3] in specs]
    names = Counter(_flat(spec.target) for spec in specs.values())
    for node in bare if len(bare) > 1 else ():
        mean = node.args[3]
        for position, fill in ((1, torch.ones_like), (2, torch.zeros_like)):
            if node.args[position] is None:
                node.update_arg(position, _add_input(program, mean, specs[mean], names, fill))


def _separate_weights(program: ExportedProgram) -> None:
    specs = graphs.lifted_inputs(program)
    read: dict[Node, dict[Hashable, list[tuple[Node, int]]]] = {}
    for node, position, need in _readings(program):
        source = _source(node.args[position])
        if source in specs:
            read.setdefault(source, {}).setdefault(need, []).append((node, position))
    names = Counter(_flat(spec.target) for spec in specs.values())
    for source, needs in read.items():
        ambiguous = names[_flat(specs[source].target)] > 1 and any(isinstance(need, Node) for need in needs)
        layers = {node for readers in needs.values() for node, _ in readers}
        kept = None if ambiguous or None in needs or _is_read_elsewhere(source, layers) else next(iter(needs))
        for readers in (readers for need, readers in needs.items() if need not in (None, kept)):
            own = _add_input(program, source, specs[source], names)
            for node, position in readers:
                _reconnect(node, position, own)


def _separate_dequantisations(program: ExportedProgram) -> None:
    weights, output = graphs.lifted_inputs(program), program.graph.output_node()
    for value in program.graph.nodes:
        if value.op == "call_function" and base_name(value) == "dequantize_per_tensor" and value.args[0] not in weights:
            first = output if output in value.users else next(iter(value.users), None)
            for reader in [user for user in value.users if user is not first and not isinstance(value.args[1], Node)]:
                with program.graph.inserting_after(value):
                    reader.replace_input_with(value, program.graph.node_copy(value, lambda read: read))


def _readings(program: ExportedProgram) -> Iterator[tuple[Node, int, Hashable]]:
    """Yield where layers read weights, with what they need of one: None, as it is; the node, what no other one does."""
    calls = [(node, base_name(node)) for node in program.graph.nodes if node.op == "call_function"]
    folds = any(name in BATCH_NORMS for _, name in calls)
    for node, name in calls:
        if name in BATCH_NORMS:
            yield node, 1, node
        for position in (each for each in _LAYERS.get(name, ()) if each < len(node.args)):
            if folds:
                yield node, position, node
            elif position == _LAYERS[name][0]:
                yield node, position, _order(node) if name == "convolution" else None
            else:
                yield node, position, _scales(node, name)


def _order(node: Node) -> Hashable:
    """Return what the order of a convolution's weight depends on; the weight of one over one dimension is changed."""
    return node if node.meta["val"].dim() == 3 else (node.args[6], node.args[8])


def _scales(node: Node, name: str) -> Hashable:
    """Return the scales of the input and the weight of a layer that is quantised statically, by which its bias is."""
    weight = _LAYERS[name][0]
    scales = []
    for value in node.args[weight - 1 : weight + 1]:
        while isinstance(value, Node) and base_name(value) in ("permute_copy", "t_copy"):
            value = value.args[0]
        if not isinstance(value, Node) or not base_name(value).startswith("dequantize"):
            return None
        scales.append(value.args[1:3])
    return tuple(scales) if isinstance(scales[0][0], float) else None


def _source(value: Any) -> Any:
    while isinstance(value, Node) and _is_on_the_way(value):
        value = value.args[0]
    return value


def _is_on_the_way(node: Node) -> bool:
    return node.op == "call_function" and base_name(node).startswith(_ON_THE_WAY)


def _is_read_elsewhere(source: Node, layers: set[Node]) -> bool:
    users = [user for user in source.users if user not in layers]
    return any(not _is_on_the_way(user) or _is_read_elsewhere(user, layers) for user in users)


def _add_input(
    program: ExportedProgram,
    source: Node,
    spec: InputSpec,
    names: Counter[str],
    fill: Callable[[Any], Any] | None = None,
) -> Node:
    """Add an input that holds the same tensor under another name, or one made like it."""
    number = next(number for number in range(2, len(names) + 3) if not names[_flat(f"{spec.target}_{number}")])
    target = f"{spec.target}_{number}"
    names[_flat(target)] += 1
    for table in (program.state_dict, program.constants):
        if spec.target in table:
            table[target] = table[spec.target] if fill is None else fill(table[spec.target])
    place = list(graphs.placeholders(program)).index(source)
    with program.graph.inserting_before(source):
        own: Node = program.graph.placeholder(f"{source.name}_{number}")
    own.target, own.meta = own.name, dict(source.meta)
    program.graph_signature.input_specs.insert(place, replace(spec, arg=TensorArgument(own.name), target=target))
    return own


def _reconnect(node: Node, position: int, own: Node) -> None:
    """Let a node read another weight, through copies of what lies on the way."""
    value: Any = node.args[position]
    if value.op == "placeholder":
        node.update_arg(position, own)
        return
    with node.graph.inserting_before(node):
        copied = node.graph.node_copy(value, lambda read: read)
    node.update_arg(position, copied)
    if not value.users:
        node.graph.erase_node(value)
    _reconnect(copied, 0, own)


def _flat(target: Any) -> str:
    """Return a weight's name as it is in the names of what ExecuTorch's preprocess makes of it."""
    return str(target).replace(".", "_")


def base_name(node: Node) -> str:
    """Return the name of a node's operator without its namespace and its overload."""
    return graphs.operator_name(node).partition(".")[2].partition(".")[0]
