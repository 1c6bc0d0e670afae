"""The interpreter gives what ExecuTorch's runtime gives: the runtime's own tests, run by it, and both side by side."""

from __future__ import annotations

from functools import partial

import pytest
import test_delegates
import test_runtime
from test_delegates import adds, xy  # noqa: F401
from test_runtime import external, fixed, net, numbers, two_methods, two_methods_file  # noqa: F401

import exir_lowering


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """The tests of the runtime load their files into the interpreter."""
    for module in (test_delegates, test_runtime):
        monkeypatch.setattr(module, "load", partial(exir_lowering.load, engine="interpreter"))


class TestRun(test_runtime.TestRun):
    pass


class TestLayout(test_runtime.TestLayout):
    pass


class TestWrongInputs(test_runtime.TestWrongInputs):
    def test_a_value_that_a_kernel_refuses(self):
        program = exir_lowering.load(lower(export(Lookup(), (torch.tensor([1, 2]),))).emit().buffer, engine=PYTHON)
        (before,) = program.run("forward", torch.tensor([1, 2]))
        message = message_of(lambda: program.run("forward", torch.tensor([7, 8])), InputError)
        assert "failed in the interpreter, at aten::embedding.out: index out of range" in message
        assert "look at their values" in message
        assert torch.equal(program.run("forward", torch.tensor([1, 2]))[0], before)


class TestWrongSources(test_runtime.TestWrongSources):
    pass


class TestDataFile(test_runtime.TestDataFile):
    pass


class TestDelegates(test_delegates.TestRun):
    pass


class TestFailures(test_delegates.TestFailures):
    pass


class TestLookUp(test_delegates.TestLookUp):
    pass


class TestNested(test_delegates.TestNested):
    pass


class TestResources(test_delegates.TestResources):
    pass
