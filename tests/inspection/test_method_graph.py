"""The graph of a method: what flows between its instructions, and the picture of that on the page of a report."""

from __future__ import annotations

import struct
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from browser import browser, needs_browser
from executorch.exir._serialize._program import PTEFile, deserialize_pte_binary, serialize_pte_binary
from executorch.exir.schema import Bool, EValue, Instruction, JumpFalseCall, MoveCall
from pte_files import Net, made
from selenium.webdriver.common.by import By
from torch import nn

from exir_lowering import FileReport, InputError, inspect, load, lower
from exir_lowering.inspection import page
from exir_lowering.inspection.reading import Modules
from exir_lowering.inspection.report import Call, Flow, MethodReport
from exir_lowering.plans.picture import MOST_BOXES
from exir_lowering.pte.debug_info import MethodDebug
from exir_lowering.pte.instructions import DELEGATE


class Deep(nn.Module):
    """A delegate for each layer, with a host operator after it."""

    def __init__(self, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).cumsum(1)
        return x


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


@cache
def deep(layers: int) -> FileReport:
    return report(Deep(layers), (1, 4), "xnnpack")


@cache
def method(name: str) -> MethodReport:
    return inspect(made(name).pte).methods[-1]


def shown(method: MethodReport) -> list[tuple[str, str, str]]:
    return [(box.title, box.operators, box.where) for box in page.draw(method)[0]]


def test_a_branch_and_state() -> None:
    (found,) = report(Branch(), (1, 4)).methods
    names = [call.name.removeprefix("aten::").partition(".")[0] for call in found.calls]
    flows = {(names[flow.source], names[flow.target]) for flow in found.flows if flow.bytes}
    assert {("exp", "move"), ("sin", "move"), ("move", "cat"), ("cat", "cumsum")} <= flows
    assert ("exp", "sin") not in flows and ("exp", "cat") not in flows
    used = {names[call.number]: (call.reads, call.writes) for call in found.calls if call.reads or call.writes}
    assert used == {"add": (("count",), ()), "copy_": ((), ("count",))}
    assert shown(found)[0][2] == "host; reads and writes count"


@pytest.mark.parametrize("name", ["delegates", "theirs delegates"])
def test_boxes_are_delegates_and_what_is_between_them(name: str) -> None:
    found = method(name)
    boxes = shown(found)
    assert [where for *_, where in boxes].count("XnnpackBackend") == len(found.delegates)
    titles = [title for title, *_ in boxes]
    if name == "delegates":  # it has the names of the weights
        assert titles == ["conv … linear", "instruction 1", "head"] and boxes[1][1] == "cumsum"
    else:
        assert titles == ["delegate 0", "instruction 1", "delegate 1", "instruction 3", "delegate 2"]
    assert [(flow.source, flow.target) for flow in found.flows] == [(i, i + 1) for i in range(len(found.calls) - 1)]
    assert all(flow.bytes for flow in found.flows)


@pytest.mark.parametrize("layers", [3, 30])
def test_repeated_layers_are_one_box(layers: int) -> None:
    (found,) = deep(layers).methods
    expected = f"{layers} x layers.0-{layers - 1}", "each FullyConnected, cumsum"
    assert shown(found) == [(*expected, f"{layers} x XnnpackBackend, {layers} x host")]


def test_modules_of_the_debug_information_beside_the_file(tmp_path: Path) -> None:
    program = torch.export.export(Net().eval(), (torch.randn(2, 3, 8, 8),))
    artifact, path = lower(program).emit(provenance=False), tmp_path / "model.pte"
    artifact.save(path)
    assert next(title for title, *_ in shown(inspect(path).methods[0])) == "conv"
    path.with_suffix(".debug.json").write_text('{"version": 2')
    with pytest.warns(UserWarning, match="is not used"):
        assert not any(call.modules for call in inspect(path).methods[0].calls if call.name == "aten::cumsum.out")


def test_a_hostile_method_is_drawn_in_time() -> None:
    (found,) = deep(3).methods
    payload = replace(found.delegates[0], operators=found.delegates[0].operators * 10_000)
    calls = tuple(
        Call(i, "delegate", "0 (x)", (0, 1), (".".join("a" * (i % 3000)),), 0)
        if i % 2
        else Call(i, "kernel", f"<b>::\x1b{i}", (0,), (f"{i}.<i>",))
        for i in range(10_000)
    )
    flows = tuple(Flow(i, j, i, 1 << 62) for i in range(9_000) for j in (i + 1, i + 999))
    hostile = replace(found, delegates=(payload,), calls=calls, flows=flows)
    started = time.process_time()
    boxes, _ = page.draw(hostile)
    assert len(boxes) <= MOST_BOXES and time.process_time() - started < 5
    html = replace(deep(3), methods=(hostile,)).to_html()
    assert "<b>::" not in html and "<i>" not in html and "\x1b" not in html


def test_a_file_that_plans_more_memory_than_there_is_can_be_inspected() -> None:
    content, sizes = made("state").pte, method("state").memory.arenas
    # The vector of the sizes of memories: the first is of none.
    old = struct.pack("<Iqq", 2, 0, sizes[0].bytes)
    assert content.count(old) == 1
    content = content.replace(old, struct.pack("<Iqq", 2, 0, 1 << 60))
    assert inspect(content).methods[0].memory.heap["planned memory"] == 1 << 60
    with pytest.raises(InputError, match="plans more memory than"):
        load(content, verify=False)


class Cat(nn.Module):
    def forward(self, x):
        return torch.cat([x, x])


def test_thousands_of_loops_values_and_delegates_take_no_time() -> None:
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    file = deserialize_pte_binary(lower(program, "xnnpack").emit().buffer)
    (plan,) = file.program.execution_plan
    plan.delegates *= 5_000
    first = len(plan.values)
    plan.values += [EValue(Bool(True))] * 5_001
    for number in range(first, first + 5_000):
        made_inside = Instruction(MoveCall(number, number + 1)), Instruction(JumpFalseCall(number + 1, 0))
        plan.chains[0].instructions += made_inside
    plan.chains[0].stacktrace = None
    content = bytes(serialize_pte_binary(PTEFile(file.program, file.mutable_data, file.named_data)))
    before = time.process_time()
    (found,) = inspect(content).methods
    assert len(found.delegates) == 5_000
    assert time.process_time() - before < 6


def test_the_modules_of_a_delegate_that_is_called_often_are_found_once() -> None:
    found = Modules(MethodDebug({}, (), {}), {}, [["a.weight", "a.bias", "b.weight"]])
    calls = [found.find(number, (DELEGATE, 0, ())) for number in range(3)]
    assert calls == [("a", "b"), (), ()]


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, True), (390, False)])
def test_it_fits_the_screen(width: int, dark: bool, tmp_path: Path) -> None:
    reports = {"deep": deep(30), "theirs": inspect(made("theirs delegates").pte), "state": inspect(made("state").pte)}
    with browser(width, dark=dark) as driver:
        for name, found in reports.items():
            path = tmp_path / f"{name}.html"
            path.write_text(found.to_html())
            driver.get(path.as_uri())
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width
            pictures = [one for one in driver.find_elements(By.CSS_SELECTOR, ".picture") if one.is_displayed()]
            boxes = [len(one.find_elements(By.CSS_SELECTOR, ".box")) for one in pictures]
            assert boxes == [len(page.draw(method)[0]) for method in found.methods]
            assert all(one.size["width"] <= width and one.size["height"] > 60 for one in pictures)
            marked = [one for one in pictures if one.find_elements(By.CSS_SELECTOR, "path.state")]
            assert bool(marked) is (name == "state")
