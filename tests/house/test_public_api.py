"""Importing the package: its names are there, and the process is as it was. `test_reference` has the list of names."""

import forked

import exir_lowering


def test_the_public_names() -> None:
    assert all(hasattr(exir_lowering, name) for name in exir_lowering.__all__)


def test_importing_does_not_touch_the_process() -> None:
    """No logger is configured, no warning filter set, no recursion limit changed."""
    script = (
        "import logging, sys, warnings, executorch.exir\n"
        "def state(): return (logging.root.level, len(logging.root.handlers), len(warnings.filters), "
        "sys.getrecursionlimit())\n"
        "before = state()\n"
        "import exir_lowering\n"
        "assert state() == before, (before, state())\n"
    )
    done = forked.run(script, fresh=True, quiet=False)
    assert done.returncode == 0, done.stderr[-1500:]
