"""What exporters patch in torch and ExecuTorch while we lower: nothing is switched off, and nothing of it is kept."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import tensor, to_edge_transform_and_lower
from executorch.exir.emit import _emitter
from executorch.exir.passes.prune_empty_tensors_pass import PruneEmptyTensorsPass
from torch import nn

from exir_lowering import LoweringOptions, lower
from exir_lowering._upstream import pins
from exir_lowering._upstream.passes import mending_passes
from exir_lowering.compat import patch_executorch
from exir_lowering.fast import accelerated

pytest.importorskip("transformers.exporters.exporter_executorch", reason="transformers 5 has exporters")


@contextmanager
def patched_by_transformers() -> Iterator[None]:
    from transformers.exporters.utils import apply_patches

    with apply_patches("executorch"), apply_patches("executorch.xnnpack"):
        yield


def in_turn(file: Callable[[], bytes], expected: Callable[[], bytes]) -> list[bytes]:
    """Return the files without the patches, with them, and without them again, each the one that is expected."""
    files = []
    for context in (nullcontext(), patched_by_transformers(), nullcontext()):
        with context:
            files.append(file())
            assert files[-1] == expected()
    assert files[0] == files[2]
    return files


class Net(nn.Module):
    """A bias that a decomposition expands, a concatenation with nothing, and a view."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addr(x[0], x[:, 0], x[1])
        return torch.cat([self.linear(y), y[:0]]).view(2, 2, 4)


def program() -> Any:
    return torch.export.export(Net().eval(), (torch.randn(4, 4),))


def test_nothing_is_switched_off() -> None:
    with patched_by_transformers():
        assert pins.state() == []
        assert lower(program(), "xnnpack").report.switched_off == ()


def test_what_is_remembered_is_of_the_functions_that_are_there() -> None:
    """On the host, where a copy more is in the file: `torch.addr` expands, by a method that they replace."""
    exported, slow = program(), LoweringOptions(fast=False)
    files = in_turn(lambda: lower(exported).emit().buffer, lambda: lower(exported, options=slow).emit().buffer)
    assert files[0] != files[1]


def test_executorchs_bytes_under_the_same_patches() -> None:
    exported = program()

    def file() -> bytes:
        manager = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
        return bytes(manager.to_executorch().buffer)

    def fast() -> bytes:
        with accelerated():
            return file()

    in_turn(fast, file)
    with patched_by_transformers():
        with patch_executorch(fast=False):
            plain = file()
        with patch_executorch() as lowerings:
            assert file() == plain
        (report,) = [lowering.report for lowering in lowerings]
        assert report is not None and report.switched_off == ()


@pytest.mark.parametrize("begin", ["before", "meanwhile"])
def test_patches_of_others_end_in_any_order(begin: str) -> None:
    """As those of another thread: theirs stay while they last, and what they put back when they end does no harm."""
    name, own = "remove_empty_tensors_from_cat", PruneEmptyTensorsPass.remove_empty_tensors_from_cat

    def theirs(self: Any, graph_module: Any, cat_node: Any) -> None:
        return own(self, graph_module, cat_node)

    exported = program()
    expected = lower(exported).emit().buffer
    try:
        if begin == "before":
            PruneEmptyTensorsPass.remove_empty_tensors_from_cat = theirs
        with mending_passes():
            found = getattr(PruneEmptyTensorsPass, name)
            PruneEmptyTensorsPass.remove_empty_tensors_from_cat = own if begin == "before" else theirs
        assert getattr(PruneEmptyTensorsPass, name) is (own if begin == "before" else theirs)
        if begin == "meanwhile":
            PruneEmptyTensorsPass.remove_empty_tensors_from_cat = found
        lowered = lower(exported)
        assert lowered.report.switched_off == () and lowered.emit().buffer == expected
        assert getattr(PruneEmptyTensorsPass, name) is own  # what was put back has gone, too
    finally:
        PruneEmptyTensorsPass.remove_empty_tensors_from_cat = own


def test_what_somebody_has_added_to_torch_may_go_again() -> None:
    code = (
        "import torch; torch.added = torch.nn.functional.added = torch.relu\n"
        "from exir_lowering import lower\n"
        "del torch.added, torch.nn.functional.added\n"
        "lower(torch.export.export(torch.nn.ReLU(), (torch.ones(2),))).emit()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_module_is_asked_by_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_order(stride: Any) -> tuple[int, ...]:
        return tuple(reversed(range(len(stride))))

    monkeypatch.setattr(_emitter, "dim_order_from_stride", reversed_order)
    with accelerated(step="emit"):
        assert _emitter.dim_order_from_stride((6, 2, 1)) == (2, 1, 0)
        assert tensor.dim_order_from_stride((6, 2, 1)) == (0, 1, 2)
        with pytest.raises(RuntimeError, match="0 in strides"):
            tensor.dim_order_from_stride((2, 0, 1))
