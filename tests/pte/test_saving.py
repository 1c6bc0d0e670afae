"""`save` is killed at any moment: what is there then is one generation, or is refused."""

from __future__ import annotations

import os
import random
import signal
import stat
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

from exir_lowering import InputError, LoweredModule, load, lower
from exir_lowering.pte import saving

KILLS = 100
X = torch.linspace(-1, 1, 8)


class Net(nn.Module):
    """A weight for the data file, and one for the program."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight, self.bias = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * self.weight + self.bias)


def outside(name: str) -> Callable[[str, int], str | None]:
    return lambda key, size: name if key == "weight" else None


def lowered(seed: int) -> Any:
    return lower(export(Net(seed).eval(), (X,)))


@pytest.fixture(scope="module")
def generations() -> Any:
    """Two trainings of a model, with a data file of one name."""
    return [lowered(seed).emit(external_weights=outside("weights")) for seed in (0, 1)]


@pytest.fixture(scope="module")
def renamed() -> Any:
    """The same, each with a data file of its own name."""
    return [lowered(seed).emit(external_weights=outside(f"weights{seed}")) for seed in (0, 1)]


def state(folder: Path) -> str:
    """Return what the files in a folder are: a generation by its number, or what `load` refuses."""
    found = set()
    for data in sorted(folder.glob("weights*.ptd")):
        try:
            (result,) = load(folder / "net.pte", data=data).run("forward", X)
        except InputError as error:
            assert "belongs to another program" in str(error)
            continue
        with torch.no_grad():
            (right,) = [seed for seed in (0, 1) if torch.allclose(result, Net(seed)(X))]
        found.add(str(right))
    return found.pop() if found else "refused"


def killed(work: Callable[[], Any], arm: Callable[[], None]) -> bool:
    """Call a function in a forked child that was armed to be killed; tell whether it was."""
    child = os.fork()
    if child == 0:
        try:
            arm()
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


SAVING = ("steps/emit.py", "pte/saving.py", "lowered_module/module.py")
"""Where saving is written; a model's own file is none of them."""


def file_of(frame: FrameType) -> str | None:
    """Return which of the files that save a frame is in."""
    name = frame.f_code.co_filename.replace(os.sep, "/")
    return next((file for file in SAVING if name.endswith(f"exir_lowering/{file}")), None)


def traced(work: Callable[[], Any]) -> set[str]:
    """Call a function; return which of the files that save it executed lines of."""
    seen = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        file = file_of(frame)
        if file is not None and event == "line":
            seen.add(file)
        return trace if file is not None else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return seen


def at_line(number: int) -> Callable[[], None]:
    """Kill the process before the given line that saving executes."""
    left = [number]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if file_of(frame) is None:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return lambda: sys.settrace(trace)


def after(seconds: float) -> Callable[[], None]:
    """Kill the process after a time."""

    def arm() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    return arm


def temporary(folder: Path) -> list[Path]:
    return list(folder.glob(".*.tmp"))


class TestKills:
    def test_before_any_line(self, generations: Any, tmp_path: Path) -> None:
        """Data files of one name: the old pair, a pair that is refused, the new pair."""
        old, new = generations
        assert traced(lambda: old.save(tmp_path / "net.pte")) == {"steps/emit.py", "pte/saving.py"}
        seen = []
        for number in range(1, 10_000, 2):
            old.save(tmp_path / "net.pte")
            if not killed(lambda: new.save(tmp_path / "net.pte"), at_line(number)):
                break
            seen.append(state(tmp_path))
        assert state(tmp_path) == "1" and number > 60, number
        assert sorted(set(seen), key=seen.index) == ["0", "refused", "1"]
        assert seen == sorted(seen, key=["0", "refused", "1"].index)

    def test_the_old_pair_stays_whole_when_names_differ(self, renamed: Any, tmp_path: Path) -> None:
        old, new = renamed
        seen = []
        for number in range(1, 10_000, 5):
            for path in tmp_path.iterdir():
                path.unlink()
            old.save(tmp_path / "net.pte")
            if not killed(lambda: new.save(tmp_path / "net.pte"), at_line(number)):
                break
            seen.append(state(tmp_path))
        assert set(seen) == {"0", "1"} and seen == sorted(seen)

    def test_at_random_moments(self, generations: Any, tmp_path: Path) -> None:
        generator, seen = random.Random(0), Counter[str]()
        for artifact in generations:
            artifact.save(tmp_path / "net.pte")

        def alternate() -> None:
            while True:
                for artifact in generations:
                    artifact.save(tmp_path / "net.pte")

        for _ in range(KILLS):
            assert killed(alternate, after(generator.uniform(0.002, 0.04)))
            seen[state(tmp_path)] += 1
        assert seen["0"] and seen["1"] and sum(seen.values()) == KILLS, seen
        generations[0].save(tmp_path / "net.pte")
        assert state(tmp_path) == "0"

    def test_a_lowered_module(self, tmp_path: Path) -> None:
        modules = [lowered(seed).module(external_weights=outside("weights")) for seed in (0, 1)]
        for seed, module in enumerate(modules):
            module.seed = seed
            module.bundled_inputs = [(X,)]
            saved = traced(partial(module.save, tmp_path / f"warm{seed}.pte"))  # what is computed once is there
            assert saved == set(SAVING) - {"steps/emit.py"}
        generator, seen = random.Random(1), []
        for number in sorted(generator.sample(range(1, 250), 15)):
            modules[0].save(tmp_path / "net.pte")
            if not killed(lambda: modules[1].save(tmp_path / "net.pte"), at_line(number)):
                break
            seen.append(state(tmp_path))
            if seen[-1] != "refused":
                loaded = LoweredModule.load(tmp_path / "net.pte", data=tmp_path / "weights.ptd", verify="full")
                assert str(loaded.seed) == seen[-1]
        assert "0" in seen and seen == sorted(seen, key=["0", "refused", "1"].index)


class TestFiles:
    def test_a_failure_leaves_what_was_there(self, tmp_path: Path) -> None:
        first, second = tmp_path / "first", tmp_path / "second"
        first.write_bytes(b"old")

        def fail(file: Any) -> None:
            file.write(b"half")
            raise OSError("full")

        with pytest.raises(OSError, match="full"):
            saving.replace_files({first: lambda file: file.write(b"new"), second: fail}, first)
        assert first.read_bytes() == b"old" and [path.name for path in tmp_path.iterdir()] == ["first"]

    def test_a_folder_in_the_place_of_one_leaves_all_as_they_were(self, generations: Any, tmp_path: Path) -> None:
        (tmp_path / "net.pte").mkdir()
        (tmp_path / "weights.ptd").write_bytes(b"old")
        with pytest.raises(InputError, match="Is a directory"):
            generations[0].save(tmp_path / "net.pte")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["net.pte", "weights.ptd"]
        assert (tmp_path / "weights.ptd").read_bytes() == b"old"

    def test_the_mode_is_that_of_the_process(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            saving.replace_file(tmp_path / "x", lambda file: file.write(b"x"))
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640

    def test_links_stay_and_lead_to_the_new_files(self, tmp_path: Path) -> None:
        elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
        elsewhere.mkdir()
        here.mkdir()
        (elsewhere / "old.pte").write_bytes(b"old")
        (here / "model.pte").symlink_to("../elsewhere/old.pte")
        (here / "model.ptd").symlink_to(elsewhere / "new.ptd")  # which is not there yet
        content = {here / "model.ptd": b"data", here / "model.pte": b"new"}
        saving.replace_files({path: methodcaller("write", new) for path, new in content.items()}, here / "model.pte")
        assert all(path.is_symlink() and path.read_bytes() == new for path, new in content.items())
        assert sorted(path.name for path in elsewhere.iterdir()) == ["new.ptd", "old.pte"]
        assert len(list(here.iterdir())) == 2

    def test_a_file_that_somebody_writes_is_not_left_behind(self, tmp_path: Path) -> None:
        place = tmp_path / "x"

        def write(file: Any) -> None:
            file.write(b"one")
            saving.replace_file(place, lambda file: file.write(b"two"))
            assert place.read_bytes() == b"two"

        saving.replace_file(place, write)
        assert place.read_bytes() == b"one" and not temporary(tmp_path)

    def test_an_interrupt_leaves_no_temporary_file(self, generations: Any, tmp_path: Path) -> None:
        """At each line that saving executes."""
        for number in range(1, 10_000, 3):
            left = [number]

            def trace(frame: FrameType, event: str, argument: Any, left: list[int] = left) -> Any:
                if file_of(frame) is None:
                    return None
                left[0] -= event == "line"
                if left[0] == 0:
                    left[0] -= 1
                    raise KeyboardInterrupt
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                generations[0].save(tmp_path / "net.pte")
                break
            except KeyboardInterrupt:
                continue
            finally:
                sys.settrace(before)
        assert number > 60 and not temporary(tmp_path)

    def test_a_path_with_a_null_character(self, generations: Any) -> None:
        with pytest.raises(InputError, match="expected a path"):
            generations[0].save("a\0b.pte")


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    lowered = lower(export(Net(0), (X,)))
    for save in (lowered.emit().save, lowered.module().save):
        with pytest.raises(InputError, match=r"Cannot save to .* there is no directory '.*no'\. Create it first\."):
            save(tmp_path / "no" / "model.pte")
