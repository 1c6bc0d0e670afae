"""What a process that lowers again and again keeps: nothing of ours, and no table made anew for each operator."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from lowering_support import delegates
from torch.export import Dim, export

import exir_lowering
from exir_lowering.graphs import collector

X = torch.rand(2, 4)
WARM, CYCLES = 2, 4


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(x)) * x


@pytest.fixture(autouse=True, scope="module")
def imported_is_no_garbage() -> None:
    """Here, lowering sets it aside itself, and gives it back."""
    gc.unfreeze()
    collector._frozen_elsewhere = False


def growth(cycle: Callable[[], Any]) -> Counter[str]:
    """Return how many more objects of each type there are after some cycles."""
    for _ in range(WARM):
        cycle()
    before = objects()
    for _ in range(CYCLES):
        cycle()
    after = objects()
    after.subtract(before)
    return after


def objects() -> Counter[str]:
    gc.collect()
    gc.collect()  # what finalizers of the first left
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())


@pytest.mark.parametrize(
    "delegated", [pytest.param(False, id="host", marks=pytest.mark.nightly), pytest.param(True, id="xnnpack")]
)
def test_a_cycle_leaves_no_more_than_executorchs_own(delegated: bool) -> None:
    program = export(Model().eval(), (X,))

    def ours() -> None:
        exir_lowering.plan(program, "xnnpack" if delegated else None)
        lowered = exir_lowering.lower(program, "xnnpack" if delegated else None)
        exir_lowering.load(lowered.emit().buffer).run("forward", X)

    def theirs() -> None:
        for _ in range(2):  # a plan converts too
            partitioner = [XnnpackPartitioner()] if delegated else []
            manager = to_edge_transform_and_lower(program, partitioner=partitioner)
        manager.to_executorch()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # What tests before this one left may go meanwhile: there are fewer then.
        upstream, own = +growth(theirs), growth(ours)
    more = {kind: count - upstream[kind] for kind, count in own.items() if count - upstream[kind] >= CYCLES}
    assert not more
    assert not [kind for kind, count in own.items() if kind.startswith("exir_lowering.") and count > 0]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_what_is_dropped_is_collected(dynamic: bool) -> None:
    """The input, what was lowered with its delegates, and the file; torch keeps delegates that emission calls."""
    program = export(Model().eval(), (X,), dynamic_shapes=({0: Dim("rows", max=8)},) if dynamic else None)
    weight = program.state_dict["linear.weight"]
    lowered = exir_lowering.lower(program, "xnnpack")
    artifact = lowered.emit()
    loaded = exir_lowering.load(artifact.buffer)
    loaded.run("forward", X)
    gone = [
        weakref.ref(one)
        for one in (
            program.graph_module,
            weight,
            lowered["forward"].graph_module,
            lowered.edge_programs["forward"].graph_module,
            artifact.manager.exported_program().graph_module,
            *(delegate.original_module for delegate in delegates(lowered["forward"])),
        )
    ]
    del program, weight, lowered, artifact, loaded
    export(torch.nn.Identity(), (X,))  # torch keeps the nodes of the program that it traced last
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone) and not gc.get_freeze_count()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_delegates_are_collected_while_the_input_lives(dynamic: bool) -> None:
    program = export(Model().eval(), (X,), dynamic_shapes=({0: Dim("rows", max=8)},) if dynamic else None)
    lowered = exir_lowering.lower(program, "xnnpack")
    lowered.emit()
    gone = [weakref.ref(delegate) for delegate in delegates(lowered["forward"])]
    del lowered
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)


def test_what_failed_is_collected_too() -> None:
    class Histogram(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.histc(x, bins=4)

    program = export(Histogram(), (X,))
    gone = weakref.ref(program.graph_module)
    with pytest.raises(exir_lowering.InputError):
        exir_lowering.lower(program)
    with pytest.raises(exir_lowering.InputError):
        exir_lowering.lower(program, transform_passes=[lambda module: 7])
    del program
    gc.collect()
    assert gone() is None
