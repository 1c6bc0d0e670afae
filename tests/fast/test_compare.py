"""The comparison of Edge programs finds each kind of difference, and none between two conversions of one program."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cached import list_differing_names
from edge_differences import list_differences
from executorch.exir import EdgeCompileConfig, to_edge
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.fx import Node

from exir_lowering import graphs


class Everything(nn.Module):
    """Has a branch, a buffer that it changes, tied weights, a constant, a split and a dynamic shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tied = nn.Parameter(torch.randn(8))
        self.again = self.tied
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        self.count.add_(1.0)
        first, second = torch.split(y, 2, dim=1)
        z = torch.cond(x.sum() > 0, lambda a: a.sin() + 1.0, lambda a: a.cos(), (y,))
        return z.clamp(min=-2.0, max=0.5), first * self.again[:2], second + self.tied[4:6], x.reshape(-1)


@functools.cache
def program() -> ExportedProgram:
    axes = {0: Dim("rows", min=2, max=64)}
    with torch.no_grad():
        return export(Everything(), (torch.randn(3, 4),), dynamic_shapes=(axes,))


@functools.cache
def convert(number: int) -> ExportedProgram:
    return to_edge(program(), compile_config=EdgeCompileConfig(_check_ir_validity=False)).exported_program()


def changed() -> ExportedProgram:
    """Return a copy of a conversion for a test to change: graphs, metadata and signature are its own."""
    return graphs.copy_program(convert(0))


def node(edge: ExportedProgram, name: str) -> Node:
    return next(n for n in edge.graph.nodes if n.op == "call_function" and name in str(n.target))


def branch(edge: ExportedProgram) -> ExportedProgram:
    return next(m for name, m in edge.graph_module.named_children() if name == "submodule_0")


def _meta(name: str, key: str, value: Any) -> Callable[[ExportedProgram], None]:
    return lambda edge: node(edge, name).meta.update({key: value})


def _without(name: str, key: str) -> Callable[[ExportedProgram], None]:
    return lambda edge: node(edge, name).meta.pop(key)


def _val(name: str, change: Callable[[Any], Any]) -> Callable[[ExportedProgram], None]:
    return lambda edge: node(edge, name).meta.update(val=change(node(edge, name).meta["val"]))


def _operator(edge: ExportedProgram) -> None:
    node(edge, "clamp").target = node(edge, "sum").target


def _argument(edge: ExportedProgram) -> None:
    found = node(edge, "clamp")
    found.args = (found.args[0], -2.5, *found.args[2:])


def _kind_of_argument(edge: ExportedProgram) -> None:
    found = node(edge, "clamp")
    found.args = (found.args[0], -2, *found.args[2:])


def _another_node(edge: ExportedProgram) -> None:
    found = node(edge, "aten.mul")
    found.args = (found.args[0], found.args[0])


def _order_of_users(edge: ExportedProgram) -> None:
    found = next(n for n in edge.graph.nodes if len(n.users) > 1)
    found.users = dict(reversed(found.users.items()))


def _branch_operator(edge: ExportedProgram) -> None:
    graph = branch(edge).graph
    found = next(n for n in graph.nodes if "sin" in str(n.target))
    found.target = next(n for n in graph.nodes if "add" in str(n.target)).target


def _removed(edge: ExportedProgram) -> None:
    graph = branch(edge).graph
    found = next(n for n in graph.nodes if "sin" in str(n.target))
    found.replace_all_uses_with(found.args[0])
    graph.erase_node(found)


def _shared_val(edge: ExportedProgram) -> None:
    node(edge, "clamp").meta["val"] = next(n for n in edge.graph.nodes if n.target is torch.ops.higher_order.cond).meta[
        "val"
    ][0]


def _ancestor(edge: ExportedProgram) -> None:
    source = node(edge, "clamp").meta["from_node"] = copy.deepcopy(node(edge, "clamp").meta["from_node"])
    while source[-1].from_node:
        source = source[-1].from_node
    source[-1].node_info.name = "other"


def _graph_of_ancestor(edge: ExportedProgram) -> None:
    """Make a node's ancestor one of the same name, in a graph of its own."""
    found = node(edge, "split")
    source = found.meta["from_node"] = copy.deepcopy(found.meta["from_node"])
    while source[-1].from_node:
        source = source[-1].from_node
    source[-1].node_info.graph_id = 1


def _constant(edge: ExportedProgram) -> None:
    edge._constants = dict(edge.constants)  # ExecuTorch's conversions share it
    name = next(iter(edge.constants))
    edge.constants[name] = edge.constants[name].clone()
    edge.constants[name][0] = -0.0


def _negative_zero(edge: ExportedProgram) -> None:
    edge.state_dict["count"] = torch.full((4,), -0.0)


def _untied(edge: ExportedProgram) -> None:
    name = "tied" if "tied" in edge.state_dict else "again"
    edge.state_dict[name] = nn.Parameter(edge.state_dict[name].detach().clone())
    edge.state_dict["linear.bias"] = nn.Parameter(edge.state_dict["linear.weight"][0])


def _key_of_state(edge: ExportedProgram) -> None:
    edge.state_dict["other"] = edge.state_dict.pop("count")


def _target_of_input(edge: ExportedProgram) -> None:
    edge.graph_signature.input_specs[0].target = "other"


def _order_of_outputs(edge: ExportedProgram) -> None:
    specs = edge.graph_signature.output_specs
    specs[-1], specs[-2] = specs[-2], specs[-1]


def _range(edge: ExportedProgram) -> None:
    edge.range_constraints.clear()


def _verifier(edge: ExportedProgram) -> None:
    edge._verifiers = program().verifiers


PLANTED: dict[str, tuple[Callable[[ExportedProgram], Any], str]] = {
    "operator": (_operator, "target"),
    "argument": (_argument, "args[1] -2.5 / -2.0"),
    "kind of argument": (_kind_of_argument, "args[1] int -2 / float -2.0"),
    "another node": (_another_node, "args[1]"),
    "order of users": (_order_of_users, "users"),
    "operator of a branch": (_branch_operator, "submodule_0/node"),
    "an operator fewer": (_removed, "number of nodes"),
    "val missing": (_without("clamp", "val"), "val missing / present"),
    "val None": (_meta("clamp", "val", None), "val NoneType"),
    "shape": (_val("clamp", lambda v: v[:, :2]), "val shape"),
    "strides": (_val("clamp", lambda v: v.t().contiguous().t()), "val stride"),
    "dtype": (_val("clamp", lambda v: v.to(torch.float64)), "val dtype"),
    "offset": (_val("mul", lambda v: v.new_empty(200).as_strided(v.shape, v.stride(), 3)), "val storage_offset"),
    "gradient": (_val("clamp", lambda v: v.detach().requires_grad_(not v.requires_grad)), "val requires_grad"),
    "kind of sequence": (_val("split", lambda v: list(v) if isinstance(v, tuple) else tuple(v)), "val "),
    "shared val": (_shared_val, "same val object"),
    "line": (_meta("clamp", "stack_trace", "line 1"), "stack_trace"),
    "module": (_meta("clamp", "nn_module_stack", {"a": ("a", "B")}), "nn_module_stack"),
    "source": (_meta("clamp", "source_fn_stack", [("a", "b")]), "source_fn_stack"),
    "torch function": (_meta("clamp", "torch_fn", ("a", "b")), "torch_fn"),
    "handle": (_meta("clamp", "debug_handle", 12345), "debug_handle"),
    "tag": (_meta("clamp", "quantization_tag", "t"), "quantization_tag present / missing"),
    "own metadata": (_meta("clamp", "custom", {"key": 1}), "custom"),
    "ancestor": (_ancestor, "name of the ancestor other"),
    "graph of the ancestor": (_graph_of_ancestor, "same ancestor"),
    "history missing": (_without("clamp", "from_node"), "from_node missing / present"),
    "constant": (_constant, "constants:"),
    "sign of zero": (_negative_zero, "state_dict: count values"),
    "untied weights": (_untied, "sharing of tensors"),
    "key of the state": (_key_of_state, "state_dict: keys"),
    "target of an input": (_target_of_input, "signature: input_specs[0]['target']"),
    "order of outputs": (_order_of_outputs, "signature: output_specs"),
    "range": (_range, "range_constraints"),
    "verifier": (_verifier, "verifiers"),
}


def test_two_conversions_are_equal() -> None:
    assert list_differences(convert(0), convert(1)) == []
    assert list_differing_names(convert(0), convert(1)) == []


@pytest.mark.parametrize("planted", PLANTED)
def test_a_difference_is_found(planted: str) -> None:
    change, message = PLANTED[planted]
    edge = changed()
    change(edge)
    found = list_differences(edge, convert(0))
    assert any(message in line for line in found), found


@pytest.mark.parametrize("key", ["seq_nr", "delegation_tag", "original_aten"])
def test_metadata_that_nobody_reads_is_no_difference(key: str) -> None:
    edge = changed()
    node(edge, "clamp").meta[key] = object()
    assert list_differences(edge, convert(0)) == []


def test_a_name_is_no_difference() -> None:
    edge = changed()
    node(edge, "mul").name = "renamed"
    for spec in edge.graph_signature.output_specs:
        spec.arg.name = {"aten_mul_tensor": "renamed"}.get(spec.arg.name, spec.arg.name)
    assert list_differences(edge, convert(0)) == []
    assert [line for line in list_differing_names(edge, convert(0)) if "renamed" in line]
