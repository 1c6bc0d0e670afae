"""The graph of a method: what flows between its instructions, and their modules and state."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from pte_files import Net, made
from torch import nn

from exir_lowering import FileReport, InputError, inspect, load, lower
from exir_lowering.inspection.reading import Modules
from exir_lowering.inspection.report import MethodReport
from exir_lowering.pte.code import DELEGATE
from exir_lowering.pte.debug_info import MethodDebug


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1, 4))

    def forward(self, x):
        self.count.add_(1)
        y = torch.cond(x.sum() > 0, lambda z: z.exp(), lambda z: z.sin(), (x,))
        return torch.cat([y, y.reshape(4).view(1, 4)]).cumsum(0) + self.count


def report(model: nn.Module, shape: tuple[int, ...], partitioner: str | None = None) -> FileReport:
    return inspect(lower(torch.export.export(model.eval(), (torch.ones(shape),)), partitioner).emit().buffer)


def method(name: str) -> MethodReport:
    return inspect(made(name).pte).methods[-1]


def test_a_branch_and_state() -> None:
    (found,) = report(Branch(), (1, 4)).methods
    names = [call.name.removeprefix("aten::").partition(".")[0] for call in found.calls]
    flows = {(names[flow.source], names[flow.target]) for flow in found.flows if flow.bytes}
    assert {("exp", "move"), ("sin", "move"), ("move", "cat"), ("cat", "cumsum")} <= flows
    assert ("exp", "sin") not in flows and ("exp", "cat") not in flows
    used = {names[call.number]: (call.reads, call.writes) for call in found.calls if call.reads or call.writes}
    assert used == {"add": (("count",), ()), "copy_": ((), ("count",))}


@pytest.mark.parametrize("name", ["delegates", "theirs delegates"])
def test_each_instruction_hands_its_result_to_the_next_one(name: str) -> None:
    found = method(name)
    assert [(flow.source, flow.target) for flow in found.flows] == [(i, i + 1) for i in range(len(found.calls) - 1)]
    assert all(flow.bytes for flow in found.flows)
    if name == "delegates":  # it has the names of the weights
        assert [call.modules for call in found.calls if call.delegate is not None] == [("conv", "linear"), ("head",)]


def test_modules_of_the_debug_information_beside_the_file(tmp_path: Path) -> None:
    program = torch.export.export(Net().eval(), (torch.randn(2, 3, 8, 8),))
    artifact, path = lower(program).emit(provenance=False), tmp_path / "model.pte"
    artifact.save(path)
    assert inspect(path).methods[0].calls[0].modules == ("conv",)
    path.with_suffix(".debug.json").write_text('{"version": 2')
    with pytest.warns(UserWarning, match="is not used"):
        assert not any(call.modules for call in inspect(path).methods[0].calls if call.name == "aten::cumsum.out")


def test_a_file_that_plans_more_memory_than_there_is_can_be_inspected() -> None:
    content, sizes = made("state").pte, method("state").memory.arenas
    # The vector of the sizes of memories: the first is of none.
    old = struct.pack("<Iqq", 2, 0, sizes[0].bytes)
    assert content.count(old) == 1
    content = content.replace(old, struct.pack("<Iqq", 2, 0, 1 << 60))
    assert inspect(content).methods[0].memory.heap["planned memory"] == 1 << 60
    with pytest.raises(InputError, match="plans more memory than"):
        load(content, verify=False)


def test_the_modules_of_a_delegate_that_is_called_often_are_found_once() -> None:
    found = Modules(MethodDebug({}, (), {}), {}, [["a.weight", "a.bias", "b.weight"]])
    calls = [found.find(number, (DELEGATE, 0, ())) for number in range(3)]
    assert calls == [("a", "b"), (), ()]
