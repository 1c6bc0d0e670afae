"""The store: whatever happens to its files, a result is right or a miss."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import forked
import pytest
from cached import CALLS, missed, trace
from executorch.exir._serialize._named_data_store import NamedDataStore

from exir_lowering import PreprocessResult
from exir_lowering.errors import CacheWarning
from exir_lowering.steps.cache.store import Store

LIMIT = 1 << 20
KEY = "a" * 64


def _named(data: Mapping[str, bytes]) -> Any:
    store = NamedDataStore()
    for key, content in data.items():
        store.add_named_data(key, content, 16, external_tag="file" if key.startswith("far") else None)
    return store.get_named_data_store_output()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    results = [
        PreprocessResult(b"payload", {1: (2, 3), "a": 4, "b": {5}}, _named({"near": b"x" * 5000, "far": b"y"})),
        PreprocessResult(b"", {"npu": frozenset({1}), "cpu": [2]}),
        PreprocessResult(b"\0", None, None, _delegate_info_meta="information"),
    ]
    assert Store(tmp_path, LIMIT).write(KEY, results) == ""
    for _ in range(2):
        assert Store(tmp_path, LIMIT).read(KEY, 3) == results
    assert Store(tmp_path, LIMIT).read("b" * 64, 3) is None
    assert {path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {0}


class Unknown:
    pass


def test_results_with_objects_of_other_classes_are_not_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, LIMIT)
    assert "Unknown" in store.write(KEY, [PreprocessResult(b"", None, None, _delegate_info_meta=Unknown())])
    assert "at most" in store.write(KEY, [PreprocessResult(b"x" * LIMIT)])
    assert store.files() == []


class _Bomb:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, ("touch bomb",)


def _sealed(results: bytes) -> bytes:
    """Return an entry whose digest is right."""
    return hashlib.sha256(results).hexdigest().encode() + b"\n" + results


_HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "foreign": b"\0" * 500,
    "a pickle": pickle.dumps(_Bomb()),
    "a sealed pickle": _sealed(pickle.dumps(_Bomb())),
    "in a result": _sealed(pickle.dumps([PreprocessResult(b"", {1: _Bomb()})])),
    "no list": _sealed(pickle.dumps(5)),
    "no results": _sealed(pickle.dumps([1])),
    "another number": _sealed(pickle.dumps([PreprocessResult(b""), PreprocessResult(b"")])),
    "not whole": _sealed(pickle.dumps([PreprocessResult(b"")])[:-5]),
    "deep": _sealed(b"(" * 100_000 + b"."),
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_entries_are_misses_and_dropped(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "store", LIMIT)
    store.write(KEY, [PreprocessResult(b"")])
    (path,) = store.folder.iterdir()
    path.write_bytes(_HOSTILE[name])
    assert store.read(KEY, 1) is None
    assert not path.exists() and not (tmp_path / "bomb").exists()
    store.write(KEY, [PreprocessResult(b"")])
    assert store.read(KEY, 1) is not None


def test_every_damaged_byte_is_a_miss(tmp_path: Path) -> None:
    store = Store(tmp_path, LIMIT)
    store.write(KEY, [PreprocessResult(b"short" * 100)])
    (path,) = store.folder.iterdir()
    content = path.read_bytes()
    for at in range(0, len(content), max(len(content) // 150, 1)):
        for damaged in (content[:at], content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]):
            path.write_bytes(damaged)
            assert store.read(KEY, 1) is None
            assert not path.exists()


def test_what_was_not_used_for_longest_is_removed_first(tmp_path: Path) -> None:
    store = Store(tmp_path, 100_000)
    (tmp_path / "mine.txt").write_text("kept")
    (tmp_path / f".{'a' * 16}.tmp").write_bytes(b"half")  # of a process that was killed
    os.utime(tmp_path / f".{'a' * 16}.tmp", (1, 1))
    for number in range(30):
        store.write(f"{number:064}", [PreprocessResult(bytes([number]) * 5000)])
        assert store.read(f"{0:064}", 1) is not None
        store.trim()
        assert sum(state.st_size for _, state in store.files()) <= 100_000
    assert store.read(f"{29:064}", 1) is not None and store.read(f"{1:064}", 1) is None
    assert len(list(tmp_path.glob("*.tmp"))) == 0
    assert store.trim(0) > 0 and store.files() == [] and (tmp_path / "mine.txt").exists()


def test_damaged_entries_are_lowered_again(tmp_path: Path) -> None:
    expected = trace(tmp_path).emit().buffer
    for path in sorted(tmp_path.iterdir())[::2]:
        path.write_bytes(path.read_bytes()[:-1])
    again = trace(tmp_path)
    assert 0 < len(missed(again)) == len(CALLS) <= 5
    assert again.emit().buffer == expected
    assert not missed(trace(tmp_path))


FULL = """
import resource, signal, sys, warnings
from cached import trace
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
expected = trace(False)
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    lowered = trace(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, before)
assert [one.category.__name__ for one in caught if "cache" in str(one.message)] == ["CacheWarning"], caught
assert lowered.emit().buffer == expected.emit().buffer
"""


def test_a_full_disk_is_a_warning(tmp_path: Path) -> None:
    done = forked.run(FULL, tmp_path / "store", env=_paths())
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "store").glob("*.entry")) and not list((tmp_path / "store").glob(".*"))


def test_a_small_bound_keeps_little_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXIR_LOWERING_CACHE_BYTES", "30000")
    assert trace(tmp_path).emit().buffer == trace(False).emit().buffer
    assert missed(trace(tmp_path))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 40_000


KILLED = """
import os, random, signal, sys, time
import torch
import cached
from cached import Tracing, layers, partitioner
from exir_lowering import LoweringOptions
from exir_lowering.pipeline import to_backend
folder, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
Tracing.padding = 1_000_000
kept = LoweringOptions(cache=folder)
programs = [cached.lower(layers(seed=number), options=kept, partitioners=partitioner(),
                         backends={"tracing": Tracing()}).edge_programs["forward"] for number in range(3)]
def lowered(number, options):
    return to_backend(programs[number], partitioner(), backends={"tracing": Tracing()}, options=options)
expected = [lowered(number, LoweringOptions()).emit().buffer for number in range(3)]
chance = random.Random(seed)
def clear():
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))
clear()
start = time.perf_counter()
lowered(0, kept)
whole = time.perf_counter() - start
partial = 0
for round in range(count):
    if round % 3 == 0:
        clear()
    number = round % 3
    child = os.fork()
    if child == 0:
        try:
            lowered(number, kept)
        finally:
            os._exit(0)
    time.sleep(chance.random() * whole)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    after = lowered(number, kept)
    hits = sum(use.hit for use in after.report.cache)
    partial += 0 < hits < len(after.report.cache)
    assert after.emit().buffer == expected[number], round
    assert all(use.hit for use in lowered(number, kept).report.cache)
print("partial", partial)
"""


def _paths() -> dict[str, str]:
    support = str(Path(__file__).parents[2] / "support")
    return {"PYTHONPATH": os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.nightly)])
def test_a_kill_at_any_moment_leaves_nothing_wrong(count: int, tmp_path: Path) -> None:
    done = forked.run(KILLED, tmp_path, count, count, env=_paths(), timeout=1200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("partial")


def test_a_folder_that_another_user_owns_is_a_warning(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    folder = tmp_path / "store"
    folder.mkdir(mode=0o500)
    with pytest.warns(CacheWarning):
        trace(folder)
