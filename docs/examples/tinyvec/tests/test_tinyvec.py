"""The package from outside: it keeps the contract of backends, and computes what eager PyTorch computes."""

import subprocess
import sys

import pytest
import torch
from tinyvec.backend import TinyvecBackend
from tinyvec.delegate import TinyvecDelegate
from tinyvec.partitioner import tinyvec_partitioner

from exir_lowering import BackendFailure, CompileSpec, load, lower, plan
from exir_lowering.partitioners import SupportPartitioner, ops
from exir_lowering.testing import conformance_tests

# What the machine has; without `cases=` every case is tried, and skipped where it gets nothing.
OWN = ["ops/add*", "ops/sub", "ops/mul*", "ops/relu", "ops/mm", "ops/linear", "dtype/float32"]
FEATURES = "layout", "weights", "dynamic", "degenerate", "partitions", "methods", "nested", "life", "errors"
PROGRAMS = [f"{feature}/*" for feature in FEATURES]

test_conformance = conformance_tests(
    TinyvecBackend, TinyvecDelegate, partitioner=tinyvec_partitioner(), cases=OWN + PROGRAMS
)


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
def lowered(program):
    return {precision: lower(program, tinyvec_partitioner(precision)) for precision in ("float32", "float16")}


@pytest.fixture(scope="module")
def files(lowered, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for precision, methods in lowered.items():
        methods.emit().save(folder / f"{precision}.pte")
    return folder


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("float16", 1e-2)])
def test_a_saved_file_equals_eager(model, files, precision, tolerance):
    loaded = load(files / f"{precision}.pte")
    for size in (1, 8, 3):
        x = torch.randn(size, 64)
        (got,) = loaded.run("forward", x)
        torch.testing.assert_close(got, model(x), atol=tolerance, rtol=tolerance)


def test_the_entry_points_lead_here(program):
    (method,) = plan(program, "tinyvec").methods
    assert [p.backend_id for p in method.partitions] == ["tinyvec", "tinyvec"]
    assert [node.operator for node in method.host] == ["aten.sigmoid.default"]


def test_half_precision_takes_half_the_bytes(model, files):
    weights = sum(parameter.numel() for parameter in model.parameters())
    sizes = [(files / f"{precision}.pte").stat().st_size for precision in ("float32", "float16")]
    assert sizes[0] - sizes[1] == pytest.approx(2 * weights, rel=0.01)


def test_methods_share_weights(program, files):
    two = lower({"one": program, "two": program}, "tinyvec").emit()
    assert len(two.buffer) < 1.2 * (files / "float32.pte").stat().st_size


def test_the_plan_says_why(program):
    (node,) = plan(program, "tinyvec").methods[0].host
    assert node.reason == "aten.sigmoid.default is not in the supported operators"
    assert "torch.sigmoid(self.down" in node.source


def test_a_refusal_has_the_source_line(program):
    greedy = SupportPartitioner({"tinyvec": ops("aten.sigmoid.default")})
    with pytest.raises(BackendFailure, match=r"tinyvec does not have aten.sigmoid.default. Source code: .*in forward"):
        lower(program, greedy)


@pytest.mark.parametrize("spec", [CompileSpec("precision", b"int4"), CompileSpec("speed", b"float16")])
def test_an_unknown_compile_spec(program, spec):
    wrong = SupportPartitioner({"tinyvec": ops("aten.mul.Tensor")}, compile_specs={"tinyvec": [spec]})
    with pytest.raises(
        BackendFailure, match=rf"got the compile spec {spec.key}=.*expected precision=float32 or float16"
    ):
        lower(program, wrong)


def test_a_profile_has_the_instructions(files):
    profile = load(files / "float32.pte").profile("forward", torch.ones(3, 64))
    rows = {row.name: row.sources for row in profile.rows if row.kind == "instruction"}
    assert list(rows) == ["aten.linear.default #0", "aten.relu.default #1", "aten.linear.default #2",
                          "aten.mul.Tensor #3", "aten.sub.Tensor #0"]  # fmt: skip
    assert all("in forward: return x - torch.sigmoid(" in source for (source,) in rows.values())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda payload: b"", "This is no payload of tinyvec: it has 0 bytes"),
        (lambda payload: payload[:4] + b"\x02" + payload[5:], "has version 2, expected 1. Lower the model again"),
        (lambda payload: payload[:-1], "cut off"),
        (lambda payload: payload[:-1] + b" ", "damaged"),
    ],
)
def test_damaged_payloads(files, change, text):
    class Changed(TinyvecDelegate):
        def compile(self, processed, compile_specs, context):
            return super().compile(change(bytes(processed)), compile_specs, context)

    with pytest.raises(BackendFailure, match=text):
        load(files / "float32.pte", delegates=[Changed])


def test_the_delegate_imports_no_compiler():
    script = "import sys, tinyvec.delegate; print('tinyvec.backend' in sys.modules, 'executorch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["False", "False"], done.stderr
