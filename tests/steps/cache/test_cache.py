"""The cache of lowered partitions: same bytes, and exactly what changed is lowered again."""

from __future__ import annotations

import ctypes
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from cached import (
    CALLS,
    Failing,
    Independent,
    Layers,
    Names,
    Newer,
    Settled,
    Tracing,
    layers,
    linear,
    missed,
    partitioner,
    trace,
)
from torch.export import ExportedProgram, export

from exir_lowering import Backend, CompileSpec, LoweredMethods, LoweringOptions, lower
from exir_lowering.errors import BackendContractError, BackendFailure, CacheWarning


def _lower(program: Any, folder: Any = False, partitioner: Any = "xnnpack", **more: Any) -> LoweredMethods:
    return lower(program, partitioner, options=LoweringOptions(cache=folder), **more)


@pytest.mark.parametrize("backend", ["xnnpack", "reference"])
@pytest.mark.parametrize("name", models.MODELS)
def test_a_cached_lowering_gives_the_same_bytes(name: str, backend: str, tmp_path: Path) -> None:
    _, _, program = models.exported(name)
    plain, cold, warm = (_lower(program, folder, backend) for folder in (False, tmp_path, tmp_path))
    assert not plain.report.cache
    assert not any(use.hit for use in cold.report.cache) and all(use.hit for use in warm.report.cache)
    assert len(warm.report.cache) == sum(len(method.partitions) for method in warm.report.methods) > 0
    assert plain.emit().buffer == cold.emit().buffer == warm.emit().buffer
    described = [json.loads(one.report.to_json()) for one in (plain, cold, warm)]
    assert described[0]["methods"] == described[1]["methods"] == described[2]["methods"]
    assert plain.emit().debug_info == warm.emit().debug_info


def test_only_partitions_whose_weights_changed_are_lowered_again(tmp_path: Path) -> None:
    first = _lower(layers(), tmp_path)
    model = Layers().eval()
    with torch.no_grad():
        model.layers[3].weight[0, 0].add_(1)
    changed = export(model, (torch.ones(2, 8),))
    again = _lower(changed, tmp_path)
    assert len(missed(first)) == 5
    found = [use for use in again.report.cache if not use.hit]
    assert [use.partition for use in found] == [first.report.methods[0].partitions[3].id]
    assert again.emit().buffer == _lower(changed).emit().buffer


def test_methods_share_results(tmp_path: Path) -> None:
    _lower({"one": layers()}, tmp_path)
    both = {"one": layers(), "two": layers(seed=2), "three": layers()}
    again = _lower(both, tmp_path)
    assert {use.method for use in again.report.cache if not use.hit} == {"two"}
    assert again.emit().buffer == _lower(both).emit().buffer


def _dynamic(most: int) -> ExportedProgram:
    return export(Layers().eval(), (torch.ones(2, 8),), dynamic_shapes=({0: torch.export.Dim("n", max=most)},))


def test_ranges_of_symbolic_sizes_are_part_of_the_key(tmp_path: Path) -> None:
    _lower(_dynamic(16), tmp_path)
    assert not missed(_lower(_dynamic(16), tmp_path))
    wider = _lower(_dynamic(32), tmp_path)
    assert len(missed(wider)) == 5
    assert wider.emit().buffer == _lower(_dynamic(32)).emit().buffer


def test_what_a_backend_gets_and_is_makes_the_key(tmp_path: Path) -> None:
    assert missed(trace(tmp_path)) and not missed(trace(tmp_path))
    assert not CALLS
    for lowered in (
        trace(tmp_path, None, CompileSpec("level", b"2")),
        *(trace(tmp_path, backend) for backend in (Newer(), Settled(1), Settled(2))),
    ):
        assert len(missed(lowered)) == len(lowered.report.cache)
    assert not missed(trace(tmp_path, Settled(2)))


def test_what_a_backend_reads_is_in_the_key_unless_it_says_otherwise(tmp_path: Path) -> None:
    names = [trace(tmp_path, Names()) for _ in range(2)]
    assert len(missed(names[0])) == 5 and not missed(names[1])
    assert names[1].emit().buffer == trace(False, Names()).emit().buffer
    moved = export(torch.nn.Sequential(Layers().eval()), (torch.ones(2, 8),))
    for backend, count in ((Tracing(), 0), (Names(), 5)):
        trace(tmp_path, backend)
        again = _lower(moved, tmp_path, partitioner(), backends={"tracing": backend})
        assert len(missed(again)) == count


class Unversioned(Tracing):
    version = Backend.version


def test_what_cannot_be_compared_is_not_cached(tmp_path: Path) -> None:
    for backend, reason in ((Unversioned(), "has no `version`, and is of no installed"), (Settled(object()), "object")):
        for _ in range(2):
            lowered = trace(tmp_path, backend)
            assert len(CALLS) == len(missed(lowered)) == 5
            assert all(reason in use.explain() for use in lowered.report.cache)


class Loaded(Settled):
    """Holds a library, and says itself what it is."""

    def __init__(self, key: Any) -> None:
        super().__init__(ctypes.CDLL(None))
        self.cache_key = key


def test_a_backend_may_say_what_its_settings_are(tmp_path: Path) -> None:
    assert missed(trace(tmp_path, Loaded("library 1"))) and not missed(trace(tmp_path, Loaded("library 1")))
    assert missed(trace(tmp_path, Loaded("library 2")))
    with pytest.raises(BackendContractError, match="cache_key is 2, expected a text"):
        trace(tmp_path, Loaded(2))


def test_a_backend_with_a_call_for_all_is_cached_by_group_or_as_it_declares(tmp_path: Path) -> None:
    echoing = linear("echo")
    programs = {"one": layers(), "two": layers()}
    plain = _lower(programs, False, echoing)
    _lower({"one": layers()}, tmp_path, echoing)
    cold, warm = (_lower(programs, tmp_path, echoing) for _ in range(2))
    assert len(missed(cold)) == 10 and not missed(warm)
    assert plain.emit().buffer == cold.emit().buffer == warm.emit().buffer
    trace(tmp_path, Independent())
    changed = _lower(layers(seed=2), tmp_path, partitioner(), backends={"tracing": Independent()})
    assert len(missed(changed)) == 5
    _lower({"a": layers(), "b": layers(seed=3)}, tmp_path, partitioner(), backends={"tracing": Independent()})
    assert [count for (count,) in CALLS if isinstance(count, int)] == [5, 5, 5]


class _Views(torch.nn.Module):
    """Two weights in one piece of memory; `second` reads beyond `first`."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        memory = torch.arange(48.0)
        self.register_buffer("first", memory[:32].view(4, 8))
        self.register_buffer("second", memory[16:].view(8, 4).clone() if apart else memory[16:].view(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linear = torch.nn.functional.linear
        return linear(linear(x, self.first).cumsum(0), self.second)


def test_weights_that_overlap_with_those_of_another_partition(tmp_path: Path) -> None:
    """`WeightStore` keeps what overlaps as one piece: a result depends on which partitions are in the group."""
    for apart in (True, False, True, False):
        program = export(_Views(apart=apart).eval(), (torch.ones(2, 8),))
        cached, plain = (_lower(program, folder, linear("reference")) for folder in (tmp_path, False))
        assert len(cached.report.cache) == 2
        assert cached.emit().buffer == plain.emit().buffer


def test_a_failure_is_the_same_and_leaves_nothing(tmp_path: Path) -> None:
    failures = []
    for folder in (False, tmp_path):
        with pytest.raises(BackendFailure) as caught:
            trace(folder, Failing())
        failures.append(str(caught.value))
    assert failures[0] == failures[1]
    assert not list(tmp_path.glob("*.entry"))


def test_threads_use_one_folder(tmp_path: Path) -> None:
    programs = [layers(seed=seed) for seed in (1, 2, 1, 2)]
    expected = [_lower(program).emit().buffer for program in programs[:2]] * 2
    with ThreadPoolExecutor(4) as threads:
        lowered = list(threads.map(lambda program: _lower(program, tmp_path), programs))
    assert [one.emit().buffer for one in lowered] == expected
    assert not missed(_lower(programs[0], tmp_path))


def test_a_folder_that_cannot_be_used_is_a_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(CacheWarning, match="file"):
        lowered = trace(blocked / "below")
    assert lowered.emit().buffer == trace(False).emit().buffer
    assert not lowered.report.cache
