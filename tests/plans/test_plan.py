"""plan: what lower does, before it does it; every operator has a partition or a reason, and the figures are right."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir.backend.canonical_partitioners.pattern_op_partitioner import (
    generate_partitions_from_list_of_nodes,
)
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import WhyNoPartitionReporter
from lowering_support import TagPartitioner, edge_program
from torch.export import Dim, export
from torch.fx.passes.operator_support import OperatorSupportBase

import exir_lowering
from exir_lowering import CoverageError, InputError, LoweringOptions, graphs
from exir_lowering.partitioners import SupportPartitioner, everything, ops


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.erf(self.first(x)))


LINEAR = ops("aten.addmm", "aten.permute_copy")


def the_plan(module: torch.nn.Module, inputs: Any, partitioners: Any, **options: Any) -> Any:
    program = export(module.eval(), inputs)
    (method,) = exir_lowering.plan(program, partitioners, options=LoweringOptions(**options)).methods
    return method


@pytest.fixture(scope="module")
def two_layers() -> Any:
    return the_plan(Model(), (torch.randn(2, 8),), SupportPartitioner({"Npu": LINEAR}))


def test_the_figures_of_a_partition(two_layers: Any) -> None:
    first, second = two_layers.partitions
    assert dict(first.operators) == {"aten.permute_copy.default": 1, "aten.addmm.default": 1}
    assert first.weight_bytes == 4 * (8 * 16 + 16) and second.weight_bytes == 4 * (16 * 4 + 4)
    assert (first.bytes_in, first.bytes_out) == (4 * 2 * 8, 4 * 2 * 16)
    assert (second.bytes_in, second.bytes_out) == (4 * 2 * 16, 4 * 2 * 4)
    assert (first.flops, second.flops) == (2 * 2 * 8 * 16, 2 * 2 * 16 * 4)


def test_the_coverages(two_layers: Any) -> None:
    assert two_layers.coverage == 4 / 5
    assert two_layers.flops_coverage == pytest.approx((512 + 256) / (512 + 256 + 2 * 16))
    assert two_layers.weights_coverage == 1.0
    assert two_layers.weight_bytes == sum(p.weight_bytes for p in two_layers.partitions)


def test_a_host_node_has_its_reason_module_and_line(two_layers: Any) -> None:
    (erf,) = two_layers.host
    assert (erf.node, erf.operator) == ("aten_erf_default", "aten.erf.default")
    assert erf.reasons[0].code == "op" and erf.reasons[0].method == "forward"
    assert 'test_plan.py", line' in erf.source and "in forward: return self.second(torch.erf" in erf.source


def test_a_refused_merge_shows_the_path(two_layers: Any) -> None:
    (refused,) = two_layers.refused_merges
    assert (refused.first, refused.second) == tuple(p.id for p in two_layers.partitions)
    assert refused.path == ("aten_addmm_default", "aten_erf_default", "aten_addmm_default_1")


def test_tied_weights_count_once() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.erf(self.embed(x)))

    method = the_plan(Tied(), (torch.randn(2, 8),), SupportPartitioner({"Npu": ops("aten.mm", "aten.permute_copy")}))
    assert method.weight_bytes == method.delegated_weight_bytes == 4 * 64
    assert [p.weight_bytes for p in method.partitions] == [4 * 64, 4 * 64]


def test_dynamic_shapes_count_with_the_sizes_of_the_example() -> None:
    program = export(Model().eval(), (torch.randn(2, 8),), dynamic_shapes={"x": {0: Dim("n", max=64)}})
    (method,) = exir_lowering.plan(program, SupportPartitioner({"Npu": LINEAR})).methods
    assert [p.flops for p in method.partitions] == [512, 256]


def test_nested_graphs_are_planned_too() -> None:
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x, w: torch.erf(x @ w), lambda x, w: x - w, (x, self.weight))

    method = the_plan(Branches(), (torch.ones(4, 4),), SupportPartitioner({"Npu": ops("aten.mm", "aten.sub")}))
    names = {node.name for node in method.nodes}
    assert {"submodule_0.aten_mm_default", "submodule_0.aten_erf_default", "submodule_1.aten_sub_tensor"} <= names
    assert sorted(p.nodes for p in method.partitions) == [
        ("submodule_0.aten_mm_default",), ("submodule_1.aten_sub_tensor",)
    ]  # fmt: skip
    assert method.partitions[0].weight_bytes == 64
    assert {h.node for h in method.host} >= {"cond", "submodule_0.aten_erf_default"}
    xnnpack = the_plan(Branches(), (torch.ones(4, 4),), "xnnpack")
    reason = next(h.reason for h in xnnpack.host if h.node == "submodule_0.aten_mm_default")
    assert reason == "XnnpackPartitioner looks at the top graph only, and this is in submodule_0"


def test_each_partitioner_gives_a_reason() -> None:
    first, second = SupportPartitioner({"Npu": ops("aten.addmm")}), SupportPartitioner({"Dsp": ops("aten.mul")})
    method = the_plan(Model(), (torch.randn(2, 8),), [first, second])
    erf = next(h for h in method.host if h.operator == "aten.erf.default")
    assert [r.by for r in erf.reasons] == ["ops(aten.addmm)", "ops(aten.mul)"]


def test_without_a_partitioner() -> None:
    method = the_plan(Model(), (torch.randn(2, 8),), None)
    assert not method.partitions and method.coverage == 0.0
    assert {h.reason for h in method.host} == {"the method has no partitioner"}


def test_what_extraction_has_to_leave_has_a_reason() -> None:
    """A tag whose results nobody reads gives nothing to return."""

    class Unread(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._check(x.sum().item() > 0)
            return x + 1

    program = edge_program(Unread(), (torch.ones(4),))
    plan = exir_lowering.plan(program, TagPartitioner(lambda n: "t" if "add" not in n.name else None))
    assert all(node.reasons for node in plan.methods[0].host)


# -- whose reasons -----------------------------------------------------------------------------------------------------


def test_xnnpacks_own_reasons_are_taken_and_the_failing_check_named() -> None:
    class Mixed(torch.nn.Module):
        def forward(self, x: torch.Tensor, i: torch.Tensor) -> Any:
            return torch.erf(x), i + i, x.unsqueeze(0) * 2.0, x.mean(1), torch.nn.functional.gelu(x.double())

    method = the_plan(Mixed(), (torch.randn(2, 3), torch.arange(4)), XnnpackPartitioner(), rewrites="none")
    reasons = {h.operator: h.reason for h in method.host}
    assert reasons["aten.erf.default"] == "XnnpackPartitioner has no configuration for aten.erf.default"
    assert reasons["aten.add.Tensor"] == "invalid dtype (int64[4] -> int64[4])"
    assert reasons["aten.mean.dim"].startswith("mean.dim only supports averaging 4D tensors, got tensor of rank 2")
    assert reasons["aten.unsqueeze_copy.default"].startswith("unsqueeze_copy only supported on the trailing dimension")
    assert all(h.by for h in method.host)


class _Reporting(Partitioner):
    """A partitioner with ExecuTorch's reporter, as Arm's has."""

    def partition(self, exported_program: Any) -> PartitionResult:
        reporter = WhyNoPartitionReporter()
        for node in exported_program.graph.nodes:
            if node.op == "call_function":
                reporter.report_reject(node, "it is a Tuesday.")
        return PartitionResult(exported_program, {})


def test_reasons_of_executorchs_reporter() -> None:
    method = the_plan(Model(), (torch.randn(2, 8),), _Reporting())
    assert all(h.reason.startswith("it is a Tuesday (") and h.reasons[0].code == "check" for h in method.host)
    assert {h.by for h in method.host} == {"_Reporting"}


class _NoErf(OperatorSupportBase):
    def is_node_supported(self, submodules: Any, node: Any) -> bool:
        return node.op == "call_function" and "erf" not in node.name


class _OnTorchFx(Partitioner):
    def partition(self, exported_program: Any) -> PartitionResult:
        found = generate_partitions_from_list_of_nodes(exported_program.graph_module, op_support=_NoErf())
        for partition in found:
            for node in partition.nodes:
                node.meta["delegation_tag"] = f"tag{partition.id}"
        return PartitionResult(exported_program, {f"tag{p.id}": DelegationSpec("Npu", []) for p in found})


def test_torch_fx_supports_are_named() -> None:
    (erf,) = the_plan(Model(), (torch.randn(2, 8),), _OnTorchFx()).host
    assert (erf.reason.partition(" (")[0], erf.by) == ("_NoErf.is_node_supported returned False", "_NoErf")


# -- plan and lower ----------------------------------------------------------------------------------------------------


def test_planning_changes_nothing_and_can_be_repeated() -> None:
    program = edge_program(Model(), (torch.randn(2, 8),))
    before = [(n.name, str(n.target), dict(n.meta)) for n in program.graph.nodes]
    first = exir_lowering.plan(program, XnnpackPartitioner())
    assert [(n.name, str(n.target), dict(n.meta)) for n in program.graph.nodes] == before
    assert exir_lowering.plan(program, XnnpackPartitioner()) == first


def test_several_methods_and_text_and_json() -> None:
    program = export(Model().eval(), (torch.randn(2, 8),))
    plan = exir_lowering.plan({"a": program, "b": program}, {"a": SupportPartitioner({"Npu": LINEAR})})
    assert [m.name for m in plan.methods] == ["a", "b"] and plan.methods[1].coverage == 0.0
    text = str(plan)
    for expected in ("aten.erf.default", "the method has no partitioner", "80.0"):
        assert expected in text, text
    data = json.loads(plan.to_json())
    assert data["methods"][0]["host"][0]["reasons"][0]["code"] == "op"


# -- what is required --------------------------------------------------------------------------------------------------


def test_required_coverage_lists_what_is_missing() -> None:
    program = export(Model().eval(), (torch.randn(2, 8),))
    partitioner = SupportPartitioner({"echo": LINEAR})
    assert exir_lowering.plan(program, partitioner, options=LoweringOptions(require_coverage=0.8))
    for options in (LoweringOptions(require_coverage=0.9), LoweringOptions(require_coverage=1.0)):
        for call in (exir_lowering.plan, exir_lowering.lower):
            with pytest.raises(CoverageError) as error:
                call(program, partitioner, options=options)
            said = str(error.value)
            assert "Method 'forward': 4 of 5 operators are delegated (80.0%), required:" in said
            assert "1 x aten.erf.default: aten.erf.default is not in the supported operators at File" in said
            assert error.value.plan.methods[0].host
    full = SupportPartitioner({"echo": everything()})
    assert exir_lowering.lower(program, full, options=LoweringOptions(require_coverage=1.0))


def test_no_backend_is_called_when_too_little_would_be_delegated() -> None:
    class Counting(exir_lowering.Backend):
        backend_id = "Counting"
        calls = 0

        def preprocess(self, program: Any, compile_specs: Any) -> Any:
            Counting.calls += 1
            return exir_lowering.PreprocessResult(b"")

    program = export(Model().eval(), (torch.randn(2, 8),))
    with pytest.raises(CoverageError):
        exir_lowering.lower(
            program,
            SupportPartitioner({"Counting": LINEAR}),
            backends={"Counting": Counting()},
            options=LoweringOptions(require_coverage=1.0),
        )
    assert Counting.calls == 0


@pytest.mark.parametrize("share", [-0.1, 1.5, "all", True, None])
def test_bad_requirements(share: Any) -> None:
    with pytest.raises(InputError, match=r"require_coverage=.*share between 0 and 1"):
        LoweringOptions(require_coverage=share)


def test_every_operator_is_in_a_partition_or_on_the_host(two_layers: Any) -> None:
    claimed = [name for p in two_layers.partitions for name in p.nodes]
    assert sorted([*claimed, *(h.node for h in two_layers.host)]) == sorted(n.name for n in two_layers.nodes)
    program = edge_program(Model(), (torch.randn(2, 8),))
    assert [n.name for n in two_layers.nodes] == [n.name for n in program.graph.nodes if graphs.is_operator(n)]
