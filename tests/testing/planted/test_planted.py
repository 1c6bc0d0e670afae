"""Mistakes in a small accelerator, with three sets of operators: the suite finds each, and says where."""

from __future__ import annotations

import pytest
from accelerator import SETS, AcceleratorBackend, AcceleratorDelegate, AcceleratorPartitioner
from mistakes import MISTAKES, Mistake

from exir_lowering.testing import ConformanceError, check_backend
from exir_lowering.testing.suite import REQUIRED

TURNS = [(mistake, [*SETS][(i + j) % 3]) for i, mistake in enumerate(MISTAKES) for j in range(3)]
"""Each mistake with each set; every third one, for each mistake in turn with another set, runs for every change."""


def test_there_are_enough() -> None:
    assert len(MISTAKES) >= 40 and len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize(("mistake", "operators"), TURNS, ids=str)
def test_a_mistake_is_found(mistake: Mistake, operators: str) -> None:
    partitioner = mistake.partitioner(operators)
    with pytest.raises(ConformanceError) as caught:
        check_backend(mistake.backend, mistake.delegate, partitioner=partitioner, cases=[mistake.case])
    (result,) = caught.value.report.results
    assert result.status == "failed", result
    assert result.check == mistake.check or not mistake.check, result
    assert mistake.says in result.text, result


@pytest.mark.parametrize("operators", SETS)
def test_without_a_mistake_it_conforms(operators: str, capfd: pytest.CaptureFixture[str]) -> None:
    partitioner = AcceleratorPartitioner(operators)
    report = check_backend(AcceleratorBackend, AcceleratorDelegate, partitioner=partitioner)
    print(report)
    assert not report.uncovered and set(REQUIRED) <= {
        result.feature for result in report.results if result.status != "skipped" or result.check
    }
    assert not capfd.readouterr().err


@pytest.mark.parametrize("name", ["swaps partitions", "weights are zero", "never lets go of a handle"])
def test_the_whole_suite_finds_a_mistake(name: str) -> None:
    (mistake,) = (one for one in MISTAKES if one.name == name)
    with pytest.raises(ConformanceError) as caught:
        check_backend(mistake.backend, mistake.delegate, partitioner=mistake.partitioner("attention"))
    assert mistake.case in caught.value.report.failed
