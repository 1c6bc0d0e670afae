"""Partitions on a farm: a Dask cluster of two processes, of which one is killed; and one that loses its tasks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
from parallel_backends import Scripted, Sleeping, Storing, chain, each_layer

from exir_lowering import BackendFailure, LoweringOptions, lower


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    from distributed import Client, LocalCluster

    folder = tmp_path_factory.mktemp("farm")
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            dashboard_address=None,
            local_directory=str(folder),
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client.get_executor()


BACKENDS = {"storing": Storing, "sleeping": Sleeping, "scripted": Scripted}


def payload(programs: Any, partitioners: Any, executor: Executor | None = None, **options: Any) -> bytes:
    done = lower(programs, partitioners, backends=BACKENDS, options=LoweringOptions(executor=executor, **options))
    return bytes(done.emit().buffer)


class TestFarm:
    def test_many_methods_and_backends_give_the_same_bytes(
        self, farm: Executor, caplog: pytest.LogCaptureFixture
    ) -> None:
        programs = {"first": chain(2), "second": chain(3, width=200), "third": chain(4)}
        partitioners = {"first": "xnnpack", "second": each_layer("storing"), "third": each_layer("sleeping")}
        done = payload(programs, partitioners, farm)
        assert done == payload(programs, partitioners)
        assert not [one for one in caplog.records if one.name.startswith("exir_lowering")]  # nothing was lowered here

    def test_operators_that_exist_here_only_travel(self, farm: Executor, caplog: pytest.LogCaptureFixture) -> None:
        """ExecuTorch's conversion registers one for each that is kept whole; metadata name it."""
        done = payload(chain(2), "xnnpack", farm, fast=False)
        assert done == payload(chain(2), "xnnpack", fast=False)
        assert not [one for one in caplog.records if one.name.startswith("exir_lowering")]

    def test_a_failure_in_a_worker_has_the_text_of_one_here(self, farm: Executor) -> None:
        texts = []
        for executor in (None, farm):
            with pytest.raises(BackendFailure) as caught:
                payload(chain(6), each_layer("scripted", do="raise", rows=12), executor)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]

    def test_a_worker_that_is_killed_in_the_middle_changes_nothing(self, farm: Executor, tmp_path: Path) -> None:
        partitioner = each_layer("scripted", do="die once", rows=12, file=tmp_path / "died")
        done = payload(chain(6), partitioner, farm)
        assert (tmp_path / "died").exists()
        assert done == payload(chain(6), partitioner)


class Broken(Executor):
    """Loses each task."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(ConnectionError("the worker is gone"))
        return future


class TestWorkers:
    def test_that_are_lost_twice_are_one_error(self) -> None:
        with pytest.raises(BackendFailure) as caught:
            payload(chain(3), each_layer("storing"), Broken())
        assert str(caught.value).count("the executor Broken raised ConnectionError: the worker is gone") == 2
        assert "partition forward/0:" in str(caught.value)
