"""PT2E-quantised programs pass through whole: ExecuTorch's XNNPACK int8 recipes, static and dynamic."""

from __future__ import annotations

import warnings
from pathlib import Path

import forked
import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from lowering_support import delegates
from quantized_models import INPUTS, partitioners, quantize, quantized
from torch.export import ExportedProgram

import exir_lowering
from exir_lowering import LoweringOptions
from exir_lowering.partitioners import Rule, RuledPartitioner, deny


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_int8_recipes(dynamic: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = quantized(dynamic)
        ours = exir_lowering.lower(program, partitioners(dynamic))
        theirs = to_edge_transform_and_lower(program, partitioner=partitioners(dynamic)).exported_program()
    mine, other = delegates(ours["forward"]), delegates(theirs)
    assert sorted(d.processed_bytes for d in mine) == sorted(d.processed_bytes for d in other)
    assert len(mine) >= (2 if dynamic else 1)
    host = [node.operator for node in ours.report.methods[0].host]
    assert not [name for name in host if "linear" in name or "addmm" in name or "convolution" in name], host
    (got,) = exir_lowering.load(ours.emit().buffer).run("forward", *INPUTS)
    expected = program.module()(*INPUTS)
    torch.testing.assert_close(got, expected, atol=0.05, rtol=0.05)


AS_IT_IS = LoweringOptions(rewrites="none")


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(256, 256) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


class Attention(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.norm = torch.nn.Linear(256, 256), torch.nn.LayerNorm(256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        weights = torch.softmax(self.first(h) @ self.second(h).transpose(-1, -2) / 4, -1)
        return x + self.out(weights @ self.third(h))


@pytest.mark.parametrize(("model", "shape", "one", "two"), [(Layers, (3, 256), 1, 5), (Attention, (2, 5, 256), 3, 6)])
def test_one_partitioner_is_enough_for_dynamic_quantisation(
    model: type[Layers], shape: tuple[int, ...], one: int, two: int
) -> None:
    """What docs/guides/quantised-models.md says: the same numbers and the same host operators, in fewer partitions."""
    torch.manual_seed(0)
    inputs = (torch.randn(shape),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = quantize(model(), inputs, dynamic=True)
        found = [exir_lowering.lower(program, one, options=AS_IT_IS) for one in ("xnnpack", partitioners(True))]
    assert [len(lowered.report.methods[0].partitions) for lowered in found] == [one, two]
    hosts = [sorted(node.operator for node in lowered.report.methods[0].host) for lowered in found]
    assert hosts[0] == hosts[1]
    first, second = (exir_lowering.load(lowered.emit().buffer).run("forward", *inputs)[0] for lowered in found)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, program.module()(*inputs), atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    "rule",
    [
        deny(module="head"),
        deny(op="aten.linear"),
        deny(op="aten.relu"),
        deny(op="aten.convolution"),
        deny(op="quantized_decomposed.quantize_per_tensor"),
        deny(module_class="Linear"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_rules_leave_the_numbers_alone(dynamic: bool, rule: Rule, programs: dict[bool, ExportedProgram]) -> None:
    """What a rule takes out of a quantised pattern leaves nothing half marked, half delegated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowered = exir_lowering.lower(programs[dynamic], RuledPartitioner(XnnpackPartitioner(), rule))
    assert any("denied by the rule" in node.reason for node in lowered.report.methods[0].host) or dynamic
    (got,) = exir_lowering.load(lowered.emit().buffer).run("forward", *INPUTS)
    torch.testing.assert_close(got, programs[dynamic].module()(*INPUTS), atol=0.05, rtol=0.05)


@pytest.fixture(scope="module")
def programs() -> dict[bool, ExportedProgram]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {dynamic: quantized(dynamic) for dynamic in (False, True)}


EMIT = """
import sys, torch, exir_lowering
from torch.export import export

class Rounded(torch.nn.Module):
    def forward(self, x):
        q = torch.ops.quantized_decomposed.quantize_per_tensor(x, 0.5, 0, -128, 127, torch.int8)
        return torch.ops.quantized_decomposed.dequantize_per_tensor(q, 0.5, 0, -128, 127, torch.int8)

lowered = exir_lowering.lower(export(Rounded(), (torch.ones(3),)), [])
sys.modules["executorch.kernels.quantized"] = None  # as if it was not installed
try:
    lowered.emit()
except exir_lowering.InputError as error:
    print(error)
del sys.modules["executorch.kernels.quantized"]
lowered.emit().save(sys.argv[1])
"""

RUN = """
import sys, torch, exir_lowering
program = exir_lowering.load(sys.argv[1])
print(program.run("forward", torch.tensor([0.6, -0.9, 3.0]))[0].tolist())
"""


def python(script: str, *arguments: str) -> str:
    done = forked.run(script, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_hosts_kernels_are_imported(tmp_path: Path) -> None:
    """Who emits or loads a program with quantized operators on the host imports nothing; each in a fresh process."""
    path = str(tmp_path / "rounded.pte")
    said = python(EMIT, path)
    assert "quantize_per_tensor" in said and "executorch.kernels.quantized" in said and "Install executorch" in said
    assert python(RUN, path).strip() == "[0.5, -1.0, 3.0]"
