"""Old names of modules that moved: they work, they warn whoever imports them, and what they have is the same."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
from folders import ROOT

from exir_lowering.compat.moved import _INSTEAD, _MOVED


@pytest.mark.parametrize("old", sorted(_MOVED))
def test_an_old_name_warns_and_has_the_same_names(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match="removed in the next release") as caught:
        module = import_module(old)
    ours = [str(warning.message) for warning in caught if str(warning.message).startswith(old)]
    assert len(ours) == 1 and ours[0].endswith(f"use {_INSTEAD.get(old, _MOVED[old])}.")
    now = import_module(_MOVED[old])
    names = [name for name in dir(now) if not name.startswith("_")]
    assert names and all(getattr(module, name) is getattr(now, name) for name in names)
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        import_module("exir_lowering.no_such_module")


def test_the_warning_is_at_the_users_line() -> None:
    code = (
        "import warnings\nwarnings.simplefilter('error', DeprecationWarning)\n"
        "try:\n    from exir_lowering import weights\nexcept DeprecationWarning as warning:\n    print(warning)\n"
        "warnings.simplefilter('always', DeprecationWarning)\nfrom exir_lowering.weights import WeightStore\n"
        "import exir_lowering\nassert WeightStore is exir_lowering.WeightStore\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "use exir_lowering.graphs.weights" in done.stdout and "<string>:8: DeprecationWarning" in done.stderr
