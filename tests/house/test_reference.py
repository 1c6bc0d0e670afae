"""The reference on the site has every public name, and functions say what they take and return."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from folders import ROOT

PACKAGE = ROOT / "exir_lowering"
STUBS = sorted(
    path
    for wing, name in ((PACKAGE, "exir_lowering"), (ROOT / "partitioners", ""), (ROOT / "backends", ""))
    for path in wing.rglob("__init__.pyi")
    if name == "" or not {"backends", "partitioners"} & {folder.name for folder in path.parents}
)
"""Where public names are written; `partitioners` and `backends` are seen through links in the package too."""

PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md"))}
TEXT = "\n".join([*PAGES.values(), *(page.read_text() for page in sorted((ROOT / "docs" / "errors").glob("*.md")))])


def _module(path: Path) -> str:
    """Return the import name of a module or package by its file."""
    relative = path.relative_to(ROOT).with_suffix("")
    parts = relative.parts[:-1] if relative.name == "__init__" else relative.parts
    return ".".join(parts if parts[0] == "exir_lowering" else ("exir_lowering", *parts))


def _names(stub: Path) -> dict[str, str]:
    """Return where each public name of a package is defined."""
    package, found = _module(stub), {}
    for node in ast.parse(stub.read_text()).body:
        assert isinstance(node, ast.ImportFrom) and node.level == 1
        origin = f"{package}.{node.module}" if node.module else package
        found.update({f"{package}.{one.asname}": f"{origin}.{one.name}" for one in node.names})
    return found


EVERY = {name: origin for stub in STUBS for name, origin in _names(stub).items()}
SHOWN = set(re.findall(r"^::: (\S+)$", TEXT, re.MULTILINE))


def _defined(name: str) -> str:
    """Follow a name to where it is defined, through packages and modules that have it from others."""
    origin = EVERY.get(name) or _reexported(name)
    return _defined(origin) if origin and origin != name else name


@functools.cache
def _reexported(name: str) -> str | None:
    """Return where a module has a public name from, if it is `import X as X` there."""
    module, _, last = name.rpartition(".")
    file = ROOT / f"{module.replace('.', '/')}.py"
    for node in ast.walk(ast.parse(file.read_text())) if file.exists() else ():
        if isinstance(node, ast.ImportFrom) and last in [one.asname for one in node.names]:
            return f"{node.module}.{last}"
    return None


@pytest.mark.parametrize("stub", STUBS, ids=_module)
def test_every_public_name_is_in_the_reference(stub: Path) -> None:
    shown = {_defined(name) for name in SHOWN}
    missing = []
    for name in _names(stub):
        origin = _defined(name)
        whole_module = origin.rpartition(".")[0] in SHOWN
        of_executorch = f"| `{origin.rpartition('.')[2]}` | `{origin.rpartition('.')[0]}` |" in TEXT
        has_a_page = any(one.startswith(f"{origin}.") for one in SHOWN)  # a package, whose names are shown one by one
        if not (origin in shown or whole_module or of_executorch or has_a_page):
            missing.append(name)
    assert not missing, f"Add each to a page in docs/reference or docs/errors: ::: {missing[0]}"


def test_the_reference_has_the_conformance_suite() -> None:
    (listed,) = re.findall(r"__all__ = \[(.*?)\]", (PACKAGE / "testing" / "__init__.py").read_text(), re.DOTALL)
    assert {f"exir_lowering.testing.{name}" for name in ast.literal_eval(f"[{listed}]")} <= SHOWN


@pytest.mark.parametrize("stub", STUBS, ids=_module)
def test_public_names_say_what_they_take_and_return(stub: Path) -> None:
    found = {name: _definition(_defined(name)) for name in _names(stub)}
    assert not [name for name, node in found.items() if node is not None and not ast.get_docstring(node)]
    functions = {name: node for name, node in found.items() if isinstance(node, ast.FunctionDef)}
    assert not [name for name, node in functions.items() if not _says_enough(node)]
    classes = {name: node for name, node in found.items() if isinstance(node, ast.ClassDef)}
    assert not [name for name, node in classes.items() if not _describes(node, _fields(node))]


def _definition(origin: str) -> ast.FunctionDef | ast.ClassDef | None:
    """Return the function or class that a name stands for; None for constants, modules and what is ExecuTorch's.

    Of overloads it is the last one, which they are for.
    """
    module, _, last = origin.rpartition(".")
    file = ROOT / f"{module.replace('.', '/')}.py"
    nodes = ast.parse(file.read_text()).body if module.startswith("exir_lowering") and file.exists() else []
    return next((n for n in reversed(nodes) if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == last), None)


def _says_enough(function: ast.FunctionDef) -> bool:
    """Return whether sections, or the first sentence, say what a function takes and returns."""
    text, given = ast.get_docstring(function) or "", function.args
    arguments = [argument.arg for argument in given.posonlyargs + given.args + given.kwonlyargs]
    nothing = function.returns is None or ast.unparse(function.returns) == "None"
    takes = len(arguments) < 2 or _describes(function, arguments)
    return takes and (nothing or text.startswith(("Return ", "Yield ")) or "Returns:" in text or "Yields:" in text)


def _describes(node: ast.FunctionDef | ast.ClassDef, names: list[str]) -> bool:
    """Return whether a docstring has an entry for each argument or field."""
    return all(re.search(rf"^ +{name}: ", ast.get_docstring(node) or "", re.MULTILINE) for name in names)


def _fields(node: ast.ClassDef) -> list[str]:
    names = [ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)]
    return [name for name in names if not name.startswith("_")]


SHOWN_BY_PAGE = {stem: re.findall(r"^::: (\S+)$", text, re.MULTILINE) for stem, text in PAGES.items()}
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
TEXT_ONLY = {"exir_lowering.runtime.program"}
"""Modules of which the reference shows the text, as what `load` takes is explained there."""


@pytest.mark.parametrize("page", [stem for stem, names in SHOWN_BY_PAGE.items() if names])
def test_each_name_is_used_in_an_example_of_its_page(page: str) -> None:
    used = {_defined(name) for name in _used("\n".join(PYTHON.findall(PAGES[page])))}
    of_executorch = re.findall(r"^\| `(\w+)` \| `executorch\.", PAGES[page], re.MULTILINE)
    named = {*SHOWN_BY_PAGE[page], *(f"exir_lowering.{name}" for name in of_executorch)} - TEXT_ONLY
    assert not sorted(name for name in named if _defined(name) not in used)


def _used(code: str) -> set[str]:
    """Return the full names that code uses, by what it imports; an import alone is no use."""
    meant: dict[str, str] = {}
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            meant.update({name: name for name in (one.name.partition(".")[0] for one in node.names)})
        elif isinstance(node, ast.ImportFrom):
            meant.update({one.asname or one.name: f"{node.module}.{one.name}" for one in node.names})
    names = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)]
    parts = [name.partition(".") for name in names]
    return {f"{meant[first]}{dot}{rest}" for first, dot, rest in parts if first in meant}
