"""How tests share workers: those of a file run in one, so that they share fixtures, but each model goes its own way."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests for `--dist loadgroup`: by file, and in the tests of whole models by model."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        file = Path(item.path).stem
        model = str(callspec.params["case"]) if callspec is not None and "case" in callspec.params else ""
        item.add_marker(pytest.mark.xdist_group(f"{file}[{model}]" if file == "test_models" else file))
