"""Supports: each check with its reason, how they compose, and what they say of each other's mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executorch.exir.dialects._ops import ops as exir_ops
from lowering_support import edge_program
from torch.export import Dim, ExportedProgram
from torch.fx import Node
from torch.fx.passes.operator_support import OpSupports, create_op_support

from exir_lowering import InputError, PartitionerContractError, graphs
from exir_lowering.partitioners import (
    No,
    SupportPartitioner,
    argument_values,
    constant_arguments,
    constant_weights,
    dtypes,
    everything,
    memory_format,
    ops,
    ranks,
    scopes,
    static_shapes,
    where,
)
from exir_lowering.partitioners.supports.support import Support, as_support, make_check


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor, w: torch.Tensor, i: torch.Tensor) -> Any:
        y = torch.relu(self.conv(x))
        z = torch.nn.functional.conv2d(x, w)
        return torch.softmax(y.flatten(1), 1), z.sum((1, 2)), i + 1, x.to(torch.float64) * 2


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return edge_program(Net(), (torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.arange(4)))


@pytest.fixture(scope="module")
def dynamic() -> ExportedProgram:
    class Dynamic(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x).reshape(x.shape[0] * 2, -1)

    return edge_program(Dynamic(), (torch.randn(4, 6),), dynamic_shapes={"x": {0: Dim("batch", max=64)}})


def answers(support: Any, program: ExportedProgram) -> dict[str, No | None]:
    (scope,) = scopes(program)
    check = make_check(as_support(support), scope)
    return {node.name: check(node) for node in program.graph.nodes if graphs.is_operator(node)}


def refused(support: Any, program: ExportedProgram) -> dict[str, tuple[str, str]]:
    return {name: (no.code, no.text) for name, no in answers(support, program).items() if no is not None}


def test_operators_by_name_overload_and_object(program: ExportedProgram) -> None:
    for given in ("aten.relu.default", "aten.relu", torch.ops.aten.relu.default, exir_ops.edge.aten.relu.default):
        taken = [name for name, no in answers(ops(given), program).items() if no is None]
        assert taken == ["aten_relu_default"], given
    assert refused(ops("aten.relu"), program)["aten_convolution_default"] == (
        "op",
        "aten.convolution.default is not in the supported operators",
    )


def test_dtypes(program: ExportedProgram) -> None:
    said = refused(dtypes(torch.float32), program)
    assert said["aten_add_tensor"][0] == "dtype"
    assert "input i is int64, supported: float32" in said["aten_add_tensor"][1]
    assert "aten_relu_default" not in said


def test_ranks(program: ExportedProgram) -> None:
    said = refused(ranks(3, 4), program)
    assert said["aten__softmax_default"] == ("rank", "input aten_view_copy_default has rank 2, supported: 3 to 4")


def test_static_shapes(program: ExportedProgram, dynamic: ExportedProgram) -> None:
    assert refused(static_shapes(), program) == {}
    said = refused(static_shapes(), dynamic)
    assert said["aten_relu_default"][0] == "dynamic_shape" and "dynamic shape" in said["aten_relu_default"][1]


def test_memory_format() -> None:
    last = edge_program(torch.nn.ReLU(), (torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last),))
    first = edge_program(torch.nn.ReLU(), (torch.randn(1, 3, 4, 4),))
    assert refused(memory_format(torch.channels_last), last) == {}
    assert refused(memory_format(torch.contiguous_format), last)["aten_relu_default"][0] == "memory_format"
    assert "strides [48, 16, 4, 1]" in refused(memory_format(torch.channels_last), first)["aten_relu_default"][1]


def test_constant_weights_are_parameters_and_not_computed(program: ExportedProgram) -> None:
    said = refused(constant_weights("weight"), program)
    assert list(said) == ["aten_convolution_default_1"]
    assert said["aten_convolution_default_1"][1] == (
        "argument weight is computed (w), expected a parameter, buffer or constant"
    )


def test_arguments(program: ExportedProgram, dynamic: ExportedProgram) -> None:
    said = refused(ops("aten.convolution") & argument_values(bias=lambda bias: bias is None), program)
    assert said["aten_convolution_default"][0] == "argument"
    said = refused(argument_values(half_to_float=(True,)), program)
    assert said["aten__softmax_default"] == ("argument", "argument half_to_float=False is not supported, only (True,)")
    said = refused(constant_arguments("size"), dynamic)
    assert said["aten_view_copy_default"][1].startswith("argument size is computed at run time (by ")


def test_in_nested_graphs_a_weight_is_still_a_weight() -> None:
    class Branch(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x, w: x @ w, lambda x, w: x - w, (x, self.weight))

    program = edge_program(Branch(), (torch.randn(4, 4),))
    names = {".".join(scope.path): {node.name for node in scope.constants} for scope in scopes(program)}
    nested = {path: held for path, held in names.items() if path}
    assert len(nested) == 2 and all(len([n for n in held if n]) == 1 for held in nested.values())


def test_composition_and_its_reasons(program: ExportedProgram) -> None:
    composed = ops("aten.relu", "aten.add") & ~dtypes(torch.int64) | ops("aten._softmax")
    taken = [name for name, no in answers(composed, program).items() if no is None]
    assert taken == ["aten_relu_default", "aten__softmax_default"] or "aten_add_tensor" in taken
    said = refused(ops("aten.add") & ~where(lambda n: True) | ops("aten.relu"), program)
    code, text = said["aten_add_tensor"]
    assert code == "denied" and text.startswith("excluded by ~where(")
    assert said["aten__softmax_default"][0] == "op"
    assert str(composed) == "(ops(aten.relu, aten.add) & ~dtypes(int64)) | ops(aten._softmax)"


def test_an_alternative_that_knows_the_operator_says_why(program: ExportedProgram) -> None:
    support = ops("aten.relu") | ops("aten.add") & dtypes(torch.float32)
    assert refused(support, program)["aten_add_tensor"][0] == "dtype"


def test_python_operators_are_refused() -> None:
    with pytest.raises(TypeError, match=r"&, \| and ~"):
        bool(ops("aten.relu") and ops("aten.add"))


def test_torch_fx_supports_say_which_class_said_no(program: ExportedProgram) -> None:
    support = as_support(OpSupports.decline_if_node_in_names({"aten_relu_default"}))
    assert refused(support, program) == {
        "aten_relu_default": (
            "FunctionalOperatorSupport",
            "FunctionalOperatorSupport.is_node_supported returned False",
        )
    }
    both = ops("aten.relu") & create_op_support(lambda modules, node: False)
    assert "is_node_supported returned False" in refused(both, program)["aten_relu_default"][1]


def test_functions_are_supports(program: ExportedProgram) -> None:
    def small(node: Node) -> bool:
        return node.name == "aten_relu_default"

    assert "small returned False" in refused(small, program)["aten_add_tensor"][1]
    assert refused(where(small, "too large", code="size"), program)["aten_add_tensor"] == ("size", "too large")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("aten.relux.default", "Did you mean 'aten.relu.default'"),
        ("aten.ad.Tensor", "aten.add.Tensor"),
        ("relu", "aten.relu"),
        ("aten.", "does not exist"),
    ],
)
def test_an_operator_that_does_not_exist(given: str, said: str) -> None:
    with pytest.raises(InputError, match="does not exist") as error:
        ops(given)
    assert said in str(error.value)


def test_operators_of_libraries_that_are_not_loaded_are_taken() -> None:
    assert str(ops("somebodys_library.thing.default")) == "ops(somebodys_library.thing.default)"


@pytest.mark.parametrize("given", [None, 3, "aten.add.Tensor", [ops("aten.add")]])
def test_what_is_no_support(given: Any) -> None:
    with pytest.raises(InputError, match="A support was expected"):
        as_support(given)


def test_a_support_that_answers_something_else(program: ExportedProgram) -> None:
    class Wrong(Support):
        def bind(self, scope: Any) -> Any:
            return lambda node: False

    with pytest.raises(PartitionerContractError, match=r"answered False for node .*expected None for yes, or a No"):
        answers(Wrong(), program)


def test_a_support_that_raises_names_node_operator_and_line(program: ExportedProgram) -> None:
    def broken(node: Node) -> bool:
        return bool(node.meta["nothing"])

    with pytest.raises(PartitionerContractError) as error:
        SupportPartitioner({"echo": ops("aten.relu") & broken})(program)
    assert "broken" in str(error.value) and "KeyError" in str(error.value)
    assert "aten_relu_default" in str(error.value) and "test_support.py" in str(error.value)


def test_everything(program: ExportedProgram) -> None:
    assert refused(everything(), program) == {}


@pytest.mark.parametrize("answer", [None, 1, "", (), torch.ones(1)], ids=["None", "1", "no text", "()", "tensor"])
def test_a_function_that_answers_something_else(answer: Any, program: ExportedProgram) -> None:
    words = r"Support where\(.*\) answered .* for node aten_\w+ \(aten\..*\), .*expected True, False, or why not"
    with pytest.raises(PartitionerContractError, match=words):
        answers(where(lambda node: answer), program)


def test_a_function_may_say_why_not(program: ExportedProgram) -> None:
    no = No("mood", "not today", "me")
    assert set(answers(where(lambda node: no), program).values()) == {no}
    texts = {found and (found.code, found.text) for found in answers(where(lambda node: "too odd"), program).values()}
    assert texts == {("custom", "too odd")}
    partitioner = SupportPartitioner({"Npu": lambda node: no})
    assert {one.reason for one in partitioner(program).rejections} == {"not today"}
