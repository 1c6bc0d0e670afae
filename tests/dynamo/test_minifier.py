"""torch's minifier, with a backend planted to be wrong: what it writes calls that backend and fails in the same way."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import forked
import pytest

PLANTED = '''
"""A package with torch.compile backends of its own: this project's, with options and with delegates that are wrong."""

from exir_lowering.backends.reference import ReferenceBackend, ReferenceDelegate
from exir_lowering.dynamo import backend
from exir_lowering.partitioners import SupportPartitioner, ops


class Planted(ReferenceBackend):
    backend_id = "Planted"


class Wrong(ReferenceDelegate):
    delegate_id = "Planted"

    def execute(self, handle, inputs):
        return [output + 1 for output in super().execute(handle, inputs)]


class Refusing(ReferenceDelegate):
    delegate_id = "Planted"

    def compile(self, processed, compile_specs, context):
        raise RuntimeError("planted to fail at compile time")


class Failing(ReferenceDelegate):
    delegate_id = "Planted"

    def execute(self, handle, inputs):
        raise RuntimeError("planted to fail at run time")


def _make(delegate):
    options = {
        "partitioners": SupportPartitioner({"Planted": ops("aten.relu.default")}),
        "backends": {"Planted": Planted},
        "delegates": {"Planted": delegate},
        "fallback": None,
    }
    return lambda module, inputs: backend(module, inputs, options=options)


wrong, refusing, failing = _make(Wrong), _make(Refusing), _make(Failing)
'''

PROGRAM = """
import os, sys, torch
from torch._dynamo import config

if sys.argv[3:]:  # forked: torch has read its variables
    config.repro_after = "dynamo"
    config.repro_level = int(os.environ["TORCHDYNAMO_REPRO_LEVEL"])
    config.debug_dir_root = os.environ["TORCH_COMPILE_DEBUG_DIR"]

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        x = torch.tanh(self.linear(x))
        return torch.cos(torch.relu(x)) * 2

torch.manual_seed(0)
backend, grad = sys.argv[1], sys.argv[2] == "grad"
with torch.set_grad_enabled(grad):
    result = torch.compile(Model(), backend=backend)(torch.randn(3, 4)).sum()
    if grad:
        result.backward()
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an installed package with entry points for torch."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "planted.py").write_text(PLANTED)
    info = folder / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    names = "".join(f"planted_{name} = planted:{name}\n" for name in ("wrong", "refusing", "failing"))
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{names}")
    return folder


class Run:
    """Scripts in one folder, each in a process of its own."""

    def __init__(self, package: Path, folder: Path, level: int) -> None:
        self.folder = folder
        path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.plain = {"PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
        self.asked = {"TORCHDYNAMO_REPRO_AFTER": "dynamo", "TORCHDYNAMO_REPRO_LEVEL": str(level)}
        self.asked["TORCH_COMPILE_DEBUG_DIR"] = str(folder / "debug")

    def program(self, backend: str, grad: str, *, fresh: bool = False) -> subprocess.CompletedProcess[str]:
        arguments = [backend, grad, *([] if fresh else ["forked"])]
        return forked.run(PROGRAM, *arguments, cwd=self.folder, env={**self.plain, **self.asked}, fresh=fresh)

    def script(self, path: Path) -> subprocess.CompletedProcess[str]:
        return forked.run(path, cwd=self.folder, env=self.plain)

    def launcher(self) -> Path:
        (found,) = self.folder.rglob("minifier_launcher.py")
        return found


TARGET = re.compile(r"^\s+\w+ = (torch\.[\w.]+)\(", re.MULTILINE)


def operators(script: Path) -> list[str]:
    """Return the operators of the graph in a script."""
    targets = [target.split(".") for target in TARGET.findall(script.read_text())]
    return [parts[3] if parts[1:3] == ["ops", "aten"] else parts[-1] for parts in targets]


@pytest.mark.parametrize(
    ("backend", "level", "grad", "message", "left"),
    [
        ("planted_wrong", 4, "no", "AccuracyError", ["linear", "tanh", "relu"]),
        ("planted_refusing", 2, "grad", "planted to fail at compile time", ["relu"]),
        pytest.param("planted_failing", 2, "grad", "planted to fail at run time", ["relu"], marks=pytest.mark.nightly),
    ],
)
def test_a_failure_becomes_a_small_script_that_fails_in_the_same_way(
    package: Path, tmp_path: Path, backend: str, level: int, grad: str, message: str, left: list[str]
) -> None:
    run = Run(package, tmp_path, level)
    done = run.program(backend, grad, fresh=backend == "planted_wrong")
    assert done.returncode != 0 and message in done.stderr, done.stderr[-3000:]
    assert f"backend='{backend}'" in run.launcher().read_text()
    run.script(run.launcher())
    repro = tmp_path / "repro.py"
    assert f"backend='{backend}'" in repro.read_text()
    assert operators(repro) == left, repro.read_text()
    done = run.script(repro)
    assert done.returncode != 0 and message in done.stderr, done.stderr[-3000:]


def test_what_is_right_runs_as_without_the_minifier(package: Path, tmp_path: Path) -> None:
    for level in (2, 4):
        done = Run(package, tmp_path, level).program("exir_lowering", "grad")
        assert done.returncode == 0, done.stderr[-3000:]
    assert not list(tmp_path.rglob("minifier_launcher.py")) and not (tmp_path / "repro.py").exists()
