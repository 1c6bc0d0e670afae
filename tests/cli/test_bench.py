"""`exir-lower bench`, and what `run` says of time and of PyTorch's results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.export import export

from exir_lowering import cli, lower
from exir_lowering.runtime.profiling import Profile, ProfileRow

Main = Callable[..., tuple[int, str, str]]


class Net(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        shift.add_(1)
        return {"y": torch.sin(self.linear(x)) + shift, "n": self.calls * 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, width, partitioner in (("small", 8, "xnnpack"), ("large", 512, None)):
        inputs = (torch.ones(2, width),), {"shift": torch.zeros(width)}
        program = export(Net(width).eval(), *inputs)
        torch.export.save(program, folder / f"{name}.pt2")
        lower(program, partitioner).emit().save(folder / f"{name}.pte")
    return folder


@pytest.fixture
def main(capsys: pytest.CaptureFixture[str]) -> Main:
    def run(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(a) for a in argv])
        return (code, *capsys.readouterr())

    return run


def test_bench_measures_each_file_in_a_process_of_its_own(main: Main, files: Path) -> None:
    small, large = files / "small.pte", files / "large.pte"
    code, out, err = main("bench", small, "--against", large, "--runs", "20", "--json")
    assert code == 0, err
    found = json.loads(out)
    for path, one in zip((small, large), found["files"], strict=True):
        seconds = one["seconds"]
        assert len(seconds["all"]) == one["runs"] == 20 and min(seconds["all"]) == seconds["least"] > 0
        cuts = [seconds[name] for name in ("least", "p25", "median", "p75", "p90", "p99")]
        assert cuts == sorted(cuts)
        assert one["bytes"]["file"] == path.stat().st_size and sum(one["bytes"]["planned"]) > 0
    assert found["ratio"]["p25"] <= found["ratio"]["median"] <= found["ratio"]["p75"] < 1
    grew = {one["file"]: one["bytes"]["grew"] for one in found["files"]}
    # Whether it is first, second or alone: Python, PyTorch and the start of the runtime are not counted.
    code, out, _ = main("bench", large, "--runs", "2")
    assert code == 0 and "spread" in out and "p99" in out and "planned" in out
    ((name, count),) = re.findall(r"^(\S+): .* grew by .*?([\d,]+) bytes, beyond", out, re.MULTILINE)
    assert abs(grew[name] - int(count.replace(",", ""))) < 2_000_000


def test_bench_says_what_is_wrong(main: Main, files: Path) -> None:
    for argv, part in (
        ((files / "none.pte",), "There is no file"),
        ((files / "small.pte", "--runs", "1"), "--runs of at least 2"),
        ((files / "small.pte", "--method", "forwart"), "Did you mean 'forward'?"),
    ):
        code, out, err = main("bench", *argv)
        assert (code, out) == (2, "") and part in err and err.count("\n") == 2


def test_a_profile_by_operator_adds_up_all_delegates(main: Main, files: Path) -> None:
    def row(kind: str, name: str, number: int, milliseconds: float, *sources: str) -> ProfileRow:
        backend = "" if kind in ("method", "kernel") else "toy"
        return ProfileRow(kind, name, backend, number, (number,), 2, milliseconds, milliseconds / 10, sources)

    rows = (
        row("method", "forward", -1, 10.0),
        row("delegate", "delegate 0", 1, 3.0),
        row("instruction", "Add (ND) #1", 1, 0.5),
        row("instruction", "Add (ND) #2", 1, 2.0),
        row("kernel", "sin", 2, 0.25, "a"),
        row("delegate", "delegate 1", 3, 4.0),
        row("instruction", "Add (ND) #1", 3, 3.0),
        row("kernel", "sin", 4, 0.75, "a", "b"),
    )
    found = Profile("forward", 2, rows).by_operator()
    assert [(one.name, one.calls, one.milliseconds) for one in found.rows] == [
        ("forward", 2, 10.0),
        ("Add (ND)", 6, 5.5),
        ("delegate", 4, 1.5),
        ("sin", 4, 1.0),
    ]
    _, add, own, sin = found.rows
    assert (add.kind, add.backend, own.kind, sin.share) == ("instruction", "toy", "delegate", 0.1)
    assert sin.handles == (2, 4) and sin.sources == ("a", "b")
    assert "  Add (ND) (toy) " in found.to_text() and len(found.by_time(1).rows) == 2


def test_a_profile_has_what_takes_longest_first(main: Main, files: Path) -> None:
    def row(kind: str, name: str, number: int, milliseconds: float) -> ProfileRow:
        return ProfileRow(kind, name, "toy", number, (), 1, milliseconds, milliseconds / 10, ())

    rows = (
        row("method", "forward", -1, 10.0),
        row("kernel", "a", 0, 2.5),
        row("delegate", "d", 1, 3.0),
        row("instruction", "d1", 1, 0.5),
        row("instruction", "d2", 1, 2.0),
        row("kernel", "b", 2, 4.0),
    )
    profile = Profile("forward", 1, rows)
    assert [one.name for one in profile.by_time().rows] == ["forward", "b", "d", "a", "d2", "d1"]
    assert [one.name for one in profile.by_time(3).rows] == ["forward", "b", "d", "a"]
    # An instruction stands under its delegate, or else says whose it is.
    assert "    d2   " in profile.to_text() and "  d2 (toy) " in profile.by_time().to_text()
    argv = ("run", files / "large.pte", "--profile", "--runs", "5")
    code, out, err = main(*argv, "--top", "2")
    assert code == 0 and "more rows; leave out --top to see all" in out and "5 runs" in out, err
    found = json.loads(main(*argv, "--json")[1])["rows"]
    assert (
        all(one["calls"] == 5 for one in found[:2])
        and len(json.loads(main(*argv, "--top", "2", "--json")[1])["rows"]) == 3
    )
    code, out, err = main(*argv, "--by", "operator", "--top", "1", "--json")
    (_, slowest) = json.loads(out)["rows"]
    assert code == 0 and slowest["instruction"] == -1 and slowest["calls"] % 5 == 0, err
    code, _, err = main(*argv[:-3], "--top", "2")
    assert code == 2 and "--top applies to the profile: give --profile too" in err
