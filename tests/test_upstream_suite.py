"""ExecuTorch's own tests of its backend API pass on this engine: each of those that pass on ExecuTorch's."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("engine", ["ours", "convex"])
def test_each_test_that_passes_upstream_passes_here(engine: str) -> None:
    """Also with this package's proposal algorithm inside of ExecuTorch's partitioners."""
    command = [sys.executable, str(Path(__file__).parent / "upstream_suite.py"), "--engine", engine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    summary = next((line for line in done.stdout.splitlines() if line.startswith(f"engine {engine}")), "")
    assert done.returncode == 0, done.stdout[-3000:]
    assert summary == f"engine {engine}: 98 of 98 tests that pass on ExecuTorch's"


def test_those_that_execute_demo_backends_pass_with_python_delegates() -> None:
    """On a stock wheel they fail: the C++ halves of these backends are not in it."""
    command = [sys.executable, str(Path(__file__).parent / "upstream_suite.py"), "--delegates"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:]
    lines = [line for line in done.stdout.splitlines() if "with a Python delegate" in line]
    assert len(lines) == 14 and all(line.strip().startswith("passes") for line in lines), lines
