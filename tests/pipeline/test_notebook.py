"""What Jupyter shows of a value: its page in a frame in which nothing runs, its text as it is printed; and the tour."""

from __future__ import annotations

import builtins
import copy
import html
import os
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fake_plans
import nbformat
import pytest
import torch
from folders import ROOT
from nbclient import NotebookClient
from pte_files import made

import exir_lowering

TOUR = ROOT / "docs" / "examples" / "tour.ipynb"
CELL = re.compile(r'/[^\s&;"]*ipykernel_\d+/\d+\.py')
"""The file that a kernel names for a cell, in a folder of this machine."""

HOSTILE = "</pre><script>document.title = 'run'</script>"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(self.linear(x), 1)


@cache
def _values() -> dict[str, Any]:
    """Return a value of each kind."""
    inputs = (torch.ones(2, 4),)
    program = torch.export.export(Net().eval(), inputs)
    lowered = exir_lowering.lower(program, "reference")
    artifact = lowered.emit()
    file = exir_lowering.inspect(artifact.buffer)
    return {
        "plan": exir_lowering.plan(program, "reference"),
        "file": file,
        "report": lowered.report,
        "verification": exir_lowering.verify(artifact, program),
        "culprit": exir_lowering.bisect(program, "reference"),
        "profile": exir_lowering.load(artifact.buffer).profile("forward", *inputs),
        "quantized": exir_lowering.quantize(program, [inputs]),
    }


class _Shown(HTMLParser):
    """The tags, the page in the frame, and the text of what a notebook gets."""

    def __init__(self, shown: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.frame: dict[str, str | None] = {}
        self.text = ""
        self.feed(shown)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.frame = dict(attrs) if tag == "iframe" else self.frame

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", ["file", "report", "verification", "culprit", "profile", "quantized"])
def test_a_text_is_shown_as_it_is_printed(name: str) -> None:
    value = _values()[name]
    shown = _Shown(value._repr_html_())
    assert shown.tags == ["pre"] and shown.text == value.to_text(width=100) != ""


def test_a_page_is_shown_in_a_frame_of_its_own() -> None:
    value = _values()["plan"]
    shown = _Shown(value._repr_html_())
    assert shown.tags == ["iframe", "details", "summary", "pre"] and shown.frame["sandbox"] == ""
    assert (shown.frame["srcdoc"] or "").replace('<base href="about:srcdoc">', "") == value.to_html()
    assert shown.text == "As text" + value.to_text(width=100)


def test_names_are_text() -> None:
    row = replace(_values()["profile"].rows[0], name=HOSTILE, sources=(HOSTILE,))
    profile = replace(_values()["profile"], method="[/]\x1b[31m", rows=(row, replace(row, name="\x1b[31m")))
    assert "\x1b" not in str(profile) + repr(profile) + profile._repr_html_()
    file = exir_lowering.inspect(made("theirs state").pte.replace(b"forward", b"<b>x</b"))
    for value in (fake_plans.hostile(), file, profile):
        shown = _Shown(value._repr_html_())
        assert set(shown.tags) <= {"iframe", "details", "summary", "pre"}
        page = shown.frame.get("srcdoc") or ""
        assert {"script", "img"}.isdisjoint(_Shown(page).tags) and "<b>x" not in page


def test_a_text_is_a_text_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel, rich shows what it should write to a file."""
    kernel = type("ZMQInteractiveShell", (), {})()
    before = {name: value.to_text() for name, value in _values().items()}
    monkeypatch.setattr(builtins, "get_ipython", lambda: kernel, raising=False)
    assert {name: value.to_text() for name, value in _values().items()} == before


# -- the tour ----------------------------------------------------------------------------------------------------------


def test_the_tour_shows_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it in a kernel; with EXIR_LOWERING_ACCEPT=1 it is written with what is shown now."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    tour = nbformat.read(TOUR, 4)
    run = copy.deepcopy(tour)
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(run, timeout=300, kernel_name="python3", record_timing=False, resources=folder).execute()
    for cell in run.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                output.data.update({kind: CELL.sub("tour.ipynb", text) for kind, text in output.data.items()})
    if os.environ.get("EXIR_LOWERING_ACCEPT"):
        nbformat.write(run, TOUR)
        tour = run
    assert [_words(cell) for cell in run.cells] == [_words(cell) for cell in tour.cells]
    assert sum(len(cell.get("outputs", ())) for cell in run.cells) == 5


def _words(cell: Any) -> list[str]:
    """Return what is to be read in a cell's outputs, but for numbers; of what was measured, the first line."""
    found = []
    for output in cell.get("outputs", ()):
        shown = _Shown(output.data["text/html"])
        page = re.sub(r"<style>.*?</style>|<[^>]*>", " ", shown.frame.get("srcdoc") or "", flags=re.DOTALL)
        text = html.unescape(page) + shown.text
        if "measured" in cell.metadata.get("tags", ()):
            text = text.strip().partition("\n")[0]
        found.append(" ".join(re.sub(r"\b[0-9a-f]{32}\b|[\d.,]+(\+\w+[\d.,]*)?", "#", text).split()))
    return found
