"""The store: whatever happens to its files, a result is right or a miss."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from cached import CALLS, missed, trace

from exir_lowering.errors import CacheWarning
from exir_lowering.steps.cache.keys import Key, make_key
from exir_lowering.steps.cache.results import DamagedError, restore_results
from exir_lowering.steps.cache.store import Store

LIMIT = 1 << 20


def _key(text: str = "", kind: str = "preprocess") -> Key:
    return make_key(kind, {"graph": [text], "weights": ["w"]})


def _store(folder: Path, limit: int = LIMIT) -> Store:
    return Store(folder, limit)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store = _store(tmp_path)
    chunks = [b"", b"short", b"l" * 5000, b"l" * 5000]
    store.write(_key(), {"a": [1, None, "x"]}, chunks)
    for _ in range(2):
        found = _store(tmp_path).read(_key())
        assert found is not None and found.value == {"a": [1, None, "x"]} and list(found.chunks) == chunks
    assert _store(tmp_path).read(_key("other")) is None
    assert _store(tmp_path).read(_key(kind="edge")) is None
    assert len(list(tmp_path.glob("*.chunk"))) == 1
    assert {path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {0}


def _sealed(description: object, version: int = 1) -> bytes:
    """Return an entry whose digest is right."""
    text = json.dumps(description).encode()
    rest = struct.pack("<I", len(text)) + text
    return struct.pack("<8sI32s", b"EXIRLOWC", version, hashlib.sha256(rest).digest()) + rest


def _facts() -> list[object]:
    return ["preprocess", _key().digest, dict(_key().parts)]


class _Bomb:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, ("touch bomb",)


_HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "pickle": pickle.dumps(_Bomb()),
    "foreign": b"\0" * 500,
    "another version": _sealed([_facts(), 1, []], version=2),
    "another key": _sealed([["preprocess", "0" * 64, {}], 1, []]),
    "no list": _sealed({"a": 1}) + b"x",
    "not three": _sealed([1, 2]),
    "no sizes": _sealed([_facts(), 1, 5]),
    "negative": _sealed([_facts(), 1, [[-5, None]]]),
    "huge": _sealed([_facts(), 1, [[1 << 60, None]]]),
    "no number": _sealed([_facts(), 1, [["a", None]]]),
    "a path": _sealed([_facts(), 1, [[4, "../../../etc/passwd"]]]),
    "absolute": _sealed([_facts(), 1, [[4, "/etc/passwd"]]]),
    "not text": _sealed([_facts(), 1, [[4, ["a"]]]]),
    "missing": _sealed([_facts(), 1, [[4, "a" * 64]]]),
    "deep": b"",
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_entries_are_misses_and_dropped(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store, path = _store(tmp_path / "store"), tmp_path / "store" / f"preprocess-{_key().digest}.entry"
    content = _HOSTILE[name]
    if name == "deep":
        text = b"[" * 100_000 + b"]" * 100_000
        rest = struct.pack("<I", len(text)) + text
        content = struct.pack("<8sI32s", b"EXIRLOWC", 1, hashlib.sha256(rest).digest()) + rest
    path.write_bytes(content)
    store.find_nearest(_key("other"), None)
    assert store.read(_key()) is None
    assert not path.exists() and not (tmp_path / "bomb").exists()
    store.write(_key(), 1, [])
    assert store.read(_key()) is not None


def test_every_damaged_byte_is_a_miss(tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.write(_key(), {"a": 1}, [b"short", b"l" * 5000])
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for path, content in files.items():
        for at in range(0, len(content), max(len(content) // 150, 1)):
            for damaged in (content[:at], content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]):
                for other, whole in files.items():
                    other.write_bytes(whole)
                path.write_bytes(damaged)
                assert store.read(_key()) is None
                assert not path.exists()


def test_links_pipes_and_folders_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    _store(outside).write(_key(), 1, [b"l" * 5000])
    entry, chunk = next(outside.glob("*.entry")), next(outside.glob("*.chunk"))
    store = _store(tmp_path / "store")
    (store.folder / entry.name).symlink_to(entry)
    assert store.read(_key()) is None and entry.exists() and not (store.folder / entry.name).is_symlink()
    (store.folder / entry.name).write_bytes(entry.read_bytes())
    (store.folder / chunk.name).symlink_to(chunk)
    assert store.read(_key()) is None and chunk.exists()
    os.mkfifo(store.folder / entry.name)
    assert store.read(_key()) is None
    (store.folder / entry.name).mkdir()
    assert store.read(_key()) is None
    with pytest.raises(OSError):
        store.write(_key(), 1, [])
    (store.folder / "mine.txt").write_text("kept")
    store.clear()
    assert (store.folder / "mine.txt").exists()


def test_what_was_not_used_for_longest_is_removed_first(tmp_path: Path) -> None:
    store = _store(tmp_path, 100_000)
    for number in range(30):
        store.write(_key(str(number)), number, [bytes([number]) * 5000])
        assert store.read(_key("0")) is not None
        assert store.content().size <= 120_000
    store.trim()
    assert store.content().size <= 100_000
    assert store.read(_key("29")) is not None and store.read(_key("1")) is None
    assert not store.write(_key("large"), 1, [b"l" * 60_000])
    assert store.read(_key("large")) is None


def test_what_a_killed_process_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    store = _store(tmp_path)
    old, new = (tmp_path / f".{digit * 16}.tmp" for digit in "ab")
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    store.trim()
    assert not old.exists() and new.exists()
    store.clear()
    assert not new.exists()


@pytest.mark.parametrize(
    "value",
    [
        None,
        [{}],
        [{"payload": 5, "handles": None}],
        [{"payload": -1, "handles": None}],
        [{"payload": True, "handles": None}],
        [{"payload": 0, "handles": [[1, "eval", [1]]]}],
        [{"payload": 0, "handles": [[1, "tuple", ["1"]]]}],
        [{"payload": 0, "handles": [[None, "int", [1]]]}],
        [{"payload": 0, "handles": None, "data": [0, 9, [], []]}],
        [{"payload": 0, "handles": None, "data": [0, 1, [["key", 4, 16, None]], []]}],
        [{"payload": 0, "handles": None, "data": [0, 1, [["key", 0, 0, None]], []]}],
        [{"payload": 0, "handles": None, "data": [0, 1, [["key", 0, 1, [99, [], []]]], []]}],
        [{"payload": 0, "handles": None, "info": 7}],
        [[1]],
    ],
)
def test_values_that_this_version_does_not_write_are_refused(value: object) -> None:
    with pytest.raises(DamagedError):
        restore_results(value, (b"payload",))


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


TOGETHER = """
import os, sys
import cached
from cached import Tracing, trace
expected = trace(False).emit().buffer
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for round in range(3):
                for name in os.listdir(sys.argv[1]) if round else ():
                    try:
                        os.unlink(os.path.join(sys.argv[1], name))
                    except FileNotFoundError:
                        pass
                assert trace(sys.argv[1]).emit().buffer == expected
            code = 0
        finally:
            os._exit(code)
    children.append(child)
for child in children:
    assert os.waitpid(child, 0)[1] == 0
"""


def test_processes_write_at_once(tmp_path: Path) -> None:
    done = forked.run(TOGETHER, tmp_path, env=_paths())
    assert done.returncode == 0, done.stderr


def test_a_folder_that_another_user_owns_is_a_warning(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    folder = tmp_path / "store"
    folder.mkdir(mode=0o500)
    with pytest.warns(CacheWarning):
        trace(folder)


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
def test_a_folder_to_which_everybody_can_write_is_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.warns(CacheWarning, match="Every user of this machine can write to the cache in"):
        assert missed(trace(tmp_path))
    tmp_path.chmod(0o770)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        assert not missed(trace(tmp_path))
