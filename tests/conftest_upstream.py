"""A pytest plug-in: run whatever tests are collected with exir-lowering as ExecuTorch's engine."""

import pytest

from exir_lowering import compat


@pytest.fixture(autouse=True, scope="session")
def _exir_lowering_engine():
    with compat.patch_executorch():
        yield
