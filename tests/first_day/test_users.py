"""What somebody does on the first day, with models that no other test has: in Python and on the command line."""

import subprocess
import sys
from pathlib import Path

import forked
import pytest

HERE = Path(__file__).parent
COMMAND = HERE.parent / "support" / "forked_command.py"
PROGRAMS = "".join(f'{name}() {{ "{sys.executable}" "{COMMAND}" {name} "$@"; }}\n' for name in ("exir-lower", "python"))


@pytest.mark.parametrize("script", ["vision", "text", "speech", "language_model", "detector"])
def test_in_python(script: str, tmp_path: Path) -> None:
    done = forked.run(HERE / f"{script}.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("script", ["vision", "text", "speech"])
def test_on_the_command_line(script: str, tmp_path: Path) -> None:
    code = f"set -eo pipefail\n{PROGRAMS}{(HERE / f'{script}.sh').read_text()}"
    done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
