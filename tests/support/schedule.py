"""Which tests run one after the other in one worker, and about how long that takes.

A file is a group. Files that would be long chains are divided, where their tests share no costly fixture.
"""

from __future__ import annotations

from pathlib import Path

import pytest

BY_FUNCTION = frozenset({"test_docs", "test_growth", "test_properties", "test_threads", "test_upstream_rows"})
BY_CLASS = frozenset({"test_delegates", "test_lowered_module", "test_runtime"})
BY_PARAMETER = {
    "test_generation": "file",
    "test_interpreter": "name",
    "test_models": "case",
    "test_transform_passes": "kind",
    "test_upstream_suite": "part",
}
"""Files that are divided by the value of one parameter; tests that do not have it are a group of their own."""

SECONDS: dict[str, float] = {}
"""Seconds on a quiet core, of the groups that take more than ten."""


def group_of(item: pytest.Item) -> str:
    """Return the name of the group that a test belongs to; without brackets, in which xdist would not find it."""
    file = Path(item.path).stem
    part = ""
    if file in BY_FUNCTION:
        part = getattr(item, "originalname", item.name)
    elif file in BY_CLASS:
        part = getattr(getattr(item, "cls", None), "__name__", "")
    elif file in BY_PARAMETER and hasattr(item, "callspec"):
        part = str(item.callspec.params.get(BY_PARAMETER[file], ""))
    return f"{file}:{part}" if part else file
