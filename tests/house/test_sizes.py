"""How large a file, a function and the top of the package may be."""

from __future__ import annotations

import ast

from folders import ROOT

FOLDERS = ("exir_lowering", "partitioners", "backends")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# The plug-ins are seen through links in the package too, where they are installed in place.
SOURCES = list({path.resolve(): path for path in FILES}.values())


def test_no_file_has_more_than_450_lines() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {name: count for name, count in lines.items() if count > 450}


def test_no_function_has_more_than_50_lines() -> None:
    found = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                if lines > 50:
                    found[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = lines
    assert not found


def test_the_top_of_the_package_has_at_most_eighteen_entries() -> None:
    top = ROOT / "exir_lowering"
    entries = {path.name for path in top.iterdir() if not path.name.startswith((".", "__")) and not path.is_symlink()}
    assert len(entries - {"py.typed"}) <= 18, sorted(entries)
