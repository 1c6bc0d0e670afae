"""Where the time goes: rows for kernels, delegates and their instructions, with source lines, also in the Inspector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from debug_models import TWO, Branches, Steps, line, lowered
from torch.export import export

import exir_lowering
from exir_lowering import (
    BackendFailure,
    DelegateContext,
    LoadedProgram,
)
from exir_lowering._upstream.runtime import open_program
from exir_lowering.backends.reference import ReferenceDelegate
from exir_lowering.cli import main
from exir_lowering.runtime.native import bridge


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lowered(Steps()).emit().save(tmp_path_factory.mktemp("profile") / "steps.pte")


def rows(program: LoadedProgram, **options: Any) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(row.kind, row.name, row.sources) for row in program.profile("forward", *TWO, **options).rows]


def test_each_instruction_has_its_line(steps: Path) -> None:
    program = exir_lowering.load(steps)
    assert rows(program) == [
        ("method", "forward", ()),
        ("delegate", "delegate 0", (line("first"), line("second"))),
        ("instruction", "aten.mul.Tensor #0", (line("first"),)),
        ("instruction", "aten.add.Tensor #1", (line("second"),)),
        ("kernel", "aten.sin.default", (line("host"),)),
        ("delegate", "delegate 1", (line("difference"), line("last"))),
        ("instruction", "aten.sub.Tensor #0", (line("difference"),)),
        ("instruction", "aten.mul.Tensor #1", (line("last"),)),
    ]
    found = program.profile("forward", *TWO, runs=3)
    assert found.runs == 3 and {row.calls for row in found.rows} == {3}
    whole = found.rows[0].milliseconds
    outer = [row for row in found.rows if row.kind in ("kernel", "delegate")]
    assert 0 < sum(row.milliseconds for row in outer) <= whole and found.rows[0].share == 1
    assert {row.backend for row in found.rows if row.kind in ("delegate", "instruction")} == {"reference"}
    tree = json.loads(found.to_json())
    assert tree["version"] == 1 and len(tree["rows"]) == len(found.rows)
    text = found.to_text(100)
    assert "delegate 0 (reference)" in text and max(map(len, text.splitlines())) <= 100


def test_without_debug_information_the_rows_still_come(steps: Path) -> None:
    found = exir_lowering.load(steps.read_bytes()).profile("forward", *TWO)
    assert [row.kind for row in found.rows].count("instruction") == 4
    assert {row.sources for row in found.rows} == {()}
    assert [row.backend for row in found.rows if row.kind == "delegate"] == ["reference"] * 2


def test_nested_graphs(tmp_path: Path) -> None:
    program = exir_lowering.load(lowered(Branches()).emit().save(tmp_path / "cond.pte"))
    taken = rows(program)
    names = [name for kind, name, _ in taken if kind == "instruction"]
    assert names == ["aten.mul.Tensor #0", "aten.mul.Tensor #0", "aten.add.Tensor #1", "aten.add.Tensor #0"]
    assert ("kernel", "aten.sin.default", (line("cond"),)) in taken
    other = [row.name for row in program.profile("forward", TWO[0], -TWO[1]).rows if row.kind == "instruction"]
    assert other == ["aten.mul.Tensor #0", "aten.sub.Tensor #0", "aten.add.Tensor #0"]


class Nested(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = torch.cond(x.sum() > 0, lambda a: (a * 2).sin(), lambda a: a - 1, (x,))
        return (first + y).exp()


def test_an_instruction_stands_before_those_that_it_includes() -> None:
    content = exir_lowering.lower(export(Nested(), TWO), "reference").emit().buffer
    found = exir_lowering.load(content).profile("forward", *TWO, runs=2)
    inner = [row for row in found.rows if row.kind == "instruction"]
    names = [row.name for row in inner]
    outer = next(row for row in inner if "cond" in row.name)
    within = [row for row in inner if "sin" in row.name or "mul" in row.name]
    assert len(within) == 2 and all(inner.index(row) > inner.index(outer) for row in within), names
    assert outer.milliseconds >= sum(row.milliseconds for row in within)
    assert "exp" in names[-1]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Any, ...]]:
    _, inputs, program = models.exported("bert")
    artifact = exir_lowering.lower(program, ["xnnpack", "reference"]).emit()
    return artifact.save(tmp_path_factory.mktemp("bert") / "bert.pte"), inputs


def test_a_mixed_model(mixed: tuple[Path, tuple[Any, ...]]) -> None:
    path, inputs = mixed
    program = exir_lowering.load(path)
    before = program.run("forward", *inputs)
    found = program.profile("forward", *inputs)
    delegated = [row for row in found.rows if row.kind == "delegate"]
    assert {row.backend for row in delegated} == {"XnnpackBackend", "reference"}
    assert all(row.sources for row in delegated)
    inner = [row for row in found.rows if row.kind == "instruction" and row.backend == "reference"]
    assert inner and all(row.handles for row in inner)
    assert sum(bool(row.sources) for row in inner) > 0.9 * len(inner)
    torch.testing.assert_close(program.run("forward", *inputs), before, rtol=0, atol=0)


class Notes(ReferenceDelegate):
    """Records events where none may be, and with what is no identifier."""

    identifier: Any = "a"

    def compile(self, processed: bytes, compile_specs: Any, context: DelegateContext) -> Any:
        with context.event("while compiling"):
            self.context = context
        return super().compile(processed, compile_specs, context)

    def execute(self, handle: Any, inputs: list[Any]) -> Any:
        with handle.program.context.event(self.identifier):
            return super().execute(handle, inputs)


def test_events_of_other_delegates(steps: Path) -> None:
    delegate = Notes()
    program = exir_lowering.load(steps, delegates={"reference": delegate})
    for identifier, name in ((7, "event 7"), ("ä b", "ä b")):
        delegate.identifier = identifier
        names = [name for kind, name, _ in rows(program) if kind == "instruction"]
        assert names.count(name) == 2 and "while compiling" not in names
    with delegate.context.event("too late"):
        pass
    for wrong in (-1, 2**31, "", "a\0", True, None):
        delegate.identifier = wrong
        program.run("forward", *TWO)  # nothing is profiled, so nothing is looked at
        with pytest.raises(BackendFailure, match="expected an identifier"):
            program.profile("forward", *TWO)


def test_command_line(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["run", str(steps)]
    assert main([*given, "--profile"]) == 0
    assert "delegate 0" in capsys.readouterr().out
    assert main([*given, "--profile", "--json"]) == 0
    assert [row["kind"] for row in json.loads(capsys.readouterr().out)["rows"]].count("instruction") == 4
    assert main([*given, "--json"]) == 2


def test_the_inspector_of_executorch(tmp_path: Path) -> None:
    """Events have their debug handles, stack traces and modules in ExecuTorch's own tool, by the ETRecord."""
    from executorch.devtools import Inspector

    path = lowered(Steps()).emit(etrecord=True).save(tmp_path / "model.pte")
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".etrecord", ".json", ".pte"]
    native = exir_lowering.load(path)._engine
    (method,) = native.file.methods.values()
    program = open_program(str(path), None, profiled=True)
    with bridge.bridge().setting_up("test", method.delegations, native.delegates):
        ready = program.load_method("forward")
    ready(TWO, clone_outputs=True)
    program.write_etdump_result_to_file(str(tmp_path / "dump.etdp"))
    inspector = Inspector(etdump_path=str(tmp_path / "dump.etdp"), etrecord=str(path.with_suffix(".etrecord")))
    events = {
        (event.name, event._instruction_id): event
        for block in inspector.event_blocks
        for event in block.events
        if event.is_delegated_op
    }
    names = ["mul.Tensor #0", "add.Tensor #1", "sub.Tensor #0", "mul.Tensor #1"]
    assert [name for name, _ in events] == [f"aten.{name}" for name in names]
    for (name, _), mark in zip(events, ("first", "second", "difference", "last"), strict=True):
        code = line(mark).split(": ")[-1]
        event = next(e for key, e in events.items() if key[0] == name and code in str(e.stack_traces))
        assert event.debug_handles and event.delegate_backend_name == "reference"
        assert "debug_models.Steps" in str(event.module_hierarchy)
