"""ChainedPartitioner: the first claim wins, what is not available is skipped, and the plan says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from lowering_support import NoopBackend, TagPartitioner, by_operator
from torch.export import ExportedProgram, export

import exir_lowering
from exir_lowering import InputError, PartitionerContractError
from exir_lowering.partitioners import ChainedPartitioner, SupportPartitioner, everything, ops


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.erf(torch.sigmoid(self.linear(x)) + x)


MODEL, VALUE = Model().eval(), torch.randn(2, 8)


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return export(MODEL, (VALUE,))


def homes(plan: Any) -> dict[str, str | None]:
    backends = {p.id: p.backend_id for p in plan.methods[0].partitions}
    return {n.operator: backends.get(n.partition) for n in plan.methods[0].nodes}


def test_the_first_claim_wins(program: ExportedProgram) -> None:
    first = SupportPartitioner({"echo": ops("aten.sigmoid")})
    lowered = exir_lowering.lower(program, ChainedPartitioner(first, XnnpackPartitioner()))
    assert homes(lowered.report) == {
        "aten.linear.default": "XnnpackBackend",
        "aten.sigmoid.default": "echo",
        "aten.add.Tensor": "XnnpackBackend",
        "aten.erf.default": None,
    }
    torch.testing.assert_close(lowered["forward"].module()(VALUE), MODEL(VALUE))
    (erf,) = lowered.report.methods[0].host
    assert "not in the supported operators" in erf.reason and "XnnpackPartitioner has no configuration" in erf.reason


def test_as_a_list_of_partitioners(program: ExportedProgram) -> None:
    """The same claims as with the engine's own sequence, where the partitioners do not depend on each other."""
    whole = [torch.ops.aten.linear.default]
    one, two = SupportPartitioner({"echo": ops("aten.sigmoid", "aten.linear")}, keep_whole=whole), XnnpackPartitioner()
    assert homes(exir_lowering.plan(program, ChainedPartitioner(one, two))) == homes(
        exir_lowering.plan(program, [one, two])
    )


def test_a_backend_that_is_not_available_is_passed_over(program: ExportedProgram) -> None:
    chain = ChainedPartitioner(SupportPartitioner({"Npu": everything()}), SupportPartitioner({"echo": ops("aten.add")}))
    lowered = exir_lowering.lower(program, chain)
    (method,) = lowered.report.methods
    assert {p.backend_id for p in method.partitions} == {"echo"}
    (skipped,) = method.adjustments
    assert skipped.kind == "skipped" and "'Npu' is skipped: Backend 'Npu' was not found" in skipped.reason
    assert len(skipped.nodes) == len(method.nodes)
    assert all("would take it for Npu, which is not available here" in node.reason for node in method.host)


def test_backends_of_the_call_are_available(program: ExportedProgram) -> None:
    backends = {"Npu": NoopBackend()}
    chain = ChainedPartitioner(SupportPartitioner({"Npu": everything()}), backends=backends)
    lowered = exir_lowering.lower(program, chain, backends=backends)
    assert lowered.report.methods[0].coverage == 1.0


def test_a_partitioner_that_is_not_installed_is_passed_over(program: ExportedProgram) -> None:
    plan = exir_lowering.plan(program, ChainedPartitioner("npu", "xnnpack"))
    assert {p.backend_id for p in plan.methods[0].partitions} == {"XnnpackBackend"}
    (skipped,) = plan.methods[0].adjustments
    assert "partitioner 'npu' is skipped" in skipped.reason


def test_constants_go_with_whoever_reads_them(program: ExportedProgram) -> None:
    chain = ChainedPartitioner(SupportPartitioner({"echo": ops("aten.sigmoid")}), XnnpackPartitioner())
    assert not exir_lowering.lower(program, chain)["forward"].state_dict


def test_equal_tags_of_two_partitioners_stay_apart(program: ExportedProgram) -> None:
    chain = ChainedPartitioner(
        TagPartitioner(by_operator("aten.sigmoid.default")),
        TagPartitioner(by_operator("aten.erf.default"), "other"),
        backends={"other": NoopBackend()},
    )
    (method,) = exir_lowering.plan(program, chain).methods
    assert [(p.backend_id, p.nodes) for p in method.partitions] == [
        ("echo", ("aten_sigmoid_default",)),
        ("other", ("aten_erf_default",)),
    ]


def test_what_is_wrong_with_a_partitioner_that_is_there_is_an_error(program: ExportedProgram) -> None:
    class Broken(TagPartitioner):
        def partition(self, exported_program: ExportedProgram) -> Any:
            raise KeyError("alpha")

    with pytest.raises(PartitionerContractError, match="raised KeyError"):
        exir_lowering.plan(program, ChainedPartitioner(Broken(), "xnnpack"))

    class Nothing(TagPartitioner):
        def partition(self, exported_program: ExportedProgram) -> Any:
            return None

    with pytest.raises(PartitionerContractError, match="Nothing returned NoneType, expected a PartitionResult"):
        exir_lowering.plan(program, ChainedPartitioner(Nothing()))


@pytest.mark.parametrize("given", [(), (3,), (XnnpackPartitioner,)])
def test_bad_arguments(given: Any) -> None:
    with pytest.raises(InputError):
        ChainedPartitioner(*given)
