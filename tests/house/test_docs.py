"""What the README and the docs show runs, page by page, and prints what is shown; links and named modules exist.

All Python of a page comes first, then its commands (`bash`), beside the C++ that is shown.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import forked
import pytest

from exir_lowering.steps import emit

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
COMMANDS = re.compile(r"```bash\n(.*?)```", re.DOTALL)
CPP = re.compile(r"`(\w+\.cpp)`[^`]*```cpp\n(.*?)```", re.DOTALL)
SHOWN = re.compile(r"```(python|bash)\n(?:(?!```).)*```\n\n```text\n(.*?)```", re.DOTALL)
"""The language of a block, and what the block prints."""


def _pages_with_code() -> list[Path]:
    return [page for page in PAGES if BLOCK.search(page.read_text())]


TIMED = """
import dataclasses


class Clock:
    \"\"\"Counts operators, so that an event lasts as many ticks as operators are computed in it.\"\"\"

    active, ticks = True, 0

    def __init__(self):
        self.lasted = {}

    def now(self):
        return self.ticks

    def record(self, identifier, start, end):
        self.lasted[identifier] = end - start


def timed(compute):
    def run(*operands):
        clock.ticks += 1
        return compute(*operands)

    return run


class Timed(StepsDelegate):
    def compile(self, processed, compile_specs, context):
        return super().compile(processed, compile_specs, dataclasses.replace(context, recorder=clock))


clock, kept = Clock(), dict(COMPUTE)
COMPUTE.update({name: timed(compute) for name, compute in COMPUTE.items()})
check(exir_lowering.load(exir_lowering.lower(program, "steps").emit().buffer, delegates=[Timed]), *inputs)
assert sorted(clock.lasted.values()) == [1, 1], clock.lasted
COMPUTE.update(kept)
"""

CLAIMS = {"StepsDelegate, partitioner=": TIMED}
"""What a page claims in words is checked behind the block that has this text."""


@pytest.mark.parametrize("page", _pages_with_code(), ids=lambda page: page.stem)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    blocks = BLOCK.findall(page.read_text())
    code = "\n".join(block + "".join(CLAIMS[text] for text in CLAIMS if text in block) for block in blocks)
    script = tmp_path / "page.py"
    script.write_text(code)
    done = forked.run(script, cwd=tmp_path, quiet=False, fresh=page == ROOT / "README.md")
    assert done.returncode == 0, done.stderr[-3000:]
    plain = _in_one_line if page.parent.name == "errors" else _plain  # messages are wrapped there
    printed = {"python": plain(done.stdout), "bash": plain(_run_commands(page.read_text(), tmp_path))}
    for language, shown in SHOWN.findall(page.read_text()):
        assert plain(shown) in printed[language], (shown, printed[language])


PIP = """
pip() {  # into the folder, from what is here
    python -m pip "$1" -q --no-deps --no-build-isolation --no-index --target installed "./${@: -1}" 2> pip.txt
    export PYTHONPATH="$PWD/installed" EXIR_LOWERING_FRESH=1
}
"""


def _run_commands(text: str, folder: Path) -> str:
    """Run the commands of a page, and return what they print."""
    for name, code in CPP.findall(text):
        (folder / name).write_text(code)
    command = ROOT / "tests" / "support" / "forked_command.py"
    path = f'exir-lower() {{ "{sys.executable}" "{command}" exir-lower "$@"; }}\n'
    path += f'python() {{ "{sys.executable}" "$@"; }}\n'
    path += PIP
    script = "set -eo pipefail\n" + path + "".join(COMMANDS.findall(text))
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _plain(text: str) -> str:
    """Return text without the addresses of functions, and without spaces at the ends of lines."""
    return "\n".join(line.rstrip() for line in re.sub(r"0x[0-9a-f]+", "0x", text).splitlines())


def _in_one_line(text: str) -> str:
    return " ".join(_plain(text).split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "SECURITY.md"], ids=lambda page: page.stem)
def test_modules_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`((?:\w+/)*\w+\.py)`", page.read_text()):
        folders = (ROOT, ROOT / "exir_lowering", page.parent)
        assert any((folder / name).exists() for folder in folders), f"{page}: {name}"


def test_the_pictures_of_the_steps_are_what_the_code_draws(tmp_path: Path) -> None:
    done = forked.run(ROOT / "docs" / "assets" / "step_pictures.py", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    drawn, shown = (
        # A file says by which torch it was made, "2.14.1" or "2.13.0+cpu", and flatbuffers' versions align differently.
        {path.name: re.sub(r">[\d,]+ bytes<", ">bytes<", path.read_text()) for path in folder.iterdir()}
        for folder in (tmp_path, ROOT / "docs" / "images" / "steps")
    )
    assert drawn == shown


def test_the_page_of_the_house_has_every_room() -> None:
    text = (ROOT / "docs" / "concepts" / "house.md").read_text()
    wings = [ROOT / name for name in ("exir_lowering", "partitioners", "backends", "tests")]
    rooms = [path.parent for wing in wings for path in wing.glob("*/*.py")]
    assert not [room for room in rooms if f"{room.name}/" not in text]
    assert not [path for path in (ROOT / "exir_lowering").glob("[a-z]*.py") if f"{path.name} " not in text]


def test_the_page_of_emission_has_the_rows_of_its_tables() -> None:
    page = (ROOT / "docs/concepts/6-emit.md").read_text()
    tables = {"check": emit.CHECKS, "finisher": emit.FINISHERS, "sealer": (*emit.SEALERS, emit.DIGESTS)}
    for kind, rows in tables.items():
        listed = "".join(f"| {row.name} | {row.reason} |\n" for row in rows)
        assert f"| {kind} | reason |\n|---|---|\n{listed}\n" in page, kind


def test_the_example_of_the_readme_is_short() -> None:
    first = BLOCK.search((ROOT / "README.md").read_text())
    assert first is not None
    assert len([line for line in first[1].splitlines() if line.strip()]) <= 15


def _first_table(page: Path) -> list[list[str]]:
    """Return the cells of a page's first table, as they are read: links without their addresses."""
    lines = re.search(r"^\| \|.*\n\|-.*\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)
    assert lines is not None, page
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in _without_addresses(lines[1]).splitlines()]


def _without_addresses(text: str) -> str:
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)


def test_the_readme_quotes_what_was_measured() -> None:
    measured = [row[:3] for row in _first_table(ROOT / "docs" / "performance.md")]
    assert _first_table(ROOT / "README.md")[: len(measured)] == measured
    introduction = (ROOT / "README.md").read_text().partition("\n\n")[2].partition("\n\n")[0]
    figures = re.findall(r"\d+\.\d+", introduction)
    assert figures
    assert not [figure for figure in figures if figure not in str(measured)]


def test_commands_of_the_readme_exist() -> None:
    from exir_lowering.cli import main

    for command in set(re.findall(r"exir-lower ([a-z-]+)", (ROOT / "README.md").read_text())):
        assert main([command, "--help"]) == 0


def test_the_targets_of_the_page_are_partitioners_of_the_package() -> None:
    named = set(re.findall(r"-p ([a-z-]+)(?![:a-z])", (ROOT / "docs" / "guides" / "which-target.md").read_text()))
    with (ROOT / "pyproject.toml").open("rb") as file:
        registered = tomllib.load(file)["project"]["entry-points"]["exir_lowering.partitioners"]
    assert named == set(registered)
