"""The run time in C++: built against ExecuTorch's wheel, it computes what eager PyTorch computes."""

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tinyvec import MAGIC, VERSION
from tinyvec.backend import TABLE, TinyvecBackend, tinyvec_partitioner

from exir_lowering import Limits, PreprocessResult, load, lower
from exir_lowering.plugins import Instruction, Instructions
from exir_lowering.testing import check_backend

CPP = Path(__file__).parent.parent / "cpp"
pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake")


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder with the library and the program `run`."""
    folder = tmp_path_factory.mktemp("build")
    (package,) = importlib.util.find_spec("executorch").submodule_search_locations
    for command in (["-S", CPP, "-B", folder, f"-DCMAKE_PREFIX_PATH={package}"], ["--build", folder]):
        done = subprocess.run(["cmake", *command], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def library(built):
    return next(built.glob("libtinyvec.*"))


def run(built, path, *words):
    """Run a file in the program, with ones; return its outputs."""
    done = subprocess.run([built / "run", path, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = []
    for line in done.stdout.splitlines():
        sizes, _, numbers = line.partition(" ")
        shape = [int(size) for size in sizes.strip("[]").split("][")] if sizes else []
        found.append(torch.tensor([float(number) for number in numbers.split()]).view(shape))
    return found


class Model(torch.nn.Module):
    """Every operator, weights that are views or zeros, a buffer that is written, two outputs, a dynamic size."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4, bias=False)
        self.matrix = torch.nn.Parameter(torch.randn(8, 4).T)
        self.register_buffer("zeros", torch.zeros(4))
        self.register_buffer("total", torch.full((8,), 10.0))

    def forward(self, x):
        hidden = self.down(torch.relu(self.up(x)))
        out = torch.mm(hidden, self.matrix) * self.total - x
        self.total.add_(self.total)
        return torch.add(out, x, alpha=0.5), hidden + self.zeros


def make():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    batch = torch.export.Dim("batch", min=1, max=8)
    program = torch.export.export(make(), (torch.ones(2, 8),), dynamic_shapes={"x": {0: batch}})
    lowered = lower(program, TABLE.partitioner(own_state=True), backends={"tinyvec": TinyvecBackend})
    assert [len(method.partitions) for method in lowered.report.methods] == [1] and not lowered.report.methods[0].host
    path = tmp_path_factory.mktemp("files") / "model.pte"
    lowered.emit().save(path)
    return path


@pytest.mark.parametrize("size", [8, 1, 3])
def test_a_program_in_cpp_equals_eager(built, file, size):
    for got, expected in zip(run(built, file, str(size)), make()(torch.ones(size, 8)), strict=True):
        torch.testing.assert_close(got, expected)


def test_python_runs_the_library(library, file):
    """In a process of its own: in this one, the delegate in Python may have the id."""
    for _ in range(2):  # each program has a state of its own
        loaded, model = load(file, libraries=[library], limits=Limits()), make()
        for size in (1, 8, 3):
            x = torch.randn(size, 8)
            for got, expected in zip(loaded.run("forward", x), model(x), strict=True):
                torch.testing.assert_close(got, expected)
    rows = loaded.profile("forward", torch.randn(8, 3).T @ torch.eye(8)).rows
    assert [row.name for row in rows if row.kind == "instruction"][:4] == ["LINEAR #0", "RELU #1", "LINEAR #2", "MM #3"]


def test_conformance_of_the_library(library):
    """The library executes what the backend makes; a crash of it would be a failure of one case."""
    print(check_backend(TinyvecBackend, partitioner=tinyvec_partitioner(), libraries=[library]))


def written(code, *outputs):
    return Instructions(1, (), (), code, outputs).to_bytes(MAGIC, VERSION)


RELU = Instruction("RELU", [{"value": 0}])


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"", "of another backend"),
        (written([RELU], 1)[:-1], "cut off or damaged"),
        (Instructions(1, (), (), [RELU], [1]).to_bytes(MAGIC, VERSION + 1), f"version {VERSION + 1}, expected"),
        (written([RELU], 2), "a number is missing or too large"),
        (written([Instruction("RELU", [{"value": 1}])], 1), "used before it is there"),
        (written([Instruction("RELU", [1.5])], 1), "an operand is of another kind"),
        (written([Instruction("TANH", [{"value": 0}])], 1), "an opcode is unknown"),
        (written([Instruction("RELU", [])], 1), "an opcode has other arguments"),
        (written([Instruction("MM", [{"value": 0}, {"value": 0}])], 1), "a product of other sizes"),
        (written([Instruction("RELU", json.loads("[" * 20 + "]" * 20))], 1), "nested too deep"),
    ],
)
def test_a_wrong_payload_is_an_error_and_no_crash(built, payload, said, tmp_path):
    class Wrong(TinyvecBackend):
        def preprocess(self, program, compile_specs, context):
            return PreprocessResult(payload)

    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2, 3),))
    lower(program, tinyvec_partitioner(), backends={"tinyvec": Wrong}).emit().save(tmp_path / "wrong.pte")
    done = subprocess.run([built / "run", tmp_path / "wrong.pte"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and said in done.stderr, done.stderr
