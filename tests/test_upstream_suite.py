"""ExecuTorch's own tests of its backend API pass on this engine: each of those that pass on ExecuTorch's."""

import subprocess
import sys
from pathlib import Path


def test_each_test_that_passes_upstream_passes_here() -> None:
    script = Path(__file__).parent / "upstream_suite.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=900)
    summary = next((line for line in done.stdout.splitlines() if line.startswith("engine ours")), "")
    assert done.returncode == 0, done.stdout[-3000:]
    assert summary == "engine ours: 98 of 98 tests that pass on ExecuTorch's"
