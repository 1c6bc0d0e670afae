"""Several partitions at once, in threads and in processes of our own: the same results, failures and order."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import is_alive, wait_until
from lowering_support import TagPartitioner
from models import exported
from parallel_backends import (
    Scripted,
    ScriptedInThreads,
    Sleeping,
    Storing,
    StoringInThreads,
    chain,
    each_layer,
)

from exir_lowering import (
    Backend,
    BackendContractError,
    BackendFailure,
    LoweredMethods,
    LoweringOptions,
    PreprocessResult,
    lower,
)
from exir_lowering.steps import parallel


def lowered(program: Any, partitioner: Any, backend: Any, **options: Any) -> LoweredMethods:
    backends = {} if backend is None else {getattr(backend, "backend_id", ""): backend}
    return lower(program, partitioner, backends=backends, options=LoweringOptions(**options))


def failure(program: Any, backend: Any, do: str, file: object = "", **options: Any) -> BaseException:
    with pytest.raises((BackendFailure, BackendContractError)) as caught:
        lowered(program, each_layer("scripted", do=do, rows=12, file=file), backend, **options)
    return caught.value


class TestBytes:
    @pytest.mark.parametrize("backend", [Storing, StoringInThreads])
    def test_do_not_depend_on_the_number_of_jobs(self, backend: type[Backend]) -> None:
        program, partitioner = chain(8, width=200), each_layer("storing")  # weights that are in the shared file
        alone = lowered(program, partitioner, backend)
        assert len(alone.report.payload_bytes) == 8
        many = lowered(program, partitioner, backend, jobs=2)
        assert many.emit().buffer == alone.emit().buffer
        assert list(many.report.payload_bytes) == list(alone.report.payload_bytes)

    def test_of_xnnpack_are_those_of_one_job(self, caplog: pytest.LogCaptureFixture) -> None:
        program = exported("bert")[2]
        programs = {"first": program, "second": program}
        alone = lower(programs, "xnnpack").emit().buffer
        assert lower(programs, "xnnpack", options=LoweringOptions(jobs=2)).emit().buffer == alone
        assert not caplog.text  # nothing was lowered here

    def test_a_call_that_runs_in_the_pool_which_it_is_given_does_not_wait_for_itself(self) -> None:
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(lowered, chain(3), each_layer("storing"), StoringInThreads, executor=pool)
            assert len(run.result(60).report.payload_bytes) == 3


class Meeting(Backend):
    """Notes whether two partitions are lowered at the same time."""

    backend_id = "meeting"
    parallel = "thread"

    def __init__(self, seconds: float) -> None:
        self.barrier, self.seconds, self.met = threading.Barrier(2), seconds, 0

    def preprocess(self, program: Any, compile_specs: Any) -> PreprocessResult:
        try:
            self.barrier.wait(self.seconds)
            self.met += 1
        except threading.BrokenBarrierError:
            self.barrier.reset()
        return PreprocessResult(b"")


class TestLimits:
    def test_partitions_are_lowered_at_the_same_time(self) -> None:
        backend = Meeting(30)
        lowered(chain(4), each_layer("meeting"), backend, jobs=2)
        assert backend.met == 4

    def test_what_is_in_flight_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parallel, "MOST_BYTES", 1)
        backend = Meeting(0.1)
        lowered(chain(3), each_layer("meeting"), backend, jobs=3)
        assert backend.met == 0


class TestFailures:
    @pytest.mark.parametrize("backend", [Scripted, ScriptedInThreads])
    @pytest.mark.parametrize("do", ["raise", "write"])
    def test_have_the_same_text_as_without_workers(self, backend: type[Backend], do: str) -> None:
        alone, many = (failure(chain(6), backend, do, jobs=jobs) for jobs in (1, 2))
        assert type(many) is type(alone)
        assert str(many) == str(alone)

    def test_name_their_cause(self) -> None:
        error = failure(chain(6), Scripted, "raise", jobs=2)
        assert "cannot lower (12," in str(error)
        assert "raised at" in str(error)
        assert "in forward: x = torch.sigmoid(layer(x))" in str(error)
        assert "ValueError: cannot lower (12, 11)" in str(error.__cause__)

    def test_a_write_in_a_worker_does_not_reach_the_model(self) -> None:
        program = chain(6, width=300)
        before = {name: tensor.clone() for name, tensor in program.state_dict.items()}
        partitioner = each_layer("scripted", do="write")
        lowered(program, partitioner, Scripted, jobs=2, check_weights=False)
        assert all(torch.equal(before[name], tensor) for name, tensor in program.state_dict.items())

    def test_a_worker_that_dies_is_named_after_a_second_attempt(self) -> None:
        error = failure(chain(6), Scripted, "die", jobs=2)
        assert str(error).count("SIGKILL(-9)") == 2
        assert "Backend 'scripted' failed: WorkerDiedError: a worker process raised TerminatedWorkerError" in str(error)
        assert "partition forward/3:" in str(error)

    def test_a_backend_that_ends_its_process_does_not_end_this_one(self) -> None:
        partitioner = each_layer("scripted", do="die", rows=12)
        report = lowered(chain(6), partitioner, Scripted, jobs=2, on_backend_error="fallback").report
        assert ["SIGKILL(-9)" in one.failure for one in report.refused] == [True]
        assert len(report.payload_bytes) == 5
        assert len(lowered(chain(6), each_layer("scripted"), Scripted, jobs=2).report.payload_bytes) == 6

    def test_a_partition_whose_worker_died_is_tried_once_more(self, tmp_path: Path) -> None:
        partitioner = each_layer("scripted", do="die once", rows=12, file=tmp_path / "died")
        many = lowered(chain(6), partitioner, Scripted, jobs=2)
        assert (tmp_path / "died").exists()
        assert many.emit().buffer == lowered(chain(6), partitioner, Scripted).emit().buffer


def local_backend() -> type[Backend]:
    class Local(Storing):
        pass

    return Local


class Stateful(Storing):
    def __init__(self, level: int = 3) -> None:
        self.level = level


class Together(Sleeping):
    backend_id = "together"

    def preprocess_all(self, edge_programs: Any, compile_specs: Any, *, context: Any = None) -> Any:
        return {name: [PreprocessResult(bytes([len(found)]))] * len(found) for name, found in edge_programs.items()}


class TestWhatDoesNotTravel:
    @pytest.mark.parametrize(
        ("backend", "reason"),
        [
            (local_backend(), "is not found by its name; define it at the top of a module"),
            (Stateful(4), "whose state stays in this process; pass its class"),
        ],
    )
    def test_is_lowered_here_and_the_log_says_why(
        self, backend: Any, reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        alone = lowered(chain(3), each_layer("storing"), Storing).emit().buffer
        assert lowered(chain(3), each_layer("storing"), backend, jobs=2).emit().buffer == alone
        assert reason in caplog.text

    def test_a_backend_that_lowers_everything_together_gets_it_in_one_call(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        done = lowered(chain(3), each_layer("together"), Together, jobs=2)
        assert list(done.report.payload_bytes.values()) == [1, 1, 1]
        assert "it lowers them together, in preprocess_all" in caplog.text

    def test_a_backend_that_declares_nothing_is_called_one_after_the_other(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        lower(chain(3), each_layer("reference"), options=LoweringOptions(jobs=2))
        assert 'it declares parallel = "none"' in caplog.text

    def test_only_programs_that_cannot_be_written(self, caplog: pytest.LogCaptureFixture) -> None:
        def tag(node: Any) -> str | None:
            if node.name == "aten_addmm_default_1":
                node.meta["strange"] = object()
            return f"t{node.meta['debug_handle']}" if "addmm" in str(node.target) else None

        partitioner = TagPartitioner(tag, "storing")
        alone = lowered(chain(3), partitioner, Storing).emit().buffer
        assert lowered(chain(3), partitioner, Storing, jobs=2).emit().buffer == alone
        assert "1 of the 3 partitions for backend 'storing'" in caplog.text
        assert "its program cannot be sent: node.meta['strange']: a value of type builtins.object" in caplog.text


class TestEnds:
    @pytest.fixture
    def interrupted(self, tmp_path: Path) -> Iterator[list[int]]:
        """Interrupt this process when its workers work; the value are their process ids."""
        pids: list[int] = []

        def interrupt() -> None:
            wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
            pids.extend(int(path.suffix[1:]) for path in tmp_path.iterdir())
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        yield pids
        thread.join()

    def test_an_interrupt_ends_the_workers(self, interrupted: list[int], tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt):
            lowered(chain(4), each_layer("scripted", do="wait", file=tmp_path / "pid"), Scripted, jobs=2)
        assert len(interrupted) == 2
        wait_until(lambda: not any(map(is_alive, interrupted)), 5)
        assert len(lowered(chain(4), each_layer("scripted"), Scripted, jobs=2).report.payload_bytes) == 4

    def test_workers_that_ended_between_two_calls_are_replaced(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        partitioner = each_layer("scripted", do="tell", file=tmp_path / "pid")
        lowered(chain(4), partitioner, Scripted, jobs=2)
        before = {int(path.suffix[1:]) for path in tmp_path.iterdir()}
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, before)), 5)
        lowered(chain(4), partitioner, Scripted, jobs=2)
        assert len({int(path.suffix[1:]) for path in tmp_path.iterdir()} - before) >= 1
        assert not caplog.text

    def test_a_forked_child_has_workers_of_its_own(self) -> None:
        lowered(chain(2), each_layer("scripted"), Scripted, jobs=2)
        before = list(parallel._pools.values())
        child = os.fork()
        if child == 0:
            os._exit(0 if parallel._pool(2) not in before else 1)
        assert os.waitpid(child, 0)[1] == 0
        lowered(chain(2), each_layer("scripted"), Scripted, jobs=2)

    @pytest.mark.parametrize("flags", [[], ["-I"]], ids=["plain", "isolated"])
    def test_workers_import_nothing_from_the_current_folder(self, flags: list[str], tmp_path: Path) -> None:
        """Wherever a user is, and whatever lies there under the name of a module."""
        told, folder = tmp_path / "told", tmp_path / "folder"
        folder.mkdir()
        for name in sorted(
            {*sys.stdlib_module_names, "torch", "executorch", "exir_lowering", "numpy", "sitecustomize"}
        ):
            (folder / f"{name}.py").write_text(f"open({str(told)!r}, 'a').write({name!r} + ' ')")
        script, pids = tmp_path / "script.py", tmp_path / "pids"
        script.write_text(QUIET)
        pids.mkdir()
        command = [sys.executable, *flags, str(script), str(Path(__file__).parent), str(pids / "pid")]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert not told.exists(), told.read_text()
        assert len(list(pids.iterdir())) >= 1


QUIET = """
import sys
sys.path.insert(0, sys.argv[1])
from parallel_backends import Scripted, chain, each_layer
from exir_lowering import LoweringOptions, lower
partitioner = each_layer("scripted", do="tell", file=sys.argv[2])
lower(chain(4), partitioner, backends={"scripted": Scripted}, options=LoweringOptions(jobs=2))
"""
