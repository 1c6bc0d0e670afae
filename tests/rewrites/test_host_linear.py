"""Products on the host that become linear layers, or products and sums: where, where not, and with equal results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from lowering_support import edge_program
from torch.export import Dim, export

from exir_lowering import LoweringOptions, load, lower, plan
from exir_lowering.graphs import operator_name
from exir_lowering.partitioners import SupportPartitioner, ops
from exir_lowering.pte.releases import known_releases

LINEAR, ADDMM, MM = "aten.linear.default", "aten.addmm.default", "aten.mm.default"


class Apply(torch.nn.Module):
    def __init__(self, function: Callable[..., Any], *weights: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for number, weight in enumerate(weights):
            self.register_buffer(f"weight{number}", weight)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs, *self.buffers())


def operators(program: Any) -> list[str]:
    return [operator_name(node) for node in program.graph.nodes if node.op == "call_function"]


def run(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], *others: tuple[torch.Tensor, ...], **dynamic: Any):
    """Lower for the host, compare with eager on all inputs, and return the operators."""
    program = export(model.eval(), inputs, **dynamic)
    lowered = lower(program, options=WITH_IT)
    loaded = load(lowered.emit().buffer)
    for call in (inputs, *others):
        (got,) = loaded.run("forward", *call)
        torch.testing.assert_close(got, model(*call), equal_nan=True)
    return operators(lowered["forward"])


A, B, C = torch.randn(5, 7), torch.randn(7, 3), torch.randn(3)
WITH_IT = LoweringOptions(rewrites=["safe", "host-linear"])
BATCH = {"dynamic_shapes": ({0: Dim("batch", max=64)},)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 7), (2, 5, 7), (7,)])
def test_a_linear_layer_stays_one(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    found = run(torch.nn.Linear(7, 3, bias=bias, dtype=dtype), (torch.randn(*shape, dtype=dtype),))
    assert LINEAR in found and {ADDMM, MM, "aten.permute_copy.default"}.isdisjoint(found)


def test_any_number_of_rows() -> None:
    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(7, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu()

    found = run(Rows(), (torch.randn(5, 7),), *((torch.randn(rows, 7),) for rows in (2, 17, 64)), **BATCH)
    assert LINEAR in found and ADDMM not in found


def test_infinities_and_nan_are_those_of_eager() -> None:
    x = torch.randn(5, 7)
    x[1, 2], x[2, 3], x[3, 1] = torch.inf, torch.nan, 3e38
    assert run(torch.nn.Linear(7, 3), (torch.randn(5, 7),), (x,)) == [LINEAR]


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], list[str]]] = {
    "a constant that is not transposed": (lambda x, w, c: torch.addmm(c, x, w), (B, C), [MM, "aten.add.Tensor"]),
    "a bias for each element": (lambda x, w, c: torch.addmm(c, x, w), (B, torch.randn(5, 3)), [MM, "aten.add.Tensor"]),
    "one bias": (lambda x, w, c: torch.addmm(c, x, w.mT), (B.mT.clone(), torch.randn(1)), [LINEAR, "aten.add.Tensor"]),
    "a bias per row": (lambda x, w, c: torch.addmm(c, x, w), (B, torch.randn(5, 1)), [MM, "aten.add.Tensor"]),
    "a computed matrix": (lambda x, c: torch.addmm(c, x, torch.exp(x[:3]).t()), (C,), [LINEAR]),
    "beta": (lambda x, w, c: torch.addmm(c, x, w, beta=2), (B, C), [ADDMM]),
    "alpha": (lambda x, w, c: torch.addmm(c, x, w, alpha=0.5), (B, C), [ADDMM]),
    "a product that is not transposed": (lambda x, w: x @ w, (B,), [MM]),
    "no summands": (lambda x, w, c: torch.addmm(c, x[:, :0], w[:0]), (B, C), [ADDMM]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_form(case: str) -> None:
    function, weights, expected = CASES[case]
    found = run(Apply(function, *weights), (A,))
    assert [name for name in found if name in (LINEAR, ADDMM, MM, "aten.add.Tensor")] == expected


class Two(torch.nn.Module):
    """One layer for a backend, and a product of two inputs, which XNNPACK does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        return torch.sigmoid(self.linear(x)), torch.addmm(z, x, y.t())


INPUTS = (A, torch.randn(3, 7), C)


def test_what_a_backend_takes_is_left_to_it() -> None:
    program = export(Two().eval(), INPUTS)
    taking = SupportPartitioner({"reference": ops("aten.addmm", "aten.permute_copy")})
    with_it, without = (lower(program, taking, options=one) for one in (WITH_IT, LoweringOptions(rewrites="none")))
    assert not with_it.report.methods[0].rewritings
    assert with_it.emit().buffer == without.emit().buffer
    lowered = lower(program, XnnpackPartitioner(), options=WITH_IT)
    (done,) = lowered.report.methods[0].rewritings
    assert done.rewrite == "host-linear" and ADDMM in done.operators
    (host,) = [one for one in lowered.report.methods[0].host if one.operator == LINEAR]
    assert "torch.addmm(z, x, y.t())" in host.source
    got = load(lowered.emit().buffer).run("forward", *INPUTS)
    torch.testing.assert_close(list(got), list(program.module()(*INPUTS)))


def test_a_runtime_without_the_kernel_gets_what_it_has(tmp_path: Path) -> None:
    kernels = sorted({*known_releases()["1.5.1"].kernels} - {"aten::linear.out"})
    (tmp_path / "portable.json").write_text(
        json.dumps({"name": "portable", "runtime": "1.5.1", "operators": kernels, "backends": []})
    )
    program = export(torch.nn.Linear(7, 3).eval(), (A,))
    options = replace(WITH_IT, target=tmp_path / "portable.json")
    assert ADDMM in operators(lower(program, options=options)["forward"])


def test_an_edge_program_and_a_plan_are_rewritten_too() -> None:
    edge = edge_program(torch.nn.Linear(7, 3).eval(), (A,))
    assert operators(lower(edge, options=WITH_IT)["forward"]) == [LINEAR]
    assert [one.operator for one in plan(edge, None, options=WITH_IT).methods[0].host] == [LINEAR]
    assert ADDMM in operators(lower(edge, options=LoweringOptions())["forward"])
