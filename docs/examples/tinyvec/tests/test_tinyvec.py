"""The package from outside: it keeps the contract of backends, and computes what eager PyTorch computes."""

import subprocess
import sys

import pytest
import torch
from tinyvec.backend import TinyvecBackend, tinyvec_partitioner
from tinyvec.delegate import TinyvecDelegate

from exir_lowering import BackendFailure, load, lower, plan
from exir_lowering.partitioners import SupportPartitioner, ops
from exir_lowering.testing import conformance_tests

test_conformance = conformance_tests(TinyvecBackend, TinyvecDelegate, partitioner=tinyvec_partitioner())


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64, bias=False)

    def forward(self, x):
        return x - torch.sigmoid(self.down(torch.relu(self.up(x))) * x)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def program(model):
    batch = torch.export.Dim("batch", min=1, max=8)
    return torch.export.export(model, (torch.ones(2, 64),), dynamic_shapes={"x": {0: batch}})


@pytest.fixture(scope="module")
def file(program, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "model.pte"
    lower(program, "tinyvec").emit().save(path)
    return path


def test_a_saved_file_equals_eager(model, file):
    loaded = load(file)
    for size in (1, 8, 3):
        x = torch.randn(size, 64)
        (got,) = loaded.run("forward", x)
        torch.testing.assert_close(got, model(x))


def test_the_plan_says_what_stays_on_the_host_and_why(program):
    (method,) = plan(program, "tinyvec").methods
    assert [p.backend_id for p in method.partitions] == ["tinyvec", "tinyvec"]
    (node,) = method.host
    assert node.reason == "aten.sigmoid.default is not in the supported operators"
    assert "torch.sigmoid(self.down" in node.source


def test_a_refusal_has_the_source_line(program):
    greedy = SupportPartitioner({"tinyvec": ops("aten.sigmoid.default")})
    with pytest.raises(BackendFailure, match=r"does not take aten.sigmoid.default: .* Source code: .*in forward"):
        lower(program, greedy)


def test_a_profile_has_the_instructions(file):
    profile = load(file).profile("forward", torch.ones(3, 64))
    rows = {row.name: row.sources for row in profile.rows if row.kind == "instruction"}
    assert list(rows) == ["LINEAR #0", "RELU #1", "LINEAR #2", "MUL #3", "SUB #0"]
    assert all("in forward: return x - torch.sigmoid(" in source for (source,) in rows.values())


def test_the_delegate_imports_no_compiler():
    script = "import sys, tinyvec.delegate; print('tinyvec.backend' in sys.modules, 'executorch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["False", "False"], done.stderr
