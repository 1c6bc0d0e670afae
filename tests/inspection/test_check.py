"""`check`: what it says of a file is what the release's runtime does with it."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import forked
import pytest
import torch
from record_releases import RUNNER, run_cases, unpack
from release_cases import model_cases, operator_cases
from release_probes import Case
from torch.export import export

from exir_lowering import InputError, LoweringOptions, cli, lower
from exir_lowering.inspection.compatibility import check
from exir_lowering.pte.releases import Target, find_release, known_releases, read_targets


class Next(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nextafter(x, x + 1)


class Images(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat = torch.nn.Conv2d(3, 4, 3)
        self.deep = Next()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.deep(self.flat(x))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    linear = export(torch.nn.Linear(4, 3).eval(), (torch.ones(2, 4),))
    lower(linear).emit().save(folder / "linear.pte")
    lower({"forward@a": linear, "forward@b": linear}, {"forward@a": "xnnpack", "forward@b": []}).emit().save(
        folder / "family.pte"
    )
    options = LoweringOptions(unsupported="allow")
    artifact = lower(export(Images().eval(), (torch.ones(1, 3, 8, 8),)), options=options).emit()
    artifact.save(folder / "images.pte")
    return folder


def _verdicts(cases: list[Case], release: str, outcomes: list[str]) -> dict[str, int]:
    counts = dict.fromkeys(("runs", "unknown", "does not run"), 0)
    target = Target(release, find_release(release))
    for (content, *_), outcome in zip(cases, outcomes, strict=True):
        [found] = check(content, [target])
        counts[found.verdict] += 1
        assert found.verdict != "runs" or outcome == "pass", (outcome, found.to_text())
        assert found.verdict != "does not run" or outcome != "pass", found.to_text()
    return counts


def _run(cases: list[Case], release: str, folder: Path, wheel: Path) -> list[str]:
    torch.save(cases, folder / "cases.pt")
    return run_cases(wheel, sys.executable, folder / "cases.pt")


def test_what_runs_in_this_release(tmp_path: Path) -> None:
    cases = list(itertools.islice(operator_cases(0.05), 16))
    torch.save(cases, tmp_path / "cases.pt")
    done = forked.run(RUNNER, tmp_path / "cases.pt", tmp_path / "results")
    assert done.returncode == 0, done.stderr
    counts = _verdicts(cases, "1.5.1", (tmp_path / "results").read_text().splitlines())
    assert counts["runs"] > 0.6 * len(cases) > 5, counts


RELEASES = os.environ.get("EXIR_LOWERING_RELEASES", "").split()


@pytest.mark.skipif(not RELEASES, reason="EXIR_LOWERING_RELEASES names no releases to download")
@pytest.mark.parametrize("release", RELEASES)
def test_what_runs_in_other_releases(release: str, tmp_path: Path) -> None:
    cases = [*model_cases("mobilenet_v2", "bert", "vit", "llama"), *operator_cases(0.05)]
    counts = _verdicts(cases, release, _run(cases, release, tmp_path, unpack(release, tmp_path)))
    assert counts["runs"] > 0.6 * len(cases), counts


def test_the_line_and_what_to_do(folder: Path) -> None:
    [found] = check(folder / "images.pte", [Target("old", find_release("1.4.1"))])
    assert found.verdict == "does not run"
    [finding] = [each for each in found.findings if each.verdict == "does not run"]
    assert finding.what == "aten::nextafter.out" and "no such kernel" in finding.why
    assert "torch.nextafter(x, x + 1)" in finding.where[-1]


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    linear, images = str(folder / "linear.pte"), str(folder / "images.pte")
    assert cli.main(["check", linear, "--runtime", "1.4.1, 1.5.1"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "ExecuTorch 1.4.1: runs"
    assert cli.main(["check", images, "--runtime", "1.4.1", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["runtimes"][0]["verdict"] == "does not run"
    assert cli.main(["check", linear]) == 0
    assert capsys.readouterr().out == "ExecuTorch 1.5.1: runs\n  forward: runs\n"
    assert cli.main(["check", linear, "--runtime", "0.1.0"]) == 2
    assert "only of " in " ".join(capsys.readouterr().err.split())


class Positions(torch.nn.Module):
    """Takes a kernel in a way that no release was seen to run: a slice up to a dynamic size, of integers."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(16).view(1, 16))
        self.branches = branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.ids[:, : x.shape[1]]
        if not self.branches:
            return y
        return torch.cond(y.sum() > 0, lambda a: a + 1, lambda a: a - 1, (y,))  # type: ignore[no-any-return]


def test_the_runtime_that_is_here_is_asked_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for branches, verdict in ((False, "runs (it was run here)"), (True, "unknown")):
        shapes = ({1: torch.export.Dim("length", min=2, max=16)},)
        program = export(Positions(branches), (torch.ones(1, 8),), dynamic_shapes=shapes)
        lower(program).emit().save(path := tmp_path / f"{branches}.pte")
        assert cli.main(["check", str(path), "--runtime", "1.4.1,1.5.1"]) == 2
        out = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  forward")]
        assert out == ["  forward: unknown", f"  forward: {verdict}"]  # one run does not take both branches


def test_of_a_family_the_method_that_its_manifest_chooses_counts(folder: Path) -> None:
    for backends, verdicts in (
        ([], {"forward@a": "does not run", "forward@b": "runs", "get_manifest": "runs"}),
        (["XnnpackBackend"], {"forward@a": "runs", "forward@b": "runs", "get_manifest": "runs"}),
    ):
        target = Target("mine", find_release("1.5.1"), backends=frozenset(backends))
        [found] = check(folder / "family.pte", [target])
        assert found.methods == verdicts and found.verdict == "runs"
    kernels = dict.fromkeys(find_release("1.5.1").kernels.keys() - {"aten::addmm.out", "aten::linear.out"})
    assert check(folder / "family.pte", [Target("a", find_release("1.5.1"), kernels)])[0].verdict == "runs"
    target = Target("b", find_release("1.5.1"), kernels, frozenset())
    assert check(folder / "family.pte", [target])[0].verdict == "does not run"  # b is chosen, which lacks a kernel


def _targets(folder: Path, content: object) -> list[Target]:
    path = folder / "targets.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_targets(path)


def test_targets(folder: Path) -> None:
    base = {"name": "mine", "runtime": "1.5.1"}
    kernels = {"aten::addmm.out": ["float32"], "aten::permute_copy.out": None, "aten::linear.out": None}
    for changes, verdict in (
        ({}, "runs"),
        ({"operators": kernels}, "runs"),
        ({"operators": {**kernels, "aten::addmm.out": ["float16"]}}, "does not run"),
        ({"operators": []}, "does not run"),
        ({"max_memory": 8}, "does not run"),
        ({"max_memory": 4096, "backends": []}, "runs"),
    ):
        [found] = check(folder / "linear.pte", _targets(folder, [{**base, **changes}]))
        assert found.verdict == verdict, (changes, found.to_text())


@pytest.mark.parametrize(
    "content",
    ["", "[" * 100_000, "7", "{}", '{"name": "x"}', '{"name": "x", "runtime": 1}', '{"name": "x", "runtime": "9"}']
    + [json.dumps({"name": "x", "runtime": "1.5.1", key: 1.5}) for key in ("operators", "backends", "max_memory", "z")],
    ids=range(11),
)
def test_hostile_targets(tmp_path: Path, content: str) -> None:
    with pytest.raises(InputError, match=r"the targets (?s:.*)Expected"):
        _targets(tmp_path, content)


def test_hostile_files(folder: Path) -> None:
    content, target = (folder / "family.pte").read_bytes(), Target("mine", find_release("1.5.1"))
    assert content.count(b"forward@a\t") == 1
    for damaged in (b"", content[:200], content.replace(b"forward@a\t", b"forward@c\t"), bytes(len(content))):
        with pytest.raises(InputError, match="cannot be loaded"):
            check(damaged, [target])


def test_the_table_has_what_this_release_has() -> None:
    from exir_lowering._upstream import installed

    assert [*known_releases()][-1] == "1.5.1"
    release = find_release("1.5.1")
    assert installed.kernels() <= release.kernels.keys() and installed.own_backends() <= release.backends
