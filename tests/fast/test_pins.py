"""Upstream code that is not known switches off what depends on it; the results are those of upstream's own code."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import executorch.backends.xnnpack._passes
import executorch.backends.xnnpack.operators.node_visitor  # noqa: F401
import forked
import pytest
import torch
from executorch.exir import EdgeCompileConfig, pass_base
from executorch.exir.passes import dim_order_ops_registry
from torch import nn
from torch.export import Dim, export
from torch.fx.passes.infra.pass_base import PassBase

from exir_lowering import InputError, LoweringOptions, load, lower
from exir_lowering._upstream import pins
from exir_lowering._upstream.pins import FEATURES

PLACES = sorted({place for feature in FEATURES.values() for place in feature.code})
MENDED = ("scalar operands", "empty concatenations")
ASKED_ELSEWHERE = ("linear-time proposals", "lazy inductor import")
"""What only those ask for who want it, and who have not imported torch's compiler."""
SLOW = LoweringOptions(fast=False)


class Net(nn.Module):
    """Operators that passes look at: mixed types, numbers, views, concatenations, an attention, two equal weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.arange(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x)) * 2 + self.count
        z = torch.cat([y, self.second(x).view(-1, 8)], 1)
        scores = torch.softmax(y @ x.transpose(0, 1), -1)
        return torch.maximum(scores @ z, torch.minimum(z, torch.tensor(1))).sum(-1)


@cache
def programs() -> Any:
    rows = Dim("rows", min=2, max=16)
    net = Net().eval()
    return {
        "forward": export(net, (torch.ones(4, 8),)),
        "dynamic": export(net, (torch.ones(4, 8),), dynamic_shapes=({0: rows},)),
    }


def changed(value: Any) -> Any:
    """Return something that does the same as what is pinned, and is something else."""
    if isinstance(value, staticmethod):
        return staticmethod(changed(value.__func__))
    if isinstance(value, property):
        return property(lambda self: value.fget(self))  # type: ignore[misc]
    if isinstance(value, FunctionType) or callable(value):
        return lambda *args, **kwargs: value(*args, **kwargs)
    if isinstance(value, Mapping):
        return {**value, None: None}
    if isinstance(value, (list, tuple)):
        return type(value)([*value, value[-1]])
    return {*value, None} if isinstance(value, (set, frozenset)) else value + "_other"


def change(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change what is at a place; of a class, its first function."""
    module, _, path = place.partition(":")
    if module == "file":
        monkeypatch.setattr(pins, "_read_file", lambda path, read=pins._read_file: read(path) + "# changed")
        return
    *above, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in above:
        owner = getattr(owner, each)
    value = inspect.getattr_static(owner, name)
    if isinstance(value, type):
        owner, name = value, _first_function(value)
        value = vars(owner)[name]
    monkeypatch.setattr(owner, name, changed(value))


def _first_function(kind: type) -> str:
    functions = {
        name: item for name, item in vars(kind).items() if isinstance(item, FunctionType) and name not in pins._OPEN
    }
    return next(name for name, item in functions.items() if not item.__code__.co_filename.startswith("<"))


def files(options: LoweringOptions | None = None) -> tuple[bytes, Any]:
    lowered = lower(programs(), "xnnpack", options=options)
    return lowered.emit().buffer, lowered.report


@pytest.fixture(scope="module")
def slowly() -> bytes:
    """What ExecuTorch's own code makes of the programs."""
    return files(SLOW)[0]


def test_all_are_known(slowly: bytes) -> None:
    assert pins.state() == []
    content, report = files()
    assert content == slowly and report.switched_off == ()


@pytest.mark.parametrize("place", PLACES)
def test_what_was_changed_is_not_known(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change(place, monkeypatch)
    for name, feature in FEATURES.items():
        if place in feature.code:
            assert place in pins.why_off(name) or "differs from the code" in pins.why_off(name)
    monkeypatch.undo()
    assert pins.state() == []


@pytest.mark.parametrize("name", FEATURES)
def test_without_a_feature_upstream_does_it(
    name: str, slowly: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change(next(iter(FEATURES[name].code)), monkeypatch)
    expected = files(SLOW)[0] if name in MENDED else slowly
    monkeypatch.setattr(pins, "_OFF", set())
    monkeypatch.setattr(pins, "_LOGGED", set())
    caplog.clear()
    content, report = files()
    off = [line for line in pins.report_switched_off() if line.startswith(f"{name}: ")]
    assert content == expected
    if name not in ASKED_ELSEWHERE:
        assert len(off) == 1 and FEATURES[name].without in off[0]
        if name not in ("content comparison", "loops in files"):  # emitting asks for them
            assert set(off) <= set(report.switched_off) and f"off: {name}" in report.to_text(width=400)
    logged = [record for record in caplog.records if record.message.startswith(f"Off: {name}: ")]
    assert len(logged) == len(off) and all(record.levelno == logging.WARNING for record in logged)


def test_loops_that_would_not_be_emitted_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loop(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * 2), (torch.tensor(0), x))

    program = export(Loop(), (torch.ones(2),))
    assert load(lower(program).emit().buffer).run("forward", torch.ones(2))[1].tolist() == [8.0, 8.0]
    change("executorch.exir.memory_planning:get_while_nodes", monkeypatch)
    monkeypatch.setattr(pins, "_OFF", set())
    with pytest.raises(InputError, match=r"while_loop \(while_loop\).* calls graphs in a way that files do not have"):
        lower(program)


def test_every_pass_to_edge_dialect_is_known() -> None:
    """A list of passes names them only; each has to be pinned itself."""
    from exir_lowering._upstream import legalizing  # which a child below does without

    classes = {place.partition(":")[2] for place in PLACES}
    passes = legalizing.dialect_passes(EdgeCompileConfig())
    names = set()
    for each in passes:
        cells = [cell.cell_contents for cell in getattr(each, "__closure__", None) or ()]
        names |= {type(one).__name__ for one in (each, *cells) if isinstance(one, PassBase)}
    assert len(names) >= len(passes) - 1 and names <= classes


def test_what_others_kept_is_not_taken(tmp_path: Path) -> None:
    """A number that only our own code keeps: neither way of lowering gets what the other one has kept."""

    class Adds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 0.1

    program = export(Adds(), (torch.zeros(1, dtype=torch.float64),))
    options = LoweringOptions(cache=tmp_path)
    found = []
    for plain in ("1", "", "1", ""):
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("EXIR_LOWERING_PLAIN", plain)
            content = lower(program, options=options).emit().buffer
            found.append(load(content).run("forward", torch.zeros(1, dtype=torch.float64))[0].item())
    assert found[0] == found[2] != found[1] == found[3] == 0.1


def test_what_changes_inside_of_a_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pins.state() == []
    kind = pass_base._ExportPassBase.ExportInterpreter
    original = kind.call_function
    monkeypatch.setattr(kind, "call_function", lambda self, *given: original(self, *given))
    assert "_ExportPassBase differs from the code" in pins.why_off("reused pass results")
    monkeypatch.undo()
    monkeypatch.setitem(dim_order_ops_registry.DimOrderOpsMap, None, None)
    assert "DimOrderOpsMap differs from the code" in pins.why_off("Edge operators by name")
    monkeypatch.undo()
    assert pins.state() == []


def test_what_is_missing_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.fx.traceback.NodeSource")
    assert "NodeSource is missing" in pins.why_off("node histories")


PLAIN = """
import sys
for name in "contents conversion decompose edge_operators fake_results lazy_code lookups xnnpack_passes".split():
    sys.modules[f"exir_lowering.fast.{name}"] = None
sys.path[:0] = sys.argv[1].split(":")
from test_pins import files
from exir_lowering._upstream import pins
content, report = files()
assert len(report.switched_off) == len(pins.FEATURES), report.switched_off
assert all("EXIR_LOWERING_PLAIN is set" in line for line in report.switched_off)
open(sys.argv[2], "wb").write(content)
"""


def test_all_can_be_turned_off(slowly: bytes, tmp_path: Path) -> None:
    """And what may fail to be imported, as names of upstream are gone, is not imported then."""
    folders = f"{Path(__file__).parent}:{Path(forked.__file__).parent}"
    done = forked.run(PLAIN, folders, tmp_path / "plain.pte", env={"EXIR_LOWERING_PLAIN": "1"}, timeout=120, fresh=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plain.pte").read_bytes() == slowly


@pytest.mark.parametrize(
    "names",
    [
        *("lower", "LoweredMethods", "Artifact", "bisect", "testing.check_backend"),
        *("dynamo.lowering.EdgeCompileConfig", "partitioners.SupportPartitioner", "partitioners.RuledPartitioner"),
        "shape_buckets.buckets",
    ],
)
def test_the_compiler_comes_without_inductor_whatever_is_imported_first(names: str) -> None:
    """And what needs no compiler, before it, without that."""
    light = "LoweringOptions, graphs, inspect, load, quantize, verify"
    module, _, name = f"exir_lowering.{names}".rpartition(".")
    code = (
        f"import sys\nfrom exir_lowering import {light}\nassert 'executorch.exir' not in sys.modules\n"
        f"from {module} import {name}\n"
        "assert 'executorch.exir' in sys.modules and 'torch._inductor.fx_passes.post_grad' not in sys.modules"
    )
    done = forked.run(code, fresh=True)
    assert done.returncode == 0, done.stderr


def test_inductor_is_imported_where_a_program_needs_it() -> None:
    """ExecuTorch's compiler imports it for one function, which puts operators back that write their arguments."""
    code = """
import sys, exir_lowering, torch
from torch.export import export

class Cached(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(1, 4, 1, 2))

    def forward(self, x):
        torch.ops.llama.update_cache(x, self.state, 1)
        return self.state * 1

module, x = "torch._inductor.fx_passes.post_grad", torch.ones(1, 1, 1, 2)
lowered = exir_lowering.lower(export(torch.nn.Linear(2, 3), (x,)), "xnnpack")
lowered.emit()
assert lowered.report.switched_off == () and module not in sys.modules
from executorch.extension.llm.custom_ops import custom_ops
(got,) = exir_lowering.load(exir_lowering.lower(export(Cached(), (x,))).emit().buffer).run("forward", x)
assert torch.equal(got, Cached()(x)) and module in sys.modules
"""
    done = forked.run(code, fresh=True)
    assert done.returncode == 0, done.stderr
