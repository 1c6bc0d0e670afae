"""Debug handles lead back to the model: every delegated operator has one, and failures tell its source line."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from debug_models import TWO, Branches, Product, Quotient, Steps, line, lowered, tag
from lowering_support import TagPartitioner, delegates, edge_program
from torch.export import ExportedProgram, export
from torch.fx import Node

import exir_lowering
from exir_lowering import Backend, BackendFailure, InputError, LoweredMethods
from exir_lowering.backends.reference import ReferenceDelegate
from exir_lowering.graphs import debug_handles, every_node, is_operator, operator_name, source_code, walk
from exir_lowering.pte.debug_info import DebugInfo


def operators(program: ExportedProgram) -> Iterator[Node]:
    for delegate in delegates(program):
        for _, module in walk(delegate.original_module.graph_module):
            yield from filter(is_operator, module.graph.nodes)


def check_complete(found: LoweredMethods, info: DebugInfo) -> None:
    """Check that every delegated operator is in the map, with its own operator and its own line."""
    for name, program in found.items():
        method = info.methods[name]
        assert len(method.delegates) == len(delegates(program))
        for node in operators(program):
            handle = node.meta["debug_handle"]
            described = [d for d in method.nodes[handle] if d.name == node.name]
            assert operator_name(node) in {d.operator for d in described}
            assert any(handle in delegate.handles for delegate in method.delegates)


@pytest.mark.parametrize("module", [Steps, Branches])
def test_each_delegated_operator_is_described(module: type[torch.nn.Module]) -> None:
    found = lowered(module())
    artifact = found.emit()
    check_complete(found, artifact.debug_info)
    plan = artifact.manager.executorch_program.execution_plan[0]
    method = artifact.debug_info.methods["forward"]
    for index, delegate in enumerate(method.delegates):
        assert plan.chains[0].instructions[delegate.instruction].instr_args.delegate_index == index
    for instruction, handles in method.kernels.items():
        called = plan.operators[plan.chains[0].instructions[instruction].instr_args.op_index].name
        assert any(called.split("::")[1].lstrip("_") in node.operator for h in handles for node in method.nodes[h])


def test_lines_and_modules() -> None:
    method = lowered(Steps()).emit().debug_info.methods["forward"]
    told = {node.operator: node for nodes in method.nodes.values() for node in nodes}
    assert told["aten.add.Tensor"].source == line("second")
    assert told["aten.sin.default"].source == line("host")
    assert told["aten.sub.Tensor"].source == line("difference")
    assert told["aten.sub.Tensor"].modules[-1] == "inner: debug_models.Inner"
    assert [frame.function for frame in told["aten.sub.Tensor"].frames] == ["forward", "forward"]
    assert method.lines(method.delegates[0].handles) == [line("first"), line("second")]


@pytest.mark.parametrize("name", ["bert", pytest.param("llama", marks=pytest.mark.nightly)])
def test_whole_models(name: str) -> None:
    _, _, program = models.exported(name)
    found = exir_lowering.lower(program, ["xnnpack", "reference"])
    artifact = found.emit()
    info = artifact.debug_info
    check_complete(found, info)
    assert {d.backend_id for d in info.methods["forward"].delegates} == {"XnnpackBackend", "reference"}
    nodes = [node for nodes in info.methods["forward"].nodes.values() for node in nodes]
    assert sum(bool(node.source) for node in nodes) > 0.9 * len(nodes)
    assert DebugInfo.from_json(info.to_json()) == info
    assert len(info.to_json()) < 250 * len(nodes)
    assert exir_lowering.lower(program, ["xnnpack", "reference"]).emit().debug_info.to_json() == info.to_json()


def test_quantized() -> None:
    from quantized_models import partitioners, quantized

    found = exir_lowering.lower(quantized(dynamic=False), partitioners(dynamic=False))
    info = found.emit().debug_info
    check_complete(found, info)
    nodes = [node for nodes in info.methods["forward"].nodes.values() for node in nodes]
    assert "aten.convolution.default" in {node.operator for node in nodes}


def test_programs_without_handles_get_some_and_keep_none() -> None:
    program = edge_program(Branches(), TWO)
    for _, node in every_node(program.graph_module):
        node.meta.pop("debug_handle", None)
    before = [dict(node.meta) for _, node in every_node(program.graph_module)]
    made = [exir_lowering.to_backend(program, TagPartitioner(tag, "reference")) for _ in range(2)]
    check_complete(made[0], made[0].emit().debug_info)
    assert made[0].emit().debug_info == made[1].emit().debug_info
    after = [dict(node.meta) for _, node in every_node(program.graph_module)]
    assert [meta.keys() for meta in after] == [meta.keys() for meta in before]


def test_handles_are_executorchs_own() -> None:
    """A program that has all handles keeps them; some that miss are those that ExecuTorch would share."""
    program = edge_program(Steps(), TWO)
    own = {node.name: node.meta["debug_handle"] for node in program.graph.nodes if node.op == "call_function"}
    filled = debug_handles.copy_with_handles(program)
    assert {node.name: node.meta["debug_handle"] for node in filled.graph.nodes if node.name in own} == own
    found = exir_lowering.to_backend(program, TagPartitioner(tag, "reference"))
    assert {node.meta["debug_handle"] for node in operators(found["forward"])} <= set(own.values())


class Refuses(Backend):
    """Names the operator by its debug handle, or itself tells the line."""

    def __init__(self, by_handle: bool) -> None:
        self.by_handle = by_handle

    def preprocess(self, program: ExportedProgram, compile_specs: Any) -> Any:
        (node,) = filter(is_operator, program.graph.nodes)
        if self.by_handle:
            raise BackendFailure("No divider.", debug_handle=node.meta["debug_handle"])
        raise InputError(f"No divider. {source_code(node)}")


@pytest.mark.parametrize("by_handle", [True, False])
def test_ahead_of_time_the_line_is_told(by_handle: bool) -> None:
    with pytest.raises(BackendFailure) as caught:
        backends = {"refuses": Refuses(by_handle)}
        exir_lowering.lower(export(Quotient(), TWO), TagPartitioner(backend="refuses"), backends=backends)
    assert str(caught.value).count(f"No divider. Source code: {line('quotient')}") == 1
    assert type(caught.value.__cause__) is (BackendFailure if by_handle else InputError)


class Fails(ReferenceDelegate):
    """Raises at the second instruction, the way a delegate of another package would."""

    def execute(self, handle: Any, inputs: list[Any]) -> Any:
        error = RuntimeError("out of memory")
        _, _, number, *_ = handle.program.code[1]
        error.debug_handle = number  # type: ignore[attr-defined]
        raise error


class NeverCompiles(ReferenceDelegate):
    def compile(self, *args: Any) -> Any:
        raise RuntimeError("no licence")


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lowered(Steps()).emit().save(tmp_path_factory.mktemp("debug") / "steps.pte")


def test_a_failure_at_run_time_tells_the_line(steps: Path) -> None:
    program = exir_lowering.load(steps, delegates={"reference": Fails})
    with pytest.raises(BackendFailure) as caught:
        program.run("forward", *TWO)
    assert str(caught.value).endswith(f". Source code: {line('second')}")
    assert caught.value.debug_handle is not None
    with pytest.raises(BackendFailure) as caught:
        exir_lowering.load(steps, delegates={"reference": NeverCompiles})
    assert str(caught.value).endswith(
        f'in compile: raise RuntimeError("no licence"). Source code:\n    {line("first")}\n    {line("second")}'
    )


def _message(program: exir_lowering.LoadedProgram) -> str:
    with pytest.raises(BackendFailure) as caught:
        program.run("forward", *TWO)
    return str(caught.value)


def test_stale_and_damaged_debug_information(steps: Path, tmp_path: Path) -> None:
    debug = tmp_path / "model.debug.json"
    model = tmp_path / "model.pte"
    model.write_bytes(steps.read_bytes())
    delegates = {"reference": Fails}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "Source code" not in _message(exir_lowering.load(model, delegates=delegates))
        assert "Source code" not in _message(exir_lowering.load(model.read_bytes(), delegates=delegates))
    stale = lowered(Product()).emit().debug_info.to_json()
    good = steps.with_suffix(".debug.json").read_text()
    for text, told in (
        (stale, "it belongs to another .pte file"),
        (good[:200], "this is not debug information"),
        (json.dumps({**json.loads(good), "frames": [["x"]]}), "it is damaged"),
        (json.dumps({**json.loads(good), "version": 99}), "its version is 99"),
    ):
        debug.write_text(text)
        program = exir_lowering.load(model, delegates=delegates)
        with pytest.warns(UserWarning, match=told) as heard:
            assert "Source code" not in _message(program)
            assert "Source code" not in _message(program)
        assert len([w for w in heard if told in str(w.message)]) == 1


def test_saving(tmp_path: Path) -> None:
    artifact = lowered(Product()).emit()
    artifact.save(tmp_path / "model.pte")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.debug.json", "model.pte"]
    assert DebugInfo.from_json((tmp_path / "model.debug.json").read_bytes()) == artifact.debug_info
