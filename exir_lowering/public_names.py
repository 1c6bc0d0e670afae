"""The public names of a package: listed once, in its `__init__.pyi`, and imported when they are first used."""

import ast
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def from_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a package, of the names that its stub imports."""
    with open(f"{os.path.splitext(file)[0]}.pyi", encoding="utf-8") as stub:
        imports = [node for node in ast.parse(stub.read()).body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: node.module for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        within = modules[name]
        module = import_module(f"{package}.{within or name}")
        value = getattr(module, name) if within else module
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(modules), sorted(modules)
