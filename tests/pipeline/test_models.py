"""Real models: equal to eager in ExecuTorch's runtime, and every XNNPACK payload byte-identical to ExecuTorch's own."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from lowering_support import delegates
from models import MODELS, exported
from random_dags import contracts
from torch.export import ExportedProgram
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import create_op_support

import exir_lowering
from exir_lowering import LoweredMethods, LoweringOptions
from exir_lowering.graphs import is_operator, operator_name
from exir_lowering.partitioners import propose_partitions
from exir_lowering.steps import arguments
from exir_lowering.steps.edge import to_edge
from exir_lowering.steps.session import Session

AS_IT_IS = LoweringOptions(rewrites="none")
"""What ExecuTorch makes is made of the programs as they are."""


@dataclass(frozen=True)
class Case:
    module: torch.nn.Module
    inputs: tuple[torch.Tensor, ...]
    edge: ExportedProgram
    ours: LoweredMethods
    upstream: ExportedProgram


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> Case:
    module, inputs, program = exported(request.param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Converted once for all that follows; the engine's own conversion, so that the payloads compare it too.
        request = arguments.read_request(program, XnnpackPartitioner())
        (method,) = to_edge(request.methods, Session(LoweringOptions()))
        edge = method.program
        ours = exir_lowering.lower(edge, XnnpackPartitioner(), options=AS_IT_IS)
        upstream = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).exported_program()
    return Case(module, inputs, edge, ours, upstream)


def _replaced(case: Case) -> bool:
    """Return whether layer norms were replaced, whose kernel is wrong for few elements: XNNPACK gets pieces of them."""
    (method,) = case.ours.report.methods
    assert {one.operator for one in method.legalized} <= {"aten.native_layer_norm.default"}
    return bool(method.legalized)


def test_payloads_are_byte_identical_to_upstream(case: Case) -> None:
    if _replaced(case):
        return
    ours, theirs = delegates(case.ours["forward"]), delegates(case.upstream)
    assert [d.processed_bytes for d in ours] == [d.processed_bytes for d in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.named_data_store_output == other.named_data_store_output
        assert mine.compile_specs == other.compile_specs


def test_the_host_keeps_what_upstream_keeps(case: Case) -> None:
    def operators(program: ExportedProgram) -> list[str]:
        return sorted(str(n.target) for n in program.graph.nodes if n.op == "call_function")

    if _replaced(case):
        return
    assert operators(case.ours["forward"]) == operators(case.upstream)
    assert sorted(case.ours["forward"].state_dict) == sorted(case.upstream.state_dict)
    assert sorted(case.ours["forward"].constants) == sorted(case.upstream.constants)


def test_runtime_equals_eager(case: Case) -> None:
    expected = case.module(*case.inputs)
    program = exir_lowering.load(case.ours.emit().buffer)
    (got,) = program.run("forward", *case.inputs)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


def test_lowered_program_is_valid_and_equals_eager(case: Case) -> None:
    case.ours["forward"].validate()
    for delegate in delegates(case.ours["forward"]):
        delegate.original_module.validate()
    got = case.ours["forward"].module()(*case.inputs)
    torch.testing.assert_close(got, case.module(*case.inputs), atol=1e-3, rtol=1e-3)


def test_every_host_operator_has_a_reason(case: Case) -> None:
    (method,) = case.ours.report.methods
    host = [n for n in case.ours["forward"].graph.nodes if n.op == "call_function"]
    host = [n for n in host if "getitem" not in n.name and "executorch_call_delegate" not in n.name]
    assert sorted(node.node for node in method.host) == sorted(n.name for n in host)
    for node in method.host:
        assert [r.by for r in node.reasons] and all(r.code in ("op", "check") for r in node.reasons), node
        assert node.module and 'File "' in node.source and "does not say why" not in node.reason


def test_plan_is_what_lower_does(case: Case) -> None:
    """The same partitions with the same nodes, found again in the lowered program."""
    (planned,) = exir_lowering.plan(case.edge, XnnpackPartitioner(), options=AS_IT_IS).methods
    (reported,) = case.ours.report.methods
    assert planned == reported
    lowered = delegates(case.ours["forward"])
    assert len(lowered) == len(planned.partitions)
    for partition, delegate in zip(planned.partitions, lowered, strict=True):
        nodes = [n.name for n in delegate.original_module.graph.nodes if is_operator(n)]
        assert sorted(nodes) == sorted(partition.nodes)


def test_never_more_partitions_than_torch_fx(case: Case) -> None:
    """For what XNNPACK takes of the model, and for a backend that takes nearly everything."""
    (method,) = case.ours.report.methods
    xnnpack = {node.operator for node in method.nodes if node.partition is not None}
    most = {node.operator for node in method.nodes} - {"aten.expand_copy.default", "aten.embedding.default"}
    for operators in (xnnpack, most):
        support = create_op_support(lambda _, node, taken=operators: is_operator(node) and operator_name(node) in taken)
        arguments = (case.edge.graph_module, support)
        theirs = CapabilityBasedPartitioner(*arguments, allows_single_node_partition=True).propose_partitions()
        ours = propose_partitions(*arguments)
        assert len(ours) <= len(theirs)
        assert contracts(case.edge.graph_module, [proposal.nodes for proposal in ours])
