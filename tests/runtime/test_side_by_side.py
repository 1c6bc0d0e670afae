"""Files give what eager PyTorch gives, side by side; and what `load` says where nothing can run them."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import pytest
import runtime_children
import runtime_models
import torch
from executorch.exir import ExecutorchBackendConfig
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from lowering_support import TagPartitioner, by_operator
from models import build
from random_programs import random_program
from torch import nn
from torch.export import Dim, export

from exir_lowering import InputError, load, lower


def same(results, others, tolerance=1e-4):
    assert len(results) == len(others)
    for result, other in zip(results, others, strict=True):
        assert type(result) is type(other)
        if isinstance(result, torch.Tensor):
            torch.testing.assert_close(result, other, atol=tolerance, rtol=tolerance)
        else:
            assert result == other


@pytest.mark.parametrize(("name", "partitioner"), [("mobilenet_v2", None), ("llama", "xnnpack")])
def test_models(name, partitioner):
    model, inputs = build(name)
    model.requires_grad_(False)
    content = lower(export(model, inputs), partitioner).emit().buffer
    same(load(content).run("forward", *inputs), [model(*inputs)])


@pytest.mark.parametrize("seed", [3, 7, 8, 9, 21])
def test_random_programs(seed):
    """Several methods, state, lists, higher-order operators, numbers: those that ExecuTorch can emit."""
    random = random_program(seed)
    state = InitializedMutableBufferPass(["f0", "f1", "f2", "count"])
    program = load(lower(random.methods, "xnnpack").emit(ExecutorchBackendConfig(passes=[state])).buffer)
    ran = 0
    for method, calls in random.inputs.items():
        for inputs, expected in zip(calls, random.expected[method], strict=True):
            try:
                results = program.run(method, *copy.deepcopy(inputs))
            except InputError as error:
                assert "input 2" in str(error)  # a number that ExecuTorch's files have no room for
                break
            same(results, [plain(value) for value in expected[: len(results)]])
            ran += 1
    assert ran


def plain(value):
    return value.detach().as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value


CASES = {
    "views": (runtime_models.Viewed(), (torch.randn(2, 3), torch.randn(3, 2)), None, "xnnpack"),
    "xnnpack": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (torch.randn(2, 3, 8, 8),), 8, "xnnpack"),
    "reference": (runtime_models.Net(), (torch.randn(2, 3, 8, 8),), 6, "reference"),
    "reference with state": (runtime_models.Count(), (torch.ones(3),), None, "reference"),
    "compiler_demo": (
        runtime_models.AddSin(),
        (torch.randn(2, 3), torch.randn(2, 3)),
        8,
        TagPartitioner(by_operator("aten.add.Tensor"), "compiler_demo"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_of_every_size(case):
    torch.manual_seed(0)
    module, inputs, largest, partitioner = CASES[case]
    module = module.eval().requires_grad_(False)
    batch = Dim("batch", min=1, max=largest) if largest else None
    shapes = tuple({0: batch} if batch else None for _ in inputs)
    program = export(copy.deepcopy(module), inputs, dynamic_shapes=shapes)
    config = ExecutorchBackendConfig(passes=[InitializedMutableBufferPass(["total"])])
    loaded = load(lower(program, partitioner).emit(config).buffer)
    for size in (1, largest, 2) if largest else (None,) * 3:
        given = tuple(torch.randn(size or each.shape[0], *each.shape[1:]) for each in inputs)
        with torch.no_grad():
            expected = module(*given)
        same(loaded.run("forward", *given), list(expected) if isinstance(expected, tuple) else [expected])


def output(code, content, **environment):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pte"
        path.write_bytes(content)
        done = runtime_children.run(code, path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_without_a_compiler(adds, tmp_path):
    code = (
        "import sys, torch\nfrom scripted import ScriptDelegate\n"
        "from exir_lowering import BackendUnavailableError, load\n"
        "try:\n    load(sys.argv[1], delegates=[ScriptDelegate])\n"
        "except BackendUnavailableError as error:\n    print(error)\n"
    )
    said = output(code, adds, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "need a C++ compiler once" in said
    assert "apt-get install g++" in said
    assert not (tmp_path / "cache").exists() or not [*(tmp_path / "cache").rglob("*.so")]


WITHOUT_THE_RUNTIME = """
import sys
for name in ("executorch.runtime", "executorch.extension.pybindings._C"):
    sys.modules[name] = None
from exir_lowering import BackendUnavailableError, load
try:
    load(sys.argv[1])
except BackendUnavailableError as error:
    print(error)
"""


def test_without_the_runtime(fixed):
    said = output(WITHOUT_THE_RUNTIME, fixed)
    assert "the ExecuTorch runtime cannot be imported here" in said
    assert "Install executorch again" in said
