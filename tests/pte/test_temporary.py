"""Temporary folders: removed with their owner or by the next one, and nothing else in a hostile folder is touched."""

from __future__ import annotations

import gc
import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from exir_lowering.pte.saving import TemporaryFolder

KILLED = """
import os, signal
from exir_lowering.pte.saving import TemporaryFolder
kept = TemporaryFolder()
(kept.path / "weights").write_bytes(bytes(10))
print(kept.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def left_behind(place: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", KILLED], env={**os.environ, "TMPDIR": str(place)}, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return Path(done.stdout.strip())


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def test_what_a_killed_process_left_is_removed_by_the_next_one(place: Path) -> None:
    left = left_behind(place)
    assert (left / "weights").is_file()
    with TemporaryFolder() as folder:
        (folder / "weights").write_bytes(bytes(10))
        assert names(place) == {folder.name}
        with TemporaryFolder() as other:  # the first one is alive
            assert names(place) == {folder.name, other.name}
    assert not names(place)


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


def test_what_others_planted_stays(place: Path, tmp_path: Path) -> None:
    """Links, folders that others can open, of another machine, of another owner, with folders, without a lock."""
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "owner.lock").write_text(platform.node())
    (victim / "precious").touch()
    (place / "exir-lowering-link0000").symlink_to(victim)

    def planted(name: str, mode: int = 0o700, lock: str | None = platform.node()) -> Path:
        folder = place / f"exir-lowering-{name}"
        folder.mkdir()
        folder.chmod(mode)
        if lock is not None:
            (folder / "owner.lock").write_text(lock)
        (folder / "file").touch()
        return folder

    planted("open0000", mode=0o777)
    planted("machine0", lock="another.machine")
    planted("nobodys0", lock="")
    planted("nolock00", lock=None)
    (planted("nested00") / "folder").mkdir()
    planted("longer-name")
    (planted("linked00", lock=None) / "owner.lock").symlink_to(victim / "owner.lock")
    os.mkfifo(planted("fifo0000", lock=None) / "owner.lock")
    (place / "exir-lowering-file0000").touch()
    if os.geteuid() == 0:
        os.chown(planted("foreign0"), 12345, 12345)
        os.chown(planted("foreign1") / "owner.lock", 12345, 12345)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    inside = planted("links000")  # a link in a folder of ours is removed, what it points to is not
    (inside / "weights").symlink_to(victim / "precious")
    TemporaryFolder().remove()
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    assert names(victim) == {"owner.lock", "precious"}
