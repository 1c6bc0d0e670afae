"""ExecuTorch's own tests of its backend API pass on this engine: each of those that pass on ExecuTorch's, and more."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("engine", "options", "count"),
    [
        # On a stock wheel 14 of these fail: the C++ halves of their demo backends are not in it.
        pytest.param("ours", ["--delegates"], 112, id="with Python delegates for the demo backends"),
        pytest.param("convex", [], 98, id="with this package's proposals in ExecuTorch's partitioners"),
    ],
)
def test_each_test_that_passes_upstream_passes_here(engine: str, options: list[str], count: int) -> None:
    command = [sys.executable, str(Path(__file__).parent / "upstream_suite.py"), "--engine", engine, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    summary = next((line for line in done.stdout.splitlines() if line.startswith(f"engine {engine}")), "")
    assert done.returncode == 0, done.stdout[-3000:]
    assert summary == f"engine {engine}: {count} of {count} tests that pass on ExecuTorch's"
    delegated = [line.split()[0] for line in done.stdout.splitlines() if "with a Python delegate" in line]
    assert delegated == ["passes"] * (count - 98)
