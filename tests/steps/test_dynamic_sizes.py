"""A dynamic dimension takes what export said: nothing that is evaluated on the way narrows it, or it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim, ExportedProgram, export
from torch.fx import GraphModule

from exir_lowering import InputError, LoweringOptions, load, lower
from exir_lowering._upstream.pins import FEATURES

F = nn.functional


class Computes(nn.Module):
    """A function, with a module that it uses."""

    def __init__(self, function: Callable[..., Any], module: nn.Module | None = None) -> None:
        super().__init__()
        self._function, self.module = function, module

    def forward(self, *given: torch.Tensor) -> Any:
        return self._function(*given) if self.module is None else self.module(*given)


def _of(module: nn.Module) -> Computes:
    return Computes(lambda: None, module).eval()


IMAGES = (lambda n: (torch.randn(n, 3, 6, 6),), 0)
ROWS = (lambda n: (torch.randn(n, 8),), 0)
WORDS = (lambda n: (torch.randn(n, 4, 4),), 0)
HEIGHTS = (lambda n: (torch.randn(1, 2, n, 5),), 2)
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "convolution": (lambda: _of(nn.Conv2d(3, 4, 3)), IMAGES),  # torch chooses another kernel from 16 on
    "convolution, 1 dimension": (lambda: _of(nn.Conv1d(4, 3, 3)), WORDS),
    "chunks": (lambda: Computes(lambda x: torch.cat(x.chunk(2, 1))), ROWS),
    "parts": (lambda: Computes(lambda x: x.split([3, 5], 1)), ROWS),
    "GRU": (lambda: _of(nn.GRU(4, 5, batch_first=True)), WORDS),
    "LSTM": (lambda: _of(nn.LSTM(4, 5, batch_first=True)), WORDS),
    "empty": (lambda: Computes(lambda x: torch.empty(x.shape[0], 2).fill_(1.0) + x[:, :2]), ROWS),
    "new empty": (lambda: Computes(lambda x: x.new_empty(x.shape[0]).fill_(1.0) + x[:, 0]), ROWS),
    "empty like": (lambda: Computes(lambda x: torch.empty_like(x).fill_(1.0) + x), ROWS),
    "padding": (lambda: Computes(lambda x: F.pad(x, (0, 0, 0, 33 - x.shape[0]))), ROWS),  # of 33 - n rows
    "twice": (lambda: Computes(lambda x: x.view(-1, 16) + 1), (lambda n: (torch.randn(2 * n, 8),), 0)),
    "a constant beside": (
        lambda: Computes(lambda x: F.interpolate(x, size=(8, 8), mode="bilinear") * torch.tensor([1.0])),
        HEIGHTS,
    ),
}


def _check(model: nn.Module, content: bytes, calls: list[tuple[torch.Tensor, ...]]) -> None:
    program = load(content)
    for call in calls:
        expected = torch.utils._pytree.tree_leaves(model(*call))
        torch.testing.assert_close(tuple(program.run("forward", *call)), tuple(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("fast", "partitioner"), [(True, None), (True, "xnnpack"), (False, None)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_sizes_of_a_range_are_right(name: str, fast: bool, partitioner: str | None) -> None:
    make, (inputs, dimension) = PROGRAMS[name]
    model = make()
    size = Dim("n", min=1, max=33)
    size = 2 * size if name == "twice" else size
    program = export(model, inputs(3), dynamic_shapes=(({dimension: size},),))
    lowered = lower(program, partitioner, options=LoweringOptions(fast=fast))
    assert [found.converted for found in lowered.report.narrowed] in ([], [(2, 33)], [(4, 66)])
    _check(model, lowered.emit().buffer, [inputs(n) for n in (1, 2, 17, 33, 3)])


@pytest.mark.parametrize("size", [Dim("n"), Dim.DYNAMIC, Dim.AUTO], ids=str)
def test_a_size_without_a_bound_is_the_examples_and_that_is_told(size: Any) -> None:
    program = export(nn.Linear(8, 4).eval(), (torch.randn(5, 8),), dynamic_shapes=({0: size},))
    lowered = lower(program)
    (found,) = lowered.report.narrowed
    assert found.given[1] is None and found.converted == (2, 5)
    assert "at most 5, that of the example" in str(found) and "Dim that has a max" in str(lowered.report)
    assert load(lowered.emit().buffer).run("forward", torch.randn(5, 8))[0].shape == (5, 4)


@pytest.mark.parametrize("partitioner", [None, "xnnpack"])
def test_what_is_computed_from_sizes_with_and_without_a_bound_has_room(partitioner: str | None) -> None:
    model = Computes(lambda x, y: torch.cat([x * 2, y]))
    shapes = (({0: Dim("n")}, {0: Dim("m", max=10)}),)
    program = export(model, (torch.randn(3, 8), torch.randn(2, 8)), dynamic_shapes=shapes)
    calls = [(torch.randn(n, 8), torch.randn(m, 8)) for n, m in ((3, 10), (2, 2), (3, 2))]
    _check(model, lower(program, partitioner).emit().buffer, calls)


def _branching(size: Dim) -> tuple[ExportedProgram, Any]:
    def branch(graph_module: GraphModule) -> None:
        """Decide something by a size, as a pass may."""
        for node in graph_module.graph.find_nodes(op="placeholder"):
            if node.meta["val"].shape[0] < 16:
                node.meta["small"] = True

    return export(Computes(torch.exp), (torch.randn(3, 8),), dynamic_shapes=(({0: size},),)), [branch]


@pytest.mark.parametrize("fast", [True, False])
def test_a_declared_range_that_is_narrowed_is_an_error_before_a_backend_is_called(fast: bool) -> None:
    program, passes = _branching(Dim("n", min=2, max=33))
    with pytest.raises(
        InputError, match=r"input given_0 was declared as 2\.\.33, but .* holds for 2\.\.15 only, .* < 16"
    ):
        lower(program, options=LoweringOptions(fast=fast), transform_passes=passes)
    program, passes = _branching(Dim.AUTO)
    (found,) = lower(program, options=LoweringOptions(fast=fast), transform_passes=passes).report.narrowed
    assert found.given == (2, None) and found.converted == (2, 15)


@pytest.fixture
def with_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are narrowed as torch does it, as with one whose code is not known."""
    monkeypatch.setitem(FEATURES["sizes without guards"].code, "torch._subclasses.fake_impls:conv", [])


@pytest.mark.usefixtures("with_guards")
@pytest.mark.parametrize("partitioner", [None, "xnnpack"])
def test_what_is_narrowed_after_the_conversion_is_told(partitioner: str | None) -> None:
    """By passes of the emission, or by those of a backend."""
    make, (inputs, _) = PROGRAMS["convolution"]
    program = export(make(), inputs(3), dynamic_shapes=(({0: Dim("n", min=1, max=33)},),))
    artifact = lower(program, partitioner).emit()
    (found,) = artifact.report.narrowed
    assert (found.input, found.given, found.converted) == ("given_0", (1, 33), (2, 15))
    assert any(line.startswith("sizes without guards: ") for line in artifact.report.switched_off)
    with pytest.raises(InputError, match="Its dimension 0 is 16, more than 15"):
        load(artifact.buffer).run("forward", *inputs(16))


@pytest.mark.usefixtures("with_guards")
@pytest.mark.parametrize("loop", [False, True])
def test_an_error_says_that_sizes_are_narrowed_as_torch_does_it(loop: bool) -> None:
    def rows(x: torch.Tensor) -> Any:
        mapped = torch_map(lambda row, other: row.tanh() + other, x, x.sum(0))
        zero = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, v * 0.5), (zero, mapped)) if loop else mapped

    program = export(Computes(rows), (torch.randn(3, 4),), dynamic_shapes=(({0: Dim("n", min=2, max=9)},),))
    with pytest.raises(InputError) as caught:
        lower(program)
    expected = (
        "symbolic metadata" if loop else "was declared as 2..9, but its conversion to Edge dialect holds for 3..3"
    )
    assert expected in str(caught.value) and "Off: sizes without guards: torch._subclasses" in str(caught.value)
    assert not loop or "test_dynamic_sizes.py" in str(caught.value)  # its line


EQUAL: dict[str, tuple[Callable[..., Any], Any, list[tuple[int, int]]]] = {
    "heights": (
        lambda x, y: F.avg_pool2d(x, 2) * y,
        lambda n, m: (torch.randn(1, 3, n, 8), torch.randn(1, 3, m, 4)),
        [(8, 4), (4, 2), (9, 4), (32, 16)],
    ),
    "rows and columns": (
        lambda x, y: F.max_pool2d(x, 2).flatten(2).mT[:, :, :2] @ y,
        lambda n, m: (torch.randn(1, 2, n, 2), torch.randn(1, 2, m)),
        [(8, 4), (32, 4), (6, 9)],
    ),
    "what is side by side": (
        lambda x, y: torch.cat([F.avg_pool2d(x, 2), y], 1),
        lambda n, m: (torch.randn(1, 3, n, 8), torch.randn(1, 2, m, 4)),
        [(8, 4), (5, 2), (32, 16)],
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_sizes_that_are_equal_by_a_guard_may_have_other_bounds(name: str) -> None:
    function, inputs, calls = EQUAL[name]
    shapes = (({2: Dim.AUTO(min=4, max=33)}, {2: Dim.AUTO(min=2, max=20)}),)
    program = export(Computes(function), inputs(8, 4), dynamic_shapes=shapes)
    content = lower(program, "xnnpack").emit().buffer
    _check(Computes(function), content, [inputs(*call) for call in calls])


def test_rows_that_are_regrouped_have_a_bound_that_is_no_multiple() -> None:
    model = Computes(lambda x: (x * 2).view(-1, 16) + 1)
    program = export(model, (torch.randn(4, 8),), dynamic_shapes=(({0: Dim.AUTO(min=2, max=33)},),))
    _check(model, lower(program, "xnnpack").emit().buffer, [(torch.randn(n, 8),) for n in (2, 32, 4)])
