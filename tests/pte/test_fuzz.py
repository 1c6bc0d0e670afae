"""Damaged files: the process lives, and each ends in an error of ours, or in numbers, wrong ones only if unchecked."""

from __future__ import annotations

import os
import sys

import pytest
from fuzz_samples import KINDS, kind
from fuzzing import ENGINES, Kind, fuzz

EXAMPLES = int(os.environ.get("EXIR_LOWERING_EXAMPLES", "350"))
"""How many mutants there are of all kinds together; each is loaded and run by both engines."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork") or sys.platform != "linux", reason="children are forked")


@pytest.fixture(scope="module", params=KINDS)
def files(request: pytest.FixtureRequest) -> Kind:
    return kind(request.param)


@pytest.mark.parametrize("engine", ENGINES)
def test_damage_never_ends_the_process(files: Kind, engine: str) -> None:
    """No digest is checked here, so that damage gets as far as it can."""
    seeds = range(max(EXAMPLES // len(KINDS), 1))
    report = fuzz(files, seeds, engine)
    print(f"{files.name}, {engine}: {dict(report.counts)}")
    assert not report.failures, "\n".join(report.failures)
    assert sum(report.counts.values()) == len(seeds)
    checked = fuzz(files, [seed for _, seed in report.wrong], engine, verify=True)
    assert not checked.failures, "\n".join(checked.failures)
    assert not checked.wrong, "other numbers, though digests were checked"
