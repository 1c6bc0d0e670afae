"""The commands of docs/examples/README.md, section by section, print what the page shows; the scripts are short."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from folders import ROOT

EXAMPLES = ROOT / "docs" / "examples"
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", (EXAMPLES / "README.md").read_text(), re.M | re.S))
COMMANDS = re.compile(r"```bash\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
"""Commands, and what they print where the page shows it."""

LINES = 80


@pytest.mark.parametrize("title", SECTIONS)
def test_commands_print_what_is_shown(title: str, tmp_path: Path) -> None:
    for path in EXAMPLES.iterdir():
        if path.is_file():
            shutil.copy2(path, tmp_path)
    for commands, shown in COMMANDS.findall(SECTIONS[title]):
        printed = _run(commands, tmp_path)
        assert _plain(shown) in _plain(printed), printed


def _run(commands: str, folder: Path) -> str:
    """Run commands with scripts and `exir-lower` in children of the fork server, and return what they print."""
    child = ROOT / "tests" / "support" / "forked_command.py"
    names = "".join(f'{name}() {{ "{sys.executable}" "{child}" {name} "$@"; }}\n' for name in ("python", "exir-lower"))
    script = ["bash", "-c", f"set -eo pipefail\n{names}{commands}"]
    done = subprocess.run(script, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _plain(text: str) -> str:
    """Return text without spaces at the ends of lines."""
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_scripts_are_short_and_on_the_page() -> None:
    page = (EXAMPLES / "README.md").read_text()
    for path in [one for suffix in ("*.py", "*.cpp", "*.ipynb") for one in EXAMPLES.glob(suffix)]:
        assert f"]({path.name})" in page, path.name
        if path.suffix != ".ipynb":
            assert len(path.read_text().splitlines()) <= LINES, path.name
