"""Rules on top of any partitioner: allow, deny, pin; ExecuTorch's own stays whole around what is kept from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from lowering_support import TagPartitioner, by_operator
from torch.export import ExportedProgram, export

import exir_lowering
from exir_lowering import CompileSpec, InputError, LoweringPlan
from exir_lowering.partitioners import RuledPartitioner, SupportPartitioner, allow, deny, ops, pin


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.linear(self.norm(x))) * x


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


MODEL, VALUE = Model().eval(), torch.randn(2, 8)


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return export(MODEL, (VALUE,))


def plan(program: ExportedProgram, partitioner: Any, *rules: Any) -> LoweringPlan:
    return exir_lowering.plan(program, RuledPartitioner(partitioner, *rules))


def on_host(plan: LoweringPlan) -> dict[str, str]:
    return {node.node: node.reason for node in plan.methods[0].host}


def test_without_rules_nothing_changes(program: ExportedProgram) -> None:
    with_none = plan(program, XnnpackPartitioner())
    alone = exir_lowering.plan(program, XnnpackPartitioner())
    assert with_none.methods[0].partitions == alone.methods[0].partitions
    assert [(n.node, n.reason) for n in with_none.methods[0].host] == [
        (n.node, n.reason) for n in alone.methods[0].host
    ]


@pytest.mark.parametrize("name", ["aten.sigmoid.default", "aten.sigmoid", "aten.sig*"])
def test_deny_an_operator(program: ExportedProgram, name: str) -> None:
    lowered = exir_lowering.lower(program, RuledPartitioner(XnnpackPartitioner(), deny(op=name)))
    host = on_host(lowered.report)
    denied = [node for node in host if "sigmoid" in node]
    assert len(denied) == 3 and all(f"denied by the rule deny(op={name!r}" in host[node] for node in denied)
    (got,) = exir_lowering.load(lowered.emit().buffer).run("forward", VALUE)
    torch.testing.assert_close(got, MODEL(VALUE), atol=1e-5, rtol=1e-5)


def test_deny_an_operator_that_the_partitioner_kept_whole(program: ExportedProgram) -> None:
    """It is decomposed then: the host has no kernel for aten.linear."""
    rule = deny(op="aten.linear", module="layers.1")
    lowered = exir_lowering.lower(program, RuledPartitioner(XnnpackPartitioner(), rule))
    (method,) = lowered.report.methods
    assert sum(p.operators.get("aten.linear.default", 0) for p in method.partitions) == 2
    (got,) = exir_lowering.load(lowered.emit().buffer).run("forward", VALUE)
    torch.testing.assert_close(got, MODEL(VALUE), atol=1e-5, rtol=1e-5)


def test_deny_a_module_by_path_and_by_class(program: ExportedProgram) -> None:
    by_path = plan(program, XnnpackPartitioner(), deny(module="layers.2"))
    assert not any(node.module.startswith("layers.2") for node in _delegated(by_path))
    by_class = plan(program, XnnpackPartitioner(), deny(module_class=Block))
    assert by_class.methods[0].delegated == 0
    by_name = plan(program, XnnpackPartitioner(), deny(module_class="LayerNorm"))
    assert by_name.methods[0].delegated > 0


def _delegated(plan: LoweringPlan) -> list[Any]:
    return [node for node in plan.methods[0].nodes if node.partition is not None]


def test_the_first_rule_that_matches_decides(program: ExportedProgram) -> None:
    rules = [allow(module="layers.0", op="aten.sigmoid"), deny(op="aten.sigmoid")]
    host = on_host(plan(program, XnnpackPartitioner(), *rules))
    assert sorted(node for node in host if "sigmoid" in node) == ["aten_sigmoid_default_1", "aten_sigmoid_default_2"]


def test_allow_joins_the_neighbouring_partitions(program: ExportedProgram) -> None:
    """What the partitioner left between two of its partitions makes them one."""
    support = SupportPartitioner({"echo": ops("aten.linear", "aten.addmm", "aten.permute_copy", "aten.mul")})
    before = exir_lowering.plan(program, support).methods[0]
    after = plan(program, support, allow(op="aten.sigmoid"), allow(op="aten.native_layer_norm")).methods[0]
    assert (len(before.partitions), len(after.partitions)) == (12, 1)  # layer norms on the host become products
    assert after.coverage == 1.0
    lowered = exir_lowering.lower(program, RuledPartitioner(support, allow(module="layers")))
    assert not lowered["forward"].state_dict
    torch.testing.assert_close(lowered["forward"].module()(VALUE), MODEL(VALUE))


def test_pin_to_another_backend_and_to_the_host(program: ExportedProgram) -> None:
    rules = [
        pin("echo", op="aten.sigmoid", compile_specs=[CompileSpec("fast", b"1")]),
        pin("host", module="layers.0"),
    ]
    (method,) = plan(program, XnnpackPartitioner(), *rules).methods
    echo = [p for p in method.partitions if p.backend_id == "echo"]
    assert [p.nodes for p in echo] == [
        ("aten_sigmoid_default",), ("aten_sigmoid_default_1",), ("aten_sigmoid_default_2",)
    ]  # fmt: skip
    assert all(
        not n.module.startswith("layers.0") or n.partition in {p.id for p in echo} for n in _delegated_of(method)
    )


def _delegated_of(method: Any) -> list[Any]:
    return [node for node in method.nodes if node.partition is not None]


def test_a_partitioner_with_several_backends_needs_to_be_told_which() -> None:
    program = export(MODEL, (VALUE,))
    two = SupportPartitioner({"echo": ops("aten.mul"), "other": ops("aten.addmm")})
    with pytest.raises(InputError, match="does not say which backend it means"):
        plan(program, two, allow(op="aten.sigmoid"))
    (method,) = plan(program, two, allow(op="aten.sigmoid", to="other")).methods
    assert {p.backend_id for p in method.partitions if "aten.sigmoid.default" in p.operators} == {"other"}


def test_tags_of_the_partitioner_are_never_split() -> None:
    """A tag around a cycle stays one tag; extraction sees to it, as it does without rules."""

    class Diamond(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = torch.relu(x)
            return torch.relu(a + torch.sin(a)) * torch.cos(x)

    program = export(Diamond().eval(), (torch.ones(4),))
    inner = TagPartitioner(by_operator("aten.relu.default"))
    (method,) = plan(program, inner, allow(op="aten.cos")).methods
    assert sorted(p.nodes for p in method.partitions) == [
        ("aten_cos_default",), ("aten_relu_default",), ("aten_relu_default_1",)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (lambda: deny(module="layers.7"), r"module 'layers.7'.*Did you mean 'layers"),
        (lambda: deny(name="aten_sigmoid_defaul"), r"node 'aten_sigmoid_defaul'.*aten_sigmoid_default"),
        (lambda: deny(module_class="LayerNrm"), r"module class 'LayerNrm'.*'LayerNorm'"),
    ],
)
def test_a_rule_that_names_what_is_not_there(program: ExportedProgram, rule: Any, said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        plan(program, XnnpackPartitioner(), rule())
    assert str(error.value).startswith("Partitioner RuledPartitioner on method 'forward': The rule ")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: deny(op="aten.sigmoidd"), "does not exist. Did you mean 'aten.sigmoid"),
        (lambda: allow(), "matches nothing: give op="),
        (lambda: deny(name=[]), r"deny\(name=\[\]\): expected a name"),
        (lambda: deny(op=3), "expected a name"),
        (lambda: pin("", op="aten.add"), "expected a backend id"),
        (lambda: RuledPartitioner("xnnpack"), "expected an ExecuTorch Partitioner"),
        (lambda: RuledPartitioner(XnnpackPartitioner(), "deny"), "expected a rule made by"),
    ],
)
def test_bad_rules(make: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()


def test_a_preserved_operator_denied_by_its_node_name_stays_whole(program: ExportedProgram) -> None:
    """Its name is not known before decomposition; the runtime has a kernel for it, or it is replaced or refused."""
    name = next(n.name for n in _delegated(exir_lowering.plan(program, XnnpackPartitioner())) if "linear" in n.name)
    lowered = exir_lowering.lower(program, RuledPartitioner(XnnpackPartitioner(), deny(name=name)))
    assert name in on_host(lowered.report)
    (got,) = exir_lowering.load(lowered.emit().buffer).run("forward", VALUE)
    torch.testing.assert_close(got, MODEL(VALUE), atol=1e-5, rtol=1e-5)


def test_nodes_keep_their_operators(program: ExportedProgram) -> None:
    """What was out of the partitioner's sight is itself again, also after an error."""
    from lowering_support import edge_program

    class Broken(TagPartitioner):
        def partition(self, exported_program: ExportedProgram) -> Any:
            raise RuntimeError("broken")

    edge = edge_program(MODEL, (VALUE,))
    before = [str(node.target) for node in edge.graph.nodes]
    RuledPartitioner(XnnpackPartitioner(), deny(op="aten.sigmoid"))(edge)
    assert [str(node.target) for node in edge.graph.nodes] == before
    with pytest.raises(exir_lowering.PartitionerContractError, match="Partitioner Broken raised RuntimeError: broken"):
        RuledPartitioner(Broken(), deny(op="aten.sigmoid"))(edge)
    assert [str(node.target) for node in edge.graph.nodes] == before
