"""How large a room, a file and the top of the package may be."""

from __future__ import annotations

from folders import ROOT

FOLDERS = ("exir_lowering", "partitioners", "backends")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# The plug-ins are seen through links in the package too, where they are installed in place.
SOURCES = list({path.resolve(): path for path in FILES}.values())


BUDGETS = {
    "exir_lowering": 1316,
    "exir_lowering/_upstream": 4129,
    "exir_lowering/cli": 2586,
    "exir_lowering/compat": 331,
    "exir_lowering/dynamo": 2740,
    "exir_lowering/errors": 218,
    "exir_lowering/graphs": 2512,
    "exir_lowering/graphs/ranges": 2174,
    "exir_lowering/graphs/serialized": 1553,
    "exir_lowering/inspection": 1364,
    "exir_lowering/lowered_module": 1430,
    "exir_lowering/plans": 1751,
    "exir_lowering/plugins": 1599,
    "exir_lowering/pte": 3871,
    "exir_lowering/quantization": 591,
    "exir_lowering/rewrites": 1096,
    "exir_lowering/runtime": 2894,
    "exir_lowering/steps": 6179,
    "exir_lowering/steps/cache": 1308,
    "exir_lowering/steps/legalizing": 2018,
    "exir_lowering/testing": 1826,
    "exir_lowering/verification": 2145,
    "partitioners": 3319,
    "backends": 2238,
}
"""The most lines that the Python files of each room have, without rooms in it that are listed: growth is a decision."""


def test_no_room_has_more_lines_than_its_budget() -> None:
    lines = dict.fromkeys(BUDGETS, 0)
    for path in SOURCES:
        folders = [str(folder.relative_to(ROOT)) for folder in path.parents if folder.is_relative_to(ROOT)]
        room = next(folder for folder in folders if folder in BUDGETS)
        lines[room] += len(path.read_text().splitlines())
    assert not {room: (count, BUDGETS[room]) for room, count in lines.items() if count > BUDGETS[room]}


def test_no_file_has_more_than_450_lines() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {name: count for name, count in lines.items() if count > 450}


def test_the_top_of_the_package_has_at_most_twenty_three_entries() -> None:
    top = ROOT / "exir_lowering"
    entries = {path.name for path in top.iterdir() if not path.name.startswith((".", "__")) and not path.is_symlink()}
    assert len(entries - {"py.typed"}) <= 23, sorted(entries)
