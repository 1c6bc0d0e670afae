"""Files are loaded and run without ExecuTorch's compiler, and without the parts of this one that lower."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import executorch.extension.pybindings.portable_lib as wrapper
import pytest
import torch
from torch import nn
from torch.export import export

import exir_lowering
from exir_lowering._upstream import operators, runtime

INPUT = (torch.linspace(-1.0, 1.0, 12).reshape(1, 3, 2, 2),)


class Model(nn.Module):
    """Has work for XNNPACK, for portable kernels (one of them only ExecuTorch's), and for a Python delegate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(self.linear(x).to(torch.float64), 0).sin()


RUN = """
import os, sys
from exir_lowering.cli import main

folder = sys.argv[1]
if os.fork() == 0:  # it takes the views of plans
    os._exit(main(["inspect", folder + "/xnnpack.pte"]) or "sympy" in sys.modules)
assert os.wait()[1] == 0
assert main(["run", folder + "/xnnpack.pte"]) == 0 and "sympy" not in sys.modules
import torch
import exir_lowering

given = torch.load(folder + "/input.pt")
expected = torch.load(folder + "/expected.pt")
def check(got): torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)

assert len(exir_lowering.load(folder + "/xnnpack.pte").method_names) == 1
for name in ("xnnpack", "reference"):
    check(*exir_lowering.load(f"{folder}/{name}.pte").run("forward", given))
check(exir_lowering.LoweredModule.load(folder + "/module.pte")(given))
assert main(["run", folder + "/xnnpack.pte", "--inputs", folder + "/input.pt"]) == 0
ahead = ("executorch.exir", "executorch.backends", "exir_lowering.steps", "exir_lowering.pipeline",
         "exir_lowering.partitioners", "exir_lowering.plans", "torch._dynamo")
found = sorted(name for name in sys.modules if any(name == one or name.startswith(one + ".") for one in ahead))
assert main(["verify", folder + "/xnnpack.pte", folder + "/model.pt2"]) == 0
import json
print(json.dumps([*found, *("executorch.exir" for name in sys.modules if name == "executorch.exir")]))
"""

FALLBACK = """
import sys
import torch
import exir_lowering
from exir_lowering._upstream import runtime

runtime._EXTENSION = "executorch.extension.pybindings._renamed"
(got,) = exir_lowering.load(sys.argv[1] + "/xnnpack.pte").run("forward", torch.load(sys.argv[1] + "/input.pt"))
torch.testing.assert_close(got, torch.load(sys.argv[1] + "/expected.pt"), rtol=1e-4, atol=1e-4)
import json
print(json.dumps(runtime.executorch_runtime().__name__))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    program = export(Model(), INPUT)
    for partitioner in ("xnnpack", "reference"):
        exir_lowering.lower(program, partitioner).emit().save(folder / f"{partitioner}.pte")
    exir_lowering.lower(program, "xnnpack").module().save(folder / "module.pte")
    torch.export.save(program, folder / "model.pt2")
    torch.save(INPUT[0], folder / "input.pt")
    torch.save(Model()(*INPUT).detach(), folder / "expected.pt")
    return folder


def _child(script: str, folder: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_running_a_file_imports_nothing_that_lowers(folder: Path) -> None:
    assert _child(RUN, folder) == []


QUIET = """
import logging, sys, warnings
import torch
def state():
    return logging.root.level, len(logging.root.handlers), len(warnings.filters), sys.getrecursionlimit()
before = state()
import exir_lowering
assert state() == before
from exir_lowering import LoweringOptions, graphs, inspect, load, quantize, verify
assert "executorch.exir" not in sys.modules
from exir_lowering.plugins import Backend
assert "executorch.exir" in sys.modules and "torch._inductor.fx_passes.post_grad" not in sys.modules
assert all(hasattr(exir_lowering, name) for name in exir_lowering.__all__)
from torch.export import Dim, export
program = export(torch.nn.Linear(2, 2).eval(), (torch.ones(2, 2),), dynamic_shapes=({0: Dim("rows", max=8)},))
for fast in (False, True):
    lowered = exir_lowering.lower(program, "xnnpack", options=LoweringOptions(fast=fast))
    lowered.emit().save(sys.argv[1] + "/quiet.pte")
    exir_lowering.load(sys.argv[1] + "/quiet.pte").run("forward", torch.ones(2, 2))
    assert fast or not [name for name in sys.modules if name.startswith("exir_lowering.fast.")]
for limits in (None, exir_lowering.Limits()):
    exir_lowering.load(sys.argv[1] + "/quiet.pte", limits=limits).run("forward", torch.ones(2, 2))
"""


def test_nothing_foreign_is_on_the_console_or_in_the_process(tmp_path: Path) -> None:
    """Importing changes nothing, and takes no compiler before it is needed; without `fast`, nothing of it is there."""
    done = subprocess.run([sys.executable, "-c", QUIET, str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_wheel_that_looks_different_is_used_by_its_own_wrapper(folder: Path) -> None:
    assert _child(FALLBACK, folder) == "executorch.extension.pybindings.portable_lib"


def test_an_extension_that_lacks_a_name_is_left_to_the_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime._extension() is not None
    monkeypatch.setattr(runtime, "_USED", runtime._USED | {"of_a_later_release"})
    assert runtime._extension() is None


def test_the_wrapper_does_nothing_else_beside_the_extension() -> None:
    """What `portable_lib.py` does beside importing the extension is done by `_extension`: look again if it changes."""
    tree = ast.parse(Path(wrapper.__file__).read_text())
    left = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom, ast.Delete))]
    digest = hashlib.sha256("\n".join(map(ast.unparse, left)).encode()).hexdigest()
    assert digest[:16] == "4235d1a2c445ddd8"


@pytest.mark.parametrize(("name", "overload"), sorted(text.partition("(")[0].split(".") for text in operators._SCHEMAS))
def test_schemas_are_those_that_the_compiler_registers(name: str, overload: str) -> None:
    schema = torch._C._get_schema(name, overload)
    assert str(operators.executorch_schema(name, overload)) == str(schema)


class Rows(nn.Module):
    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        weight, scale = torch.tensor([[0x8F], [0x97]], dtype=torch.uint8), torch.tensor([1.0, 2.0])
        rows: torch.Tensor = torch.ops.quantized_decomposed.embedding_4bit(weight, scale, None, -8, 7, indices)
        return rows


WITHOUT_COMPILER = """
import sys, json, torch, exir_lowering
program = exir_lowering.load(sys.argv[1] + "/rows.pte")
result = program.run("forward", torch.tensor([[1, 0]]))[0].tolist()
print(json.dumps([result, [name for name in sys.modules if name.startswith("executorch.exir")]]))
"""


def test_quantised_embeddings_need_no_compiler(tmp_path: Path) -> None:
    """Only the compiler registers them with torch; a file is checked, and runs, without it too."""
    exir_lowering.lower(export(Rows(), (torch.tensor([[1, 0]]),))).emit().save(tmp_path / "rows.pte")
    assert _child(WITHOUT_COMPILER, tmp_path) == [[[[2.0, -2.0], [0.0, 7.0]]], []]
