"""What is known by form: tables of signatures, values of nodes, results of delegates; the same as computed anew."""

from __future__ import annotations

from typing import Any

import models
import torch
from executorch.exir.lowered_backend_module import LoweredBackendModule
from executorch.exir.pass_base import ExportPass
from skipped_passes import describe_value
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram, export
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from exir_lowering import LoweringOptions, lower
from exir_lowering.fast import accelerated, current, fake_results


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.conv(x)
        return self.linear(y).softmax(-1), y.amax((2, 3)), torch.cat([y, y], 1)


def edge() -> ExportedProgram:
    torch.manual_seed(0)
    return lower(export(Small().eval(), (torch.randn(1, 3, 8, 8),)), None)["forward"]


def values(program: Any) -> list[Any]:
    nodes = program.graph.nodes
    return [(node.op, str(node.target), describe_value(node.meta.get("val"))) for node in nodes if node.op != "output"]


def test_a_table_follows_its_signature() -> None:
    signature = edge().graph_signature
    with accelerated():
        table = signature.inputs_to_parameters
        assert signature.inputs_to_parameters is table
        (name, *_) = table
        signature.replace_all_uses(name, "renamed")
        assert "renamed" in signature.inputs_to_parameters and name not in signature.inputs_to_parameters
        added = InputSpec(InputKind.PARAMETER, TensorArgument(name="another"), "another.weight")
        signature.input_specs.insert(0, added)
        assert signature.inputs_to_parameters["another"] == "another.weight"
        added.target = "other.weight"
        assert signature.inputs_to_parameters["another"] == "other.weight"
        added.kind = InputKind.BUFFER
        assert "another" not in signature.inputs_to_parameters and "another" in signature.inputs_to_buffers
        expected = dict(signature.inputs_to_buffers)
    assert signature.inputs_to_buffers is not signature.inputs_to_buffers == expected


def test_a_settled_graph_has_the_values_of_a_traced_one() -> None:
    program = edge()
    expected = values(ExportPass()(program.graph_module).graph_module)
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.meta["val"] = torch.zeros(1)
    with accelerated():
        assert fake_results.update_values(program.graph_module, current())
    assert values(program.graph_module) == expected


def test_a_value_that_is_right_is_kept() -> None:
    module = ExportPass()(edge().graph_module).graph_module
    before = {node: node.meta["val"] for node in module.graph.nodes if node.op == "call_function"}
    with accelerated():
        assert fake_results.update_values(module, current())
    assert all(node.meta["val"] is value for node, value in before.items())


def test_symbolic_sizes_and_writes_are_left_to_tracing() -> None:
    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu() * 2

    sizes = {"x": {0: torch.export.Dim("n", min=2, max=8)}}
    dynamic = lower(export(Doubled(), (torch.ones(4, 3),), dynamic_shapes=sizes), None)["forward"].graph_module
    writing = edge().graph_module
    (node, *_) = (node for node in writing.graph.nodes if node.op == "call_function")
    with writing.graph.inserting_after(node):
        writing.graph.call_function(torch.ops.aten.copy_.default, (node, node))
    with accelerated():
        assert not fake_results.update_values(dynamic, current())
        assert not fake_results.update_values(writing, current())


def test_a_delegate_returns_what_its_program_does() -> None:
    methods = lower(models.exported("convnext")[2], "xnnpack", options=LoweringOptions(fast=False))
    module = methods["forward"].graph_module
    calls = 0
    for node in module.graph.nodes:
        if node.op != "call_function" or "call_delegate" not in str(node.target):
            continue
        delegate = getattr(module, node.args[0].target)
        assert isinstance(delegate, LoweredBackendModule)
        args = [each.meta["val"] for each in node.args[1:]]
        assert all(isinstance(arg, FakeTensor) for arg in args)
        mode = args[0].fake_mode
        with torch.no_grad(), accelerated():
            args = [arg.detach() for arg in args]
            found = fake_results.results_of(delegate, args, mode, current())
        with torch.no_grad(), mode:
            mode.allow_non_fake_inputs = True
            expected = delegate.original_module.module()(*args)
        assert describe_value(found) == describe_value(expected)
        calls += 1
    assert calls
