"""What was most likely a mistake at export is a warning of `plan` and `lower`, in plans and on the command line."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export
from torch.nn import functional as F

from exir_lowering import InputError, load, lower, plan
from exir_lowering.cli import main
from exir_lowering.errors import ExportWarning


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.conv(x)))


class Call(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


IMAGE = torch.ones(2, 3, 4, 4)


def told(function: Any, *arguments: Any, **named: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = function(*arguments, **named)
    report = getattr(made, "report", made)
    found = [one for one in caught if one.category is ExportWarning]
    assert all(one.filename == __file__ for one in found)  # where the caller is
    assert list(report.warnings) == [str(one.message) for one in found]
    return list(report.warnings)


@pytest.mark.parametrize("function", [plan, lower])
def test_training_mode(function: Any) -> None:
    program = export(Net().train(), (IMAGE,))
    (text,) = told(function, program, "xnnpack")
    assert "batch norm computes statistics (1 x) and dropout is active (1 x)" in text
    assert "Call model.eval() before export" in text and "return self.drop(self.norm(" in text
    assert told(function, export(Net().eval(), (IMAGE,)), "xnnpack") == []


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Call(F.dropout), "dropout is active (1 x)"),
        (Call(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)), "dropout is active"),
        (nn.BatchNorm2d(3), "batch norm computes statistics"),
        (nn.Dropout(0.0), ""),
        (nn.InstanceNorm2d(3), ""),  # it computes statistics in any mode, as does the next one
        (nn.BatchNorm2d(3, track_running_stats=False), ""),
        (nn.Sequential(nn.Flatten(2), nn.GRU(16, 4, 2, dropout=0.0, batch_first=True)), ""),
    ],
    ids=str,
)
def test_what_is_training_mode_and_what_is_not(model: nn.Module, words: str) -> None:
    found = told(plan, export(model.train(), (IMAGE,)))
    assert (words in found[0]) if words else found == []


@pytest.mark.parametrize("size", [Dim("n"), Dim.AUTO], ids=str)
def test_a_size_without_an_upper_bound_is_told_with_its_line(size: Any) -> None:
    program = export(Call(lambda x: torch.sin(x) * 2), (torch.ones(5, 8),), dynamic_shapes=({0: size},))
    for function in (plan, lower):
        (text,) = told(function, program, "xnnpack")
        assert "dimension 0 of x has no largest size" in text and "at most 5, that of the example" in text
        assert "a Dim that has a max" in text and "self.function(x)" in text
    shapes = ({0: Dim("n", max=64)},)
    assert told(plan, export(Call(torch.sin), (torch.ones(5, 8),), dynamic_shapes=shapes)) == []


def test_variants_of_a_method_are_told_once() -> None:
    found = told(plan, export(nn.Dropout(0.5).train(), (IMAGE,)), variants={"a": "xnnpack", "b": None})
    assert len(found) == 1 and "'forward@a'" in found[0]


def test_the_command_line_says_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(export(Net().train(), (IMAGE,)), path)
    assert main(["lower", str(path), "-p", "xnnpack", "-o", str(tmp_path / "model.pte"), "--no-cache"]) == 0
    assert "warning: Method 'forward' was exported in training mode" in capfd.readouterr().err
    assert main(["plan", str(path), "-p", "xnnpack"]) == 0
    printed = capfd.readouterr()
    assert "Warning: Method 'forward' was exported in training mode" in printed.out and not printed.err


ROWS = torch.randn(2, 16)
ASSUMING = {
    "a product of a size": (
        lambda x: x[:, : int(x.shape[1] * 0.5)] * 2,
        "math.trunc(0.5*torch.sym_float(size)) == 8",
        16,
    ),
    "a multiple": (lambda x: x.view(2, x.shape[1] // 4, -1).sum(1), "size // 4", None),
}


@pytest.mark.parametrize("case", ASSUMING)
@pytest.mark.parametrize("stored", [False, True], ids=["made here", "from a file"])
def test_what_export_assumed_of_a_size_is_told_and_small_sizes_are_refused(
    case: str, stored: bool, tmp_path: Path
) -> None:
    function, guard, least = ASSUMING[case]
    program = export(Call(function), (ROWS,), dynamic_shapes=({1: Dim.AUTO},))
    if stored:
        torch.export.save(program, tmp_path / "model.pt2")
        program = torch.export.load(tmp_path / "model.pt2")
    found = [text for text in told(plan, program) if "torch.export assumed" in text]
    assert len(found) == 1 and guard in found[0] and "dimension 1 of input x. Of the sizes" in found[0]
    loaded = load(lower(program).emit().buffer)
    (got,) = loaded.run("forward", ROWS)
    torch.testing.assert_close(got, function(ROWS))
    for size in (2, least - 1) if least is not None else ():
        with pytest.raises(InputError, match=f"at least {least}"):
            loaded.run("forward", ROWS[:, :size])


@pytest.mark.parametrize(
    ("size", "most", "guard", "wrong"),
    [(16, 202, "% 2) == 0", "3, 5, 7"), (16, None, "% 2) == 0", "3, 5, 7"), (15, 200, "% 2) != 0", "2, 4, 6")],
)
def test_every_second_size_is_told_and_none_is_refused(size: int, most: int | None, guard: str, wrong: str) -> None:
    model, rows = Call(lambda x: x * 2 if x.shape[1] % 2 == 0 else x), ROWS[:, :size]
    program = export(model, (rows,), dynamic_shapes=({1: Dim.AUTO(max=most)},))
    found = [text for text in told(plan, program) if "torch.export assumed" in text]
    assert len(found) == 1 and guard in found[0] and f"does not hold for {wrong} and" in found[0]
    loaded = load(lower(program).emit().buffer)
    (got,) = loaded.run("forward", rows[:, 6:])
    torch.testing.assert_close(got, model(rows[:, 6:]))


def test_small_sizes_of_very_many_are_refused() -> None:
    program = export(
        Call(lambda x: x * 2 if (x.shape[1] // 3) * (x.shape[1] // 5) > 3 else x),
        (ROWS,),
        dynamic_shapes=({1: Dim.AUTO(max=1 << 20)},),
    )
    assert [text for text in told(plan, program) if "torch.export assumed" in text]
    loaded = load(lower(program).emit().buffer)
    (got,) = loaded.run("forward", ROWS)
    torch.testing.assert_close(got, ROWS * 2)
    with pytest.raises(InputError, match="at least 10"):
        loaded.run("forward", ROWS[:, :9])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, :4] + 1,
        lambda x: x.mean(1),
        lambda x: x[:, ::2] + x[:, :1],
        lambda x: x * 2 if x.shape[1] > 8 else x,
    ],
)
def test_guards_that_hold_for_all_sizes_are_not_told(function: Any) -> None:
    program = export(Call(function), (ROWS,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    assert not [text for text in told(plan, program) if "torch.export assumed" in text]
