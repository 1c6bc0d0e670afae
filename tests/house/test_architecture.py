"""The import rule: model, errors <- interfaces <- steps <- pipeline <- edges; private upstream names in one file."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "exir_lowering"

LAYERS = [
    {"interrupts", "locks"},
    {
        "errors",
        "_upstream",
        "_upstream_torch",
        "collector",
        "delegate",
        "digests",
        "sources",
        "tolerances",
    },
    {"budget", "operator_checks", "pure_operators"},
    {"checked_calls"},
    {"kinds", "model", "weights", "options", "graphs", "quotient", "debug_info", "saving", "treespecs"},
    {"interfaces", "ownership", "pt2", "progress", "measures", "lowering_plan", "debug_handles", "isolation"},
    {"ambient"},
    {"registry", "checks", "report", "partition_builder", "refusals", "views", "capability", "debug_recording"},
    {"arguments", "planning", "asking", "availability"},
    {"edge_errors"},
    {"transforming"},
    {"edge", "tagging", "extraction", "preprocessing", "splicing", "placement", "sealing", "shared_state"},
    {"originals"},
    {"emission"},
    {"lowered"},
    {"pipeline"},
    {"runtime"},
    {"compat", "lowered_module"},
    {"demo", "testing"},
    {"cli"},
    {"__main__"},
]
"""Each module may import modules of the layers before its own."""

SAME_LAYER = {"quotient": {"graphs"}}

LATER = {"lowering_plan": {"views"}, "lowered": {"lowered_module"}}
"""What a module imports when it is called only: a plan's pictures are made of plans; a module runs what is lowered."""

FOR_PLUGINS = {
    *("asking", "capability", "collector", "graphs", "interrupts", "locks", "measures", "quotient"),
    *("refusals", "registry"),
    *("budget", "checked_calls", "pure_operators"),
}
"""Modules that the built-in plug-ins share with the engine, beside the public names: what they need of FX graphs, and
what their delegates need to execute what a file says."""

ALGORITHMS = {
    "planning": {"exir_lowering.graphs.schedule"},
    "views": {"exir_lowering.graphs.schedule"},
    "compat": {"exir_lowering.partitioners.drop_in"},
    "testing": {"exir_lowering.partitioners"},
}
"""What the engine takes from the folder of partitioners: algorithms. The suite for plug-ins makes partitioners."""


UPSTREAM = {"_upstream.py", "_upstream_torch.py"}
"""Where private names of torch and executorch are: the second is for the run-time side, which has torch alone."""


def _files() -> list[Path]:
    own = [p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE).parts[0] not in ("backends", "partitioners")]
    return own + [p for folder in ("backends", "partitioners") for p in (ROOT / folder).rglob("*.py")]


def _imports(path: Path) -> list[tuple[str, str]]:
    """Return (module, name) of every import in a file; name is "" for a plain import."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


def _own_imports(path: Path) -> set[str]:
    modules = set()
    for module, name in _imports(path):
        if module == "exir_lowering":
            modules.add(name)
        elif module.startswith("exir_lowering."):
            modules.add(module.split(".")[1])
    return modules


def _module(path: Path) -> str:
    relative = path.relative_to(PACKAGE).with_suffix("")
    return relative.parts[0]


def test_every_module_has_a_layer() -> None:
    own = {_module(p) for p in _files() if p.is_relative_to(PACKAGE)} - {"__init__"}
    assert own == set().union(*LAYERS)


@pytest.mark.parametrize("path", [p for p in _files() if p.is_relative_to(PACKAGE)], ids=lambda p: p.stem)
def test_modules_import_lower_layers_only(path: Path) -> None:
    module = _module(path)
    if module == "__init__":
        return
    level = next(i for i, layer in enumerate(LAYERS) if module in layer)
    allowed = set().union(*LAYERS[:level]) | {module} | SAME_LAYER.get(module, set()) | LATER.get(module, set())
    names = _own_imports(path) & set().union(*LAYERS)
    assert names <= allowed, f"{module} imports {sorted(names - allowed)}"
    plugins = {m for m, _ in _imports(path) if m.startswith(("exir_lowering.partitioners", "exir_lowering.backends"))}
    assert plugins <= ALGORITHMS.get(module, set())


@pytest.mark.parametrize("path", [p for p in _files() if not p.is_relative_to(PACKAGE)], ids=lambda p: p.stem)
def test_plugins_import_public_names_only(path: Path) -> None:
    import exir_lowering

    for module, name in _imports(path):
        if module == "exir_lowering":
            assert name in exir_lowering.__all__ or name in FOR_PLUGINS, f"{path}: {name}"
        elif module.startswith("exir_lowering."):
            assert module.split(".")[1] in ("backends", "partitioners"), f"{path}: {module}"


@pytest.mark.parametrize("path", [p for p in _files() if p.name not in UPSTREAM], ids=lambda p: p.stem)
def test_private_upstream_names_are_in_one_file(path: Path) -> None:
    for module, name in _imports(path):
        if module.split(".")[0] in ("torch", "executorch"):
            parts = [*module.split("."), name]
            assert not any(part.startswith("_") for part in parts), f"{path}: from {module} import {name}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            value = node.value
            own = isinstance(value, ast.Name) and value.id in ("self", "cls", "_upstream")
            own = own or ast.unparse(node).startswith("torch.ops.")  # an operator's name
            own = own or ast.unparse(node) == "sys._current_frames"  # a documented name
            assert own, f"{path}:{node.lineno}: {ast.unparse(node)} is a private attribute of something else"


@pytest.mark.parametrize("path", _files(), ids=lambda p: p.stem)
def test_what_catches_everything_lets_interrupts_through_first(path: Path) -> None:
    """A timeout's exception, or a MemoryError, must not become somebody's failure."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler) and node.type is not None and ast.unparse(node.type) == "Exception":
            first = ast.unparse(node.body[0])
            known = first.startswith(("let_through(", "interrupts.let_through(")) or "raised_by_handler(" in first
            assert known, f"{path}:{node.lineno}: begin with let_through(error) of exir_lowering.errors.interrupts"


@pytest.mark.parametrize("path", _files(), ids=lambda p: p.stem)
def test_no_assert_and_no_deepcopy_in_shipped_code(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def test_only_tagging_and_the_sweep_touch_the_tag() -> None:
    """node.meta carries one key of ours; what else is in it belongs to torch and ExecuTorch."""
    users = {_module(p) for p in _files() if p.is_relative_to(PACKAGE) and "DELEGATION_TAG" in p.read_text()}
    assert users == {"graphs", "tagging", "extraction", "partition_builder", "ownership", "checks", "refusals"}


def test_nothing_imports_the_suite_for_plugins_and_it_imports_pytest_late() -> None:
    for path in _files():
        inside = path.is_relative_to(PACKAGE / "testing")
        assert inside or "testing" not in _own_imports(path) or path.name == "__init__.py", path
        if inside:
            top = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
            assert not any("pytest" in ast.unparse(node) for node in top), path
