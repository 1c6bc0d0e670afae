"""What the tests of the runtime load."""

import pytest
import torch
from executorch.exir import ExecutorchBackendConfig
from runtime_models import AddSin, Scaled, count, dynamic_net, program_of, sums
from scripted import scripted
from torch.export import export

from exir_lowering import lower


@pytest.fixture(scope="module")
def net():
    return dynamic_net()[0]


@pytest.fixture(scope="module")
def two_methods():
    """A method with a dynamic batch and delegates, and one with state."""
    return lower({"forward": dynamic_net()[1], "count": count()}, "xnnpack").emit()


@pytest.fixture(scope="module")
def two_methods_file(two_methods, tmp_path_factory):
    return two_methods.save(tmp_path_factory.mktemp("two") / "model.pte")


@pytest.fixture(scope="module")
def fixed():
    """A net of fixed shapes without a delegate."""
    return lower(export(dynamic_net()[0], (torch.randn(2, 3, 8, 8),))).emit().buffer


@pytest.fixture(scope="module")
def numbers():
    """A method that was exported with a float, a bool and a str; and constant methods."""
    program = export(Scaled(), (torch.ones(3), 2.5, True, None))
    return lower(program).emit(constant_methods={"version": 3, "ones": torch.ones(2)}).buffer


@pytest.fixture(scope="module")
def external(tmp_path_factory):
    artifact = lower(dynamic_net()[1]).emit(ExecutorchBackendConfig(external_constants=True))
    path = artifact.save(tmp_path_factory.mktemp("external") / "model.pte")
    (data,) = artifact.data_files
    return path, path.parent / data


@pytest.fixture(scope="module")
def adds():
    """One addition in a delegate, a sine after it, of any batch up to 8."""
    return scripted(program_of(AddSin(), torch.ones(2, 3), torch.ones(2, 3), batch=True), sums()).buffer


@pytest.fixture
def xy():
    return torch.randn(2, 3), torch.randn(2, 3)
