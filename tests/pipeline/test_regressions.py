"""Programs that once went wrong, each as small as it gets."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from lowering_support import TagPartitioner, by_operator, delegates, edge_program, placeholders
from torch import nn
from torch.export import ExportedProgram

from exir_lowering import (
    Backend,
    CompileSpec,
    InputError,
    PreprocessResult,
    load,
    lower,
    lower_whole_program,
    to_backend,
)


class CopyNames(nn.Module):
    """The relu stays on the host, so `w` is copied for the adds, and ExecuTorch calls that copy `p_w_copy_0`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        self.w_copy_0 = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * self.w) + self.w + self.w_copy_0


def test_a_parameter_may_have_the_name_of_another_ones_copy() -> None:
    module, x = CopyNames(), torch.randn(3)
    lowered = lower(edge_program(module, (x,)), TagPartitioner(by_operator("aten.add.Tensor")))["forward"]
    (delegate,) = delegates(lowered)
    signature = delegate.original_module.graph_signature
    assert signature.inputs_to_parameters == {"p_w_copy_0": "w", "p_w_copy_1": "w_copy_0"}
    assert placeholders(delegate.original_module.graph_module)[:2] == ["p_w_copy_0", "p_w_copy_1"]
    torch.testing.assert_close(lowered.module()(x), module(x))


class Unary(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def branching(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))


def test_a_method_may_be_called_like_the_branch_of_another_one() -> None:
    """Their partitions had the same ids, and the branch got the method's payload."""
    x = torch.ones(3)
    programs = {
        "forward": edge_program(Unary(branching), (x,)),
        "forward.submodule_0": edge_program(Unary(torch.tan), (x,)),
    }
    tags = by_operator("aten.sin.default", "aten.cos.default", "aten.tan.default")
    lowered = to_backend(programs, TagPartitioner(tags))
    for value in (x, -x):
        torch.testing.assert_close(lowered["forward"].module()(value), branching(value))
        torch.testing.assert_close(lowered["forward.submodule_0"].module()(value), torch.tan(value))
    with pytest.raises(InputError, match="slash"):
        to_backend({"a/b": programs["forward"]}, None)


class Renames(Backend):
    """Renames an input in the signature that it was given, which is its own to change."""

    backend_id = "renames"

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        program.graph_signature.replace_all_uses(program.graph_signature.input_specs[0].arg.name, "renamed")
        return PreprocessResult(b"")


def test_a_backend_may_change_the_signature_it_is_given() -> None:
    program = edge_program(Unary(torch.tan), (torch.ones(3),))
    lower_whole_program(program, "renames", backends={"renames": Renames})
    lowered = to_backend(program, TagPartitioner(backend="renames"), backends={"renames": Renames})["forward"]
    program.validate()
    lowered.validate()
    assert [spec.arg.name for spec in program.graph_signature.input_specs] == ["x"]
    assert [d.original_module.graph_signature.input_specs[0].arg.name for d in delegates(lowered)] == ["x"]


def test_old_tags_do_not_stay_on_a_method_without_partitioner() -> None:
    program = edge_program(Unary(torch.tan), (torch.ones(3),))
    for node in program.graph.nodes:
        node.meta["delegation_tag"] = "old"
    lowered = to_backend(program, None)["forward"]
    assert not [node for node in lowered.graph.nodes if "delegation_tag" in node.meta]


class _Pair(NamedTuple):
    """A type that pytree cannot write into a file."""

    largest: Any
    rest: torch.Tensor


def test_what_files_have_no_name_for_is_a_tuple_there() -> None:
    """ExecuTorch's emitter fails: "No registered serialization name for <class 'torch.return_types.topk'>"."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, given: Any) -> _Pair:
            return _Pair(torch.topk(x, 2), given.values + 1)

    model, x = Model(), torch.randn(3, 4)
    inputs = (x, torch.topk(x, 3))
    program = torch.export.export(model, inputs)
    lowered = lower(program)
    results = load(lowered.emit().buffer).run("forward", x, *inputs[1])
    expected = model(*inputs)
    torch.testing.assert_close(results, [*expected.largest, expected.rest])
    for module in (program.module(), lowered.module()):
        assert type(module(*inputs).largest) is torch.return_types.topk
