"""Temporary folders are removed with their owner."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest

from exir_lowering.pte.saving import TemporaryFolder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def test_it_goes_with_the_object_and_not_with_a_forked_child(place: Path) -> None:
    kept = TemporaryFolder()
    child = os.fork()
    if child == 0:
        kept.remove()
        os._exit(0)
    os.waitpid(child, 0)
    assert names(place) == {kept.path.name}
    del kept
    gc.collect()
    assert not names(place)
