"""Real models: equal to eager in ExecuTorch's runtime, and every XNNPACK payload byte-identical to ExecuTorch's own."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from lowering_support import delegates
from models import MODELS, build
from torch.export import ExportedProgram, export

import exir_lowering
from exir_lowering import LoweredMethods


@dataclass(frozen=True)
class Case:
    module: torch.nn.Module
    inputs: tuple[torch.Tensor, ...]
    ours: LoweredMethods
    upstream: ExportedProgram


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> Case:
    module, inputs = build(request.param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = export(module, inputs)
        ours = exir_lowering.lower(program, XnnpackPartitioner())
        upstream = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).exported_program()
    return Case(module, inputs, ours, upstream)


def test_payloads_are_byte_identical_to_upstream(case: Case) -> None:
    ours, theirs = delegates(case.ours["forward"]), delegates(case.upstream)
    assert [d.processed_bytes for d in ours] == [d.processed_bytes for d in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.named_data_store_output == other.named_data_store_output
        assert mine.compile_specs == other.compile_specs


def test_the_host_keeps_what_upstream_keeps(case: Case) -> None:
    def operators(program: ExportedProgram) -> list[str]:
        return sorted(str(n.target) for n in program.graph.nodes if n.op == "call_function")

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
    assert all(node.reason and node.by == "XnnpackPartitioner" for node in method.host)
