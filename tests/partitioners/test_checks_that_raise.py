"""A check of an operator that raises: the reason why it stays on the host, or an error with the lines of both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.config.gemm_configs import LinearConfig
from executorch.backends.xnnpack.partition.config.generic_node_configs import SigmoidConfig
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.backend.canonical_partitioners.pattern_op_partitioner import (
    generate_partitions_from_list_of_nodes,
)
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from lowering_support import delegates
from torch.fx.passes.operator_support import OperatorSupportBase

import exir_lowering
from exir_lowering import LoweringOptions, PartitionerContractError, load, lower, plan
from exir_lowering.partitioners import ChainedPartitioner, Pattern, PatternSupport, SupportPartitioner, ops
from exir_lowering.partitioners.drop_in import convex_proposals

STRICT = LoweringOptions(on_backend_error="raise")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.linear(x)) * 2 + torch.sigmoid(x)


MODEL, VALUE = Model().eval(), torch.randn(3, 8)
PROGRAM = torch.export.export(MODEL, (VALUE,))


def broken(*args: Any) -> bool:
    raise ValueError("no table for it")


class VisitorSupport(OperatorSupportBase):
    """Asks a table of visitors, as that of QNN does, and has a defect in one of them."""

    def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
        return node.op == "call_function" and ("sigmoid" not in node.name or broken(node))


class VisitorPartitioner(Partitioner):
    def __init__(self) -> None:
        super().__init__()
        self.support = VisitorSupport()

    def partition(self, exported_program: Any) -> PartitionResult:
        proposed = generate_partitions_from_list_of_nodes(exported_program.graph_module, op_support=self.support)
        for one in proposed:
            for node in one.nodes:
                node.meta["delegation_tag"] = f"tag{one.id}"
        return PartitionResult(exported_program, {f"tag{one.id}": DelegationSpec("reference", []) for one in proposed})


def xnnpack() -> Partitioner:
    partitioner = XnnpackPartitioner()
    config = next(one for one in partitioner.target_partitioner_configs.values() if isinstance(one, SigmoidConfig))
    config.check_constraints = broken
    return partitioner


def gate(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x)


def matched() -> Partitioner:
    pattern = Pattern(gate, example_inputs=(torch.ones(2),), name="gate", check=broken)
    return SupportPartitioner({"reference": ops("aten.mul", "aten.add") | PatternSupport(pattern)})


def said_where(node: torch.fx.Node) -> bool:
    return broken() if "sigmoid" in node.name else True


PARTITIONERS: dict[str, tuple[Callable[[], Partitioner], str]] = {
    "xnnpack": (xnnpack, "SigmoidConfig.check_constraints"),
    "visitors": (VisitorPartitioner, "VisitorSupport.is_node_supported"),
    "function": (lambda: SupportPartitioner({"reference": said_where}), "Support where(said_where)"),
    "torch.fx": (lambda: SupportPartitioner({"reference": VisitorSupport()}), "Support VisitorSupport"),
    "pattern": (matched, "The check of pattern gate"),
    "chained": (lambda: ChainedPartitioner(xnnpack(), VisitorPartitioner()), "SigmoidConfig.check_constraints"),
}


@pytest.mark.parametrize("kind", PARTITIONERS)
def test_the_exception_is_the_reason_and_the_rest_is_delegated(kind: str) -> None:
    make, check = PARTITIONERS[kind]
    planned = plan(PROGRAM, make()).methods[0]
    reasons = [one.reason for one in planned.host if one.operator == "aten.sigmoid.default"]
    assert len(reasons) == 2 and planned.partitions
    for reason in reasons:
        assert f'{check} raised ValueError: no table for it, at File "{__file__}", line ' in reason


@pytest.mark.parametrize("kind", PARTITIONERS)
def test_with_raise_it_is_an_error_with_both_lines(kind: str) -> None:
    make, check = PARTITIONERS[kind]
    with pytest.raises(PartitionerContractError) as caught:
        plan(PROGRAM, make(), options=STRICT)
    text = str(caught.value)
    assert text.startswith(f"Partitioner {type(make()).__name__} on method 'forward': ")
    assert f"{check} raised ValueError: no table for it for node aten_sigmoid_default" in text
    assert "return torch.sigmoid(self.linear(x))" in text and f'raised at File "{__file__}"' in text
    assert caught.value.violation == "raised"


def test_the_file_is_right_and_other_partitioners_get_what_is_left() -> None:
    lowered = lower(PROGRAM, [xnnpack(), SupportPartitioner({"reference": ops("aten.sigmoid")})])
    assert {one.backend_id for one in lowered.report.methods[0].partitions} == {"XnnpackBackend", "reference"}
    assert not lowered.report.methods[0].host
    lowered = lower(PROGRAM, xnnpack())
    (got,) = load(lowered.emit().buffer).run("forward", VALUE)
    torch.testing.assert_close(got, MODEL(VALUE))
    assert len(delegates(lowered["forward"])) >= 1


def test_proposals_in_linear_time_do_the_same() -> None:
    with convex_proposals():
        planned = plan(PROGRAM, VisitorPartitioner()).methods[0]
        with pytest.raises(PartitionerContractError, match="no table for it for node aten_sigmoid_default"):
            plan(PROGRAM, VisitorPartitioner(), options=STRICT)
    assert "VisitorSupport.is_node_supported raised ValueError" in planned.host[0].reason


@pytest.mark.parametrize("fast", [True, False])
def test_what_is_asked_before_the_conversion(fast: bool) -> None:
    partitioner = XnnpackPartitioner()
    config = next(one for one in partitioner.target_partitioner_configs.values() if isinstance(one, LinearConfig))
    config.check_constraints = broken
    (planned,) = plan(PROGRAM, partitioner, options=LoweringOptions(fast=fast)).methods
    assert "aten.addmm.default" in {node.operator for node in planned.nodes}
    (change,) = planned.adjustments
    assert change.kind == "decomposed" and change.nodes == ("linear",)
    assert "raised ValueError: no table for it" in change.reason and "self.linear(x)" in change.reason
    with pytest.raises(PartitionerContractError, match=r"for node linear \(aten.linear.default\)"):
        plan(PROGRAM, partitioner, options=LoweringOptions(fast=fast, on_backend_error="raise"))


@pytest.mark.parametrize("error", [MemoryError("full"), KeyboardInterrupt()], ids=["memory", "interrupt"])
def test_what_is_no_answer_passes_through(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> bool:
        raise error

    partitioner = VisitorPartitioner()
    monkeypatch.setattr(partitioner.support, "is_node_supported", interrupted)
    with pytest.raises(type(error)) as caught:
        plan(PROGRAM, partitioner)
    assert caught.value is error


@pytest.mark.parametrize("fast", [True, False])
def test_what_is_asked_before_the_conversion_and_is_no_check_of_a_node(fast: bool) -> None:
    class Broken(XnnpackPartitioner):
        def ops_to_not_decompose(self, ep: Any) -> Any:
            broken()

    expected = rf"'forward' to Edge dialect: Broken.ops_to_not_decompose raised ValueError.*\n  raised at .*{__file__}"
    with pytest.raises(PartitionerContractError, match=expected):
        plan(PROGRAM, Broken(), options=LoweringOptions(fast=fast))


def test_what_is_no_check_of_a_node_stays_an_error() -> None:
    class Broken(VisitorPartitioner):
        def partition(self, exported_program: Any) -> PartitionResult:
            super().partition(exported_program)
            raise ValueError("no license")

    with pytest.raises(PartitionerContractError, match="Broken on method 'forward' raised ValueError: no license"):
        plan(PROGRAM, Broken())


def test_in_a_script_of_executorch() -> None:
    from executorch.exir import to_edge_transform_and_lower

    from exir_lowering.compat import patch_executorch

    with patch_executorch():
        buffer = to_edge_transform_and_lower(PROGRAM, partitioner=[xnnpack()]).to_executorch().buffer
    (got,) = exir_lowering.load(buffer).run("forward", VALUE)
    torch.testing.assert_close(got, MODEL(VALUE))
