"""Each class of errors has a page in docs/errors: its messages are those of the code, and tracebacks name the page.

`test_docs.py` runs the examples of the pages, and compares what they print.
"""

from __future__ import annotations

import ast
import copy
import pickle
import re
from pathlib import Path

import pytest
from folders import ROOT

import exir_lowering.errors
from exir_lowering import LoweringError
from exir_lowering.testing import ConformanceError, ConformanceReport

PAGES = ROOT / "docs" / "errors"
CLASSES = [
    name for name, value in vars(exir_lowering.errors).items() if isinstance(value, type) and "__" not in name
    if issubclass(value, Exception) and value.__module__ == exir_lowering.errors.__name__
]  # fmt: skip
SOURCES = [path for wing in ("exir_lowering", "partitioners", "backends") for path in (ROOT / wing).rglob("*.py")]
ROW = re.compile(r"^\| `([^|]+)` \|", re.MULTILINE)


def _page(name: str) -> Path:
    return PAGES / ("warnings.md" if name.endswith("Warning") else f"{name}.md")


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_has_a_page(name: str) -> None:
    assert f"\n::: exir_lowering.errors.{name}\n" in _page(name).read_text()
    assert f"]({_page(name).name})" in (PAGES / "README.md").read_text()


def _kinds() -> list[type[LoweringError]]:
    kinds = [getattr(exir_lowering.errors, name) for name in CLASSES if not name.endswith("Warning")]
    return [*kinds, ConformanceError]


@pytest.mark.parametrize("kind", _kinds(), ids=lambda kind: kind.__name__)
def test_an_error_names_its_page_and_can_be_copied(kind: type[LoweringError]) -> None:
    required = {"UnknownPluginError": "plugin_id", "PartitionerContractError": "violation", "LimitError": "limit"}
    named = {**required, "CoverageError": "plan", "MemoryRequirementError": "memory"}.get(kind.__name__)
    given = ConformanceReport("mine", ()) if kind is ConformanceError else "text"
    error = kind(given, **({named: "x"} if named else {}))  # type: ignore[arg-type]
    assert error.__notes__ == [f"See docs/errors/{kind.__name__}.md"]
    assert (ROOT / error.__notes__[0].removeprefix("See ")).is_file()
    copied, sent = copy.copy(error), pickle.loads(pickle.dumps(error))
    for again in (copied, sent):
        assert type(again) is kind and (again.args, vars(again)) == (error.args, vars(error))
    copied.__notes__.append("of the copy")
    assert len(error.__notes__) == 1


def _words(node: ast.AST) -> str:
    """Return what a message says in any case, with a NUL in place of what differs."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(_words, parts))
        case ast.BinOp(left=left, right=right):
            return _words(left) + _words(right)
    return "\0"


def _messages() -> dict[str, set[str]]:
    """Return the texts in the modules that name each class: its messages, and what they are put together from."""
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        texts = {_words(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)}
        for name in {node.id for node in nodes if isinstance(node, ast.Name)} & set(CLASSES):
            found.setdefault(name, set()).update(texts)
    return found


def test_the_messages_in_the_tables_are_those_of_the_code() -> None:
    messages, wrong = _messages(), []
    for page in [*PAGES.glob("*Error.md"), PAGES / "BackendFailure.md"]:
        for words in ROW.findall(page.read_text()):
            pattern = re.compile(".*".join(map(re.escape, words.split("…"))))
            if not any(map(pattern.search, messages.get(page.stem, ()))):
                wrong.append(f"{page.name}: {words}")
    assert not wrong, "\n".join(wrong)
