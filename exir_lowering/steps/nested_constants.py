"""Tensors that branches and loops make of numbers become constants of the program, which the calls pass on.

`torch.export` leaves them as attributes of the graphs that are called, which torch cannot trace again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.programs import fake_mode_of
from exir_lowering.graphs.walking import OPERAND_LAYOUTS


def lift_nested(program: ExportedProgram) -> None:
    """Lift the constants of the graphs that a private copy calls."""
    mode = fake_mode_of(program.graph_module)
    raised = [] if mode is None else _raise(program.graph_module, mode)
    specs, table = program.graph_signature.input_specs, program.constants
    place = next((number for number, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT), len(specs))
    first = [*program.graph.nodes][place]
    for attribute in raised:
        number = place
        while (name := f"_lifted_tensor_nested{number}") in table or name in program.state_dict:
            number += 1
        table[name] = _take(program.graph_module, attribute)
        with program.graph.inserting_before(first):
            node = program.graph.placeholder(name)
        node.meta = attribute.meta
        attribute.replace_all_uses_with(node)
        program.graph.erase_node(attribute)
        specs.insert(place, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name))
        place += 1


def _raise(module: GraphModule, mode: Any) -> list[Node]:
    """Let a graph have the constants of those that it calls as attributes, and pass them on; return those."""
    raised = []
    found = [nested for call in module.graph.nodes for nested in graphs.nested_graphs(module, call)]
    callers = Counter(nested.name for nested in found)
    for nested in found:
        layout, call = OPERAND_LAYOUTS.get(nested.call.target), nested.call
        if layout is None or callers[nested.name] > 1:
            continue
        _raise(nested.module, mode)
        for inner in nested.module.graph.find_nodes(op="get_attr"):
            tensor = graphs.attribute(nested.module, str(inner.target))
            if not isinstance(tensor, torch.Tensor):
                continue
            name = f"_{nested.name}_{inner.name}"
            setattr(module, name, tensor)
            with module.graph.inserting_before(call):
                outer = module.graph.create_node("get_attr", name)
            outer.meta = {"val": mode.from_tensor(tensor, static_shapes=True)}
            call.update_arg(layout.unchanged, (*call.args[layout.unchanged], outer))  # type: ignore[misc]
            for other in graphs.nested_graphs(module, call):  # each gets an operand, which takes the attribute's place
                following = next(node for node in other.module.graph.nodes if node.op != "placeholder")
                with other.module.graph.inserting_before(following):
                    operand = other.module.graph.placeholder(outer.name)
                operand.target, operand.meta = operand.name, dict(outer.meta)
                if other.name == nested.name:
                    inner.replace_all_uses_with(operand)
            _take(nested.module, inner)
            nested.module.graph.erase_node(inner)
            raised.append(outer)
    return raised


def _take(module: GraphModule, attribute: Node) -> Any:
    """Return the tensor of an attribute, which is removed unless it is read elsewhere."""
    tensor = graphs.attribute(module, str(attribute.target))
    if all(node is attribute for node in module.graph.find_nodes(op="get_attr") if node.target == attribute.target):
        owner, _, name = str(attribute.target).rpartition(".")
        delattr(module.get_submodule(owner), name)
    return tensor
