"""The cache of Edge programs: equal programs, shared weights, and a key that has all that a conversion reads."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import random_programs
import torch
from cached import layers, linear, require_equal_edge, uses
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig
from torch.export import Dim, ExportedProgram, export

from exir_lowering import LoweredMethods, LoweringOptions, Partitioner, PartitionResult, lower
from exir_lowering.backends.xnnpack import xnnpack
from exir_lowering.partitioners import ChainedPartitioner, RuledPartitioner, SupportPartitioner, deny, ops
from exir_lowering.plans.report import CacheUse
from exir_lowering.steps.arguments import read_request
from exir_lowering.steps.cache.store import Store
from exir_lowering.steps.cached import convert_cached
from exir_lowering.steps.edge import to_edge
from exir_lowering.steps.session import Session


def _lower(program: Any, folder: Any = False, partitioner: Any = "xnnpack", **options: Any) -> LoweredMethods:
    return lower(program, partitioner, options=LoweringOptions(cache=folder, **options))


def _use(lowered: LoweredMethods) -> CacheUse:
    (use,) = uses(lowered, "edge")
    return use


def _require_equal(ours: LoweredMethods, plain: LoweredMethods, given: dict[str, ExportedProgram]) -> None:
    """Check that two lowerings have the same Edge programs, and the first one the given tensors."""
    for name, program in given.items():
        require_equal_edge(ours.edge_programs[name], plain.edge_programs[name], program)
    assert ours.report.left_to_executorch == plain.report.left_to_executorch
    assert ours.emit().buffer == plain.emit().buffer
    assert ours.emit().debug_info == plain.emit().debug_info


class _Mixed(torch.nn.Module):
    """Has a branch, a buffer that it changes, tied weights, constants and a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.again = self.linear.weight
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x) + torch.tensor([1.0, 2.0, 3.0, 4.0]) + self.again[1:2]
        self.count.add_(1.0)
        z = torch.cond(x.sum() > 0, lambda a: a.sin() + 1.0, lambda a: a.cos(), (y,))
        return z.clamp(min=-2.0, max=0.5), torch.nn.functional.interpolate(x[None], scale_factor=2.0)


def _mixed(most: int) -> ExportedProgram:
    with torch.no_grad():
        return export(_Mixed(), (torch.ones(3, 4),), dynamic_shapes=({0: Dim("rows", min=2, max=most)},))


def test_state_branches_and_dynamic_shapes(tmp_path: Path) -> None:
    program = _mixed(64)
    plain, cold, warm = (_lower(program, folder) for folder in (False, tmp_path, tmp_path))
    assert not _use(cold).hit and _use(warm).hit
    _require_equal(warm, plain, {"forward": program})
    assert "graph" in _use(_lower(_mixed(32), tmp_path)).differs


def test_random_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = "to_edge", lambda program, compile_config: SimpleNamespace(exported_program=lambda: program)
    monkeypatch.setattr(random_programs, *exported)
    hits = []
    for made in random_programs.random_programs(0, 3):
        plain, _, warm = (_lower(made.methods, folder) for folder in (False, tmp_path, tmp_path))
        found = uses(warm, "edge")
        assert all(use.hit or use.reason for use in found)
        hits += [use.hit for use in found]
        _require_equal(warm, plain, made.methods)
    assert sum(hits) > len(hits) // 2


def test_weights_are_not_stored_again(tmp_path: Path) -> None:
    _lower(layers(width=512), tmp_path, [])  # 5 MB of weights
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 100_000


def test_what_a_conversion_reads_is_in_the_key(tmp_path: Path) -> None:
    program = layers()
    assert not _use(_lower(program, tmp_path)).hit
    assert _use(_lower(layers(), tmp_path)).hit
    unchecked = EdgeCompileConfig(_check_ir_validity=False)
    for differs, lowered in (
        ({"weights"}, _lower(layers(seed=2), tmp_path)),
        ({"graph", "weights"}, _lower(layers(width=4), tmp_path)),
        ({"graph"}, _lower(layers(inserted=True), tmp_path)),
        ({"options"}, _lower(program, tmp_path, edge_compile_config=unchecked)),
        ({"options"}, _lower(program, tmp_path, fast=False)),
        ({"partitioners"}, _lower(program, tmp_path, [])),
        ({"partitioners"}, _lower(program, tmp_path, xnnpack(operators=["aten.linear"]))),
        ({"partitioners"}, _lower(program, tmp_path, xnnpack(enable_bf16=True))),
        ({"partitioners"}, _lower(program, tmp_path, ["xnnpack", "xnnpack"])),
        ({"partitioners"}, _lower(program, tmp_path, RuledPartitioner(xnnpack(), deny(op="aten.linear.default")))),
        ({"partitioners"}, _lower(program, tmp_path, RuledPartitioner(xnnpack(), deny(op="aten.relu.default")))),
        ({"partitioners"}, _lower(program, tmp_path, ChainedPartitioner(xnnpack()))),
    ):
        assert not _use(lowered).hit and set(_use(lowered).differs) == differs


def test_a_partitioner_that_is_used_again_has_the_same_key(tmp_path: Path) -> None:
    partitioner = XnnpackPartitioner()
    for hit in (False, True):
        assert _use(_lower(layers(), tmp_path, partitioner)).hit == hit
    assert _use(_lower(layers(), tmp_path, XnnpackPartitioner())).hit
    assert not _use(_lower(layers(), tmp_path, "xnnpack")).hit  # it takes less, and so asks for less to be kept whole


def test_passes_are_not_kept(tmp_path: Path) -> None:
    _lower(layers(), tmp_path)
    passed = lower(layers(), "xnnpack", options=LoweringOptions(cache=tmp_path), transform_passes=[lambda module: None])
    assert "passes" in _use(passed).reason
    assert not uses(_lower(_lower(layers(), partitioner=[]).edge_programs["forward"], tmp_path), "edge")


class Asking(SupportPartitioner):
    """Asks for something of its own, and does not say on what that depends."""

    def ops_to_not_decompose(self, ep: ExportedProgram) -> Any:
        return [torch.ops.aten.linear.default], lambda node: False


class Declaring(Asking):
    """Says it."""

    def __init__(self, level: Any) -> None:
        super().__init__({"echo": ops("aten.add.Tensor")})
        self.level = level

    def describe_requests(self) -> Any:
        return [1, self.level, xnnpack()]


class Silent(Partitioner):  # type: ignore[misc]
    """Asks nothing."""

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        return PartitionResult(exported_program, {})


def _unit() -> SupportPartitioner:
    return SupportPartitioner({"echo": ops("aten.sin.default")})


def test_partitioners_say_what_their_requests_depend_on(tmp_path: Path) -> None:
    patched = _unit()
    patched.ops_to_not_decompose = lambda ep: ([], None)  # type: ignore[method-assign]
    unknown = Asking({"echo": ops("aten.sin.default")})
    for partitioner in (unknown, linear("echo"), patched, ChainedPartitioner(unknown), Declaring(object())):
        for _ in range(2):
            assert _use(_lower(_sines(), tmp_path, partitioner)).reason
    for make in (_unit, Silent, lambda: Declaring(1), lambda: ChainedPartitioner(_unit())):
        assert [_use(_lower(_sines(), tmp_path, make())).hit for _ in range(2)] == [False, True]
    assert not _use(_lower(_sines(), tmp_path, Declaring(2))).hit


class _Sines(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, x).cos().cumsum(0)


def _sines() -> ExportedProgram:
    return export(_Sines().eval(), (torch.ones(2, 2),))


def test_what_was_left_to_executorch_is_kept(tmp_path: Path) -> None:
    (method,) = read_request(_sines(), "xnnpack").methods
    (edge,) = to_edge([method], Session(LoweringOptions()))
    left = ("a step: a reason",)
    conversions = iter([replace(edge, left_to_executorch=left)])
    for _ in range(2):
        found = convert_cached(method, Session(LoweringOptions(cache=tmp_path)), lambda: next(conversions))
        assert found.left_to_executorch == left


_EMPTY = {"pieces": [], "left": []}
_VALUES: list[Any] = [
    None,
    [],
    {},
    _EMPTY,
    {"pieces": None, "left": []},
    {"pieces": [[99, 0, 4]], "left": []},
    {"pieces": [[0, 0, 1 << 60]], "left": []},
    {"pieces": [[0, -4, 4]], "left": []},
    {"pieces": [[7]], "left": []},
    {"pieces": [["a"]], "left": [1]},
]


def test_entries_that_are_not_ours_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, read = _sines(), Store.read
    plain = _lower(program, tmp_path).emit().buffer
    entry: list[Any] = []

    def damaged(store: Store, key: Any) -> Any:
        found = read(store, key)
        if key.kind != "edge" or found is None:
            return found
        value, graph = entry
        return replace(found, value=value, chunks=found.chunks if graph is None else (graph, *found.chunks[1:]))

    monkeypatch.setattr(Store, "read", damaged)
    graphs = (b"", b"EXIRPROG" + bytes(100))
    for entry[:] in [
        *((value, None) for value in _VALUES),
        *((value, graph) for value in (None, _EMPTY) for graph in graphs),
    ]:
        lowered = _lower(program, tmp_path)
        assert not _use(lowered).hit
        assert lowered.emit().buffer == plain


_CHILD = """
import sys, torch
sys.path[:0] = sys.argv[2:]
from cached import layers, uses
from exir_lowering import LoweringOptions, lower
torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
lowered = lower(layers(), "xnnpack", options=LoweringOptions(cache=sys.argv[1]))
print([use.hit for use in lowered.report.cache], lowered.emit().debug_info.digest)
"""


def test_another_process_finds_it(tmp_path: Path) -> None:
    """With another hash seed, and after other exports."""
    support = Path(__file__).parents[2] / "support"
    found = []
    for seed in "12":
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _CHILD, str(tmp_path), str(support)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        found.append(done.stdout.splitlines()[-1])
    assert found[0].startswith("[False") and found[1] == found[0].replace("False", "True")


def test_layers_that_moved_in_their_file_are_converted_again(tmp_path: Path) -> None:
    """Source lines are in the debug information."""
    program = layers()
    _lower(program, tmp_path)
    for node in program.graph.nodes:
        if "stack_trace" in node.meta:
            node.meta["stack_trace"] = node.meta["stack_trace"].replace("line ", "line 1")
    again = _lower(program, tmp_path)
    assert _use(again).differs == ("graph",)
    assert all(use.hit for use in uses(again))
    assert again.emit().debug_info == _lower(program).emit().debug_info
