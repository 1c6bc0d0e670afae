"""Everything that lives as long as the process is in docs/concepts/process.md, with its owner and lifetime."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/concepts/process.md"
FOLDERS = ("exir_lowering", "partitioners", "backends")
MAKERS = {
    *("ContextVar", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary", "Lock", "RLock", "local", "Condition"),
    *(
        "Event",
        "Counter",
        "OrderedDict",
        "deque",
        "count",
        "cache",
        "defaultdict",
        "replacing",
        "Shared",
        "Workers",
        "Memory",
    ),
}
"""What makes something that changes, besides empty dicts, lists and sets."""


def _called(value: ast.expr) -> str:
    function = value.func if isinstance(value, ast.Call) else None
    while isinstance(function, ast.Subscript):
        function = function.value
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_empty(value: ast.expr) -> bool:
    if isinstance(value, ast.Dict):
        return not value.keys
    return (isinstance(value, ast.List) and not value.elts) or (
        isinstance(value, ast.Call) and _called(value) in ("set", "dict", "list") and not value.args
    )


def _changing_classes(tree: ast.Module) -> set[str]:
    """Return the classes of a module whose objects get attributes in their methods."""
    return {
        statement.name
        for statement in tree.body
        if isinstance(statement, ast.ClassDef)
        and any(isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) for node in ast.walk(statement))
    }


def _names(path: Path) -> set[str]:
    """Return what a module keeps in variables that change, and its functions that remember their results."""
    tree = ast.parse(path.read_text())
    makers = MAKERS | _changing_classes(tree)
    # Objects of a module of which its functions store attributes.
    changed = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    stored = {node.value.id for node in changed if isinstance(node.value, ast.Name)}
    found = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {ast.unparse(target) for target in targets} & stored
            if any(_is_empty(value) or _called(value) in makers for value in values):
                found |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        elif isinstance(node, ast.FunctionDef) and any("cache" in ast.unparse(each) for each in node.decorator_list):
            found.add(node.name)
    return found


def _in_code() -> set[str]:
    found = set()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if folder == "exir_lowering" and path.relative_to(ROOT / folder).parts[0] in FOLDERS:
                continue
            place = path.relative_to(ROOT / "exir_lowering" if folder == "exir_lowering" else ROOT)
            found |= {f"{place.as_posix()} {name}" for name in _names(path)}
    return found


def test_the_page_names_everything() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| ((?:`[^`]+`(?:, )?)+) \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    listed = {f"{module} {name}" for module, names, _, _ in rows for name in re.findall(r"`([^`]+)`", names)}
    assert all(what and until for _, _, what, until in rows)
    assert listed == _in_code()
