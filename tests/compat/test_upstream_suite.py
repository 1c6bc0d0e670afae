"""ExecuTorch's own tests of its backend API pass on this engine: each of those that pass on ExecuTorch's, and more."""

from __future__ import annotations

import datetime
import importlib.util
from pathlib import Path

import forked
import pytest

SCRIPT = Path(__file__).parent / "upstream_suite.py"
_spec = importlib.util.spec_from_file_location("upstream_suite", SCRIPT)
assert _spec is not None and _spec.loader is not None
suite = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(suite)

ENGINES = {
    # On a stock wheel 14 of these fail: the C++ halves of their demo backends are not in it.
    "ours": (["--delegates"], 112),
    # With this package's proposals in ExecuTorch's partitioners.
    "convex": ([], 98),
}
PARTS = 7
TODAY = datetime.date.today().toordinal() % PARTS + 1
"""The part that runs on this day of the week, without the proposals. Each has some of every file; all are nightly."""


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(
            f"{engine} {number}/{PARTS}", marks=[] if (engine, number) == ("ours", TODAY) else [pytest.mark.nightly]
        )
        for engine in ENGINES
        for number in range(1, PARTS + 1)
    ],
)
def test_each_test_that_passes_upstream_passes_here(part: str) -> None:
    engine, name = part.split()
    options, _ = ENGINES[engine]
    done = forked.run(SCRIPT, "--engine", engine, "--part", name, *options, timeout=900)
    summary = next((line for line in done.stdout.splitlines() if line.startswith(f"engine {engine}")), "")
    assert done.returncode == 0, done.stdout[-3000:]
    count = len(suite.expected_of(bool(options), name))
    assert count and summary == f"engine {engine}: {count} of {count} tests that pass on ExecuTorch's"
    delegated = [line.split()[0] for line in done.stdout.splitlines() if "with a Python delegate" in line]
    assert delegated == ["passes"] * (count - len(suite.expected_of(False, name)))


def test_the_parts_are_the_whole_suite() -> None:
    for options, count in ENGINES.values():
        parts = [suite.expected_of(bool(options), f"{number}/{PARTS}") for number in range(1, PARTS + 1)]
        assert len(set().union(*parts)) == sum(map(len, parts)) == count
