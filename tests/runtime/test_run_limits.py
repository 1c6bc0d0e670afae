"""Programs with limits: the same results in a process of their own, which can be interrupted and ended."""

import gc
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import forked
import pytest
import torch
from forked import is_alive, wait_until
from limited_delegates import Dying, Failing
from runtime_models import AddSin, count, program_of
from scripted import ScriptDelegate, scripted
from torch import nn
from torch.export import export

import exir_lowering
from exir_lowering import BackendFailure, InputError, LimitError, Limits, lower
from exir_lowering.errors import LoweringError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no processes to fork")
linux = pytest.mark.skipif(sys.platform != "linux", reason="no other system bounds memory")

LONG = (torch.randn(1, 8, 256, 256), torch.randn(96, 8, 7, 7))
"""Inputs with which `Convolution` takes seconds in ExecuTorch's own kernel."""


class Convolution(nn.Module):
    def forward(self, x, weight):
        return nn.functional.conv2d(x, weight, padding=3)


class Growing(nn.Module):
    def forward(self, x):
        return (x.expand(64, 1024, 1024) + 1).sum((1, 2))


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A file of less than 4 kB whose only kernel takes seconds."""
    artifact = lower(export(Convolution(), LONG)).emit()
    assert len(artifact.buffer) < 4000
    return artifact.save(tmp_path_factory.mktemp("long") / "long.pte")


def load(source, limits=Limits(), **options):  # noqa: B008  # frozen
    return exir_lowering.load(source, limits=limits, **options)


def pid_of(program):
    return program._engine._worker.pid


class TestResults:
    def test_are_those_without_limits(self, two_methods_file, numbers):
        x = torch.randn(3, 3, 8, 8).to(memory_format=torch.channels_last)
        plain, limited = exir_lowering.load(two_methods_file), load(two_methods_file)
        assert limited.method_names == plain.method_names
        for method, value in [("forward", x), *[("count", torch.ones(3))] * 3, ("forward", x[:1])]:
            (expected,), (got,) = plain.run(method, value), limited.run(method, value)
            assert torch.equal(got, expected) and got.stride() == expected.stride()
        plain, limited = exir_lowering.load(numbers), load(numbers)
        assert limited.run("version") == plain.run("version") == [3]
        values = (torch.ones(3), 2.5, True, None)
        assert torch.equal(limited.run("forward", *values)[0], plain.run("forward", *values)[0])

    def test_with_data_files_and_a_profile(self, tmp_path):
        artifact = lower(program_of(nn.Linear(4, 3), torch.randn(2, 4)), "xnnpack").emit(external_weights="weights")
        path, x = artifact.save(tmp_path / "model.pte"), torch.randn(2, 4)
        contents = list(artifact.data_files.values())
        expected = exir_lowering.load(path, data=contents).run("forward", x)[0]
        for given in (contents, [tmp_path / name for name in artifact.data_files]):
            limited = load(path, data=given)
            torch.testing.assert_close(limited.run("forward", x)[0], expected)
            assert limited.profile("forward", x, runs=2).runs == 2

    def test_of_delegates(self):
        file = scripted(export(AddSin(), (torch.randn(3), torch.randn(3))), _all()).buffer
        limited = load(file, delegates={"script": ScriptDelegate})
        x, y = torch.randn(3), torch.randn(3)
        torch.testing.assert_close(limited.run("forward", x, y)[0], torch.sin(x + y))
        with pytest.raises(InputError, match=r"an object of scripted:ScriptDelegate was given.*pass its class"):
            load(file, delegates={"script": ScriptDelegate()})

        class Here(ScriptDelegate):
            pass

        with pytest.raises(InputError, match="define it at the top of a module"):
            load(file, delegates={"script": Here})


def _all():
    from executorch.exir.backend.canonical_partitioners.all_node_partitioner import AllNodePartitioner

    return AllNodePartitioner("script", [])


class TestErrors:
    def test_are_those_without_limits(self, fixed):
        def message(call):
            with pytest.raises(LoweringError) as caught:
                call()
            return type(caught.value), str(caught.value)

        limited, plain = load(fixed), exir_lowering.load(fixed)
        for arguments in ((), (torch.ones(2, 3, 8),), ([],)):
            assert message(partial(limited.run, "forward", *arguments)) == message(
                partial(plain.run, "forward", *arguments)
            )
        file = scripted(export(AddSin(), (torch.randn(3), torch.randn(3))), _all()).buffer
        _, text = message(lambda: load(file).run("forward", torch.ones(3), torch.ones(3)))
        assert "script" in text and len(text) > 60
        with pytest.raises(BackendFailure, match="out of order") as caught:
            load(file, delegates={"script": Failing}).run("forward", torch.ones(3), torch.ones(3))
        assert "ValueError: out of order" in str(caught.value.__cause__)

    def test_a_process_that_dies_is_named_and_the_next_run_has_a_new_one(self):
        file = scripted(export(AddSin(), (torch.randn(3), torch.randn(3))), _all()).buffer
        limited, inputs = load(file, delegates={"script": Dying}), (torch.ones(3), torch.ones(3))
        limited.run("forward", *inputs)
        with pytest.raises(InputError, match=r"was ended by SIGKILL.*begins in a new process"):
            limited.run("forward", *inputs)
        limited.run("forward", *inputs)

    @pytest.mark.parametrize("wrong", [{"seconds": 0}, {"seconds": float("nan")}, {"seconds": True}, {"memory": -1}])
    def test_limits_are_checked(self, wrong, fixed):
        (name,) = wrong
        with pytest.raises(InputError, match=rf"Limits\({name}=.*expected"):
            Limits(**wrong)
        with pytest.raises(InputError, match="load: limits: got 3, expected"):
            load(fixed, limits=3)


class TestSeconds:
    def test_end_a_single_kernel_while_other_threads_go_on(self, long):
        limited, counted, done = load(long, limits=Limits(seconds=1)), [], threading.Event()

        def tick():
            while not done.wait(0.002):
                counted.append(time.monotonic())

        thread = threading.Thread(target=tick)
        thread.start()
        try:
            start = time.monotonic()
            with pytest.raises(LimitError, match=r"took more than 1 seconds, which is limits.seconds") as caught:
                limited.run("forward", *LONG)
            end = time.monotonic()
        finally:
            done.set()
            thread.join()
        assert caught.value.limit == "seconds"
        assert sum(start < at < end for at in counted) > 20
        assert end - start < 10

    def test_after_which_the_state_is_the_first(self, tmp_path, long):
        programs = {"count": count(), "long": export(Convolution(), LONG)}
        limited = load(lower(programs).emit().buffer, limits=Limits(seconds=1))
        assert [limited.run("count", torch.ones(3))[0][0].item() for _ in range(2)] == [2, 4]
        with pytest.raises(LimitError):
            limited.run("long", *LONG)
        assert limited.run("count", torch.ones(3))[0][0].item() == 2


@linux
class TestMemory:
    def test_is_bounded_and_then_the_program_goes_on(self):
        file, x = lower(export(Growing(), (torch.ones(64, 1, 1),))).emit().buffer, torch.ones(64, 1, 1)
        program, bounds = load(file, Limits(memory=700 << 20)), set()
        for _ in range(2):  # in one process, whose bound stays, and which does not have the file open twice
            assert program.run("forward", x)[0].shape == (64,)
            bounds.add((pid_of(program), Path(f"/proc/{pid_of(program)}/limits").read_text()))
            program.reset()
        assert len(bounds) == 1
        with pytest.raises(LimitError, match=r"takes more memory than the 67,108,864 bytes of limits.memory") as caught:
            load(file, Limits(memory=64 << 20)).run("forward", x)
        assert caught.value.limit == "memory"

    def test_that_a_backend_does_not_name_is_named(self):
        linear, x = nn.Linear(2048, 2048), torch.ones(1, 2048)
        file = lower(export(linear, (x,)), "xnnpack").emit().buffer
        with pytest.raises((InputError, LimitError), match=r"1,048,576 bytes of limits.memory"):
            load(file, limits=Limits(memory=1 << 20)).run("forward", x)


class TestProcesses:
    def test_end_with_the_program(self, fixed):
        limited = load(fixed)
        pid = pid_of(limited)
        assert is_alive(pid)
        del limited
        gc.collect()
        wait_until(lambda: not is_alive(pid), 10)

    def test_an_interrupt_ends_them(self, long):
        limited = load(long)
        pid, threads = pid_of(limited), threading.active_count()
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            limited.run("forward", *LONG)
        assert time.monotonic() - start < 5
        timer.join()
        wait_until(lambda: not is_alive(pid), 10)
        assert threading.active_count() == threads
        limited._engine.start()
        assert pid_of(limited) != pid

    def test_end_in_the_middle_of_a_kernel_when_their_parent_is_killed(self, long, tmp_path):
        done = forked.run(KILLED, long, tmp_path / "pid", timeout=120)
        assert done.returncode == -signal.SIGKILL, done.stderr
        pid = int((tmp_path / "pid").read_text())
        wait_until(lambda: not is_alive(pid), 2)

    def test_belong_to_the_process_that_loaded_the_file(self, fixed):
        limited, x = load(fixed), torch.ones(2, 3, 8, 8)
        child = os.fork()
        if child == 0:
            try:
                limited.run("forward", x)
            except InputError as error:
                os._exit(0 if "that this one was forked from" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert len(limited.run("forward", x)) == 1


KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from exir_lowering import Limits, load
program = load(sys.argv[1], limits=Limits())
Path(sys.argv[2]).write_text(str(program._engine._worker.pid))
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
program.run("forward", torch.randn(1, 8, 256, 256), torch.randn(96, 8, 7, 7))
"""


def test_the_current_folder_is_gone(tmp_path, monkeypatch):
    given = torch.randn(4), torch.randn(4)
    content = bytes(lower(program_of(AddSin(), *given)).emit().buffer)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    early = load(content)
    gone.rmdir()
    late = load(content)
    os.kill(pid_of(early), signal.SIGKILL)
    with pytest.raises(InputError, match="SIGKILL"):
        early.run("forward", *given)
    for program in (early, late):
        torch.testing.assert_close(program.run("forward", *given), [AddSin()(*given)])


def test_a_signal_handler_cannot_call_what_is_running(long):
    program, refused = load(long), []

    def again(*_):
        with pytest.raises(InputError, match="while a call of it is running") as error:
            program.run("forward", *LONG)
        refused.append(error.value)

    previous = signal.signal(signal.SIGALRM, again)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        (result,) = program.run("forward", *LONG)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert len(refused) == 1 and result.shape == Convolution()(*LONG).shape
