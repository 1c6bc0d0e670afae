"""Files are loaded and run without ExecuTorch's compiler, and without the parts of this one that lower."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import executorch.extension.pybindings.portable_lib as wrapper
import pytest
import torch
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch import nn
from torch.export import export

import exir_lowering
from exir_lowering._upstream import installed, operators, runtime
from exir_lowering._upstream.operators import FunctionalOperator, functional_operator
from exir_lowering.pte import inference
from exir_lowering.pte.value_kinds import BOOL, DOUBLE, NULL, STRING, TENSOR, MemoryLayout

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
import sys
import torch
import exir_lowering
from exir_lowering.cli import main

folder, given = sys.argv[1], torch.load(sys.argv[1] + "/input.pt")
expected = torch.load(folder + "/expected.pt")
def check(got): torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)

assert len(exir_lowering.load(folder + "/xnnpack.pte").method_names) == 1
for name in ("xnnpack", "reference"):
    check(*exir_lowering.load(f"{folder}/{name}.pte").run("forward", given))
check(exir_lowering.LoweredModule.load(folder + "/module.pte")(given))
assert main(["run", folder + "/xnnpack.pte", "--input", folder + "/input.pt"]) == 0
ahead = ("executorch.exir", "executorch.backends", "exir_lowering.steps", "exir_lowering.pipeline",
         "exir_lowering.partitioners", "exir_lowering.plans", "torch._dynamo")
found = sorted(name for name in sys.modules if any(name == one or name.startswith(one + ".") for one in ahead))
import json
print(json.dumps(found))
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


@pytest.mark.parametrize(("name", "overload"), sorted(operators._parsed()))
def test_schemas_are_those_that_the_compiler_registers(name: str, overload: str) -> None:
    schema = torch._C._get_schema(name, overload)
    assert str(operators.executorch_schema(name, overload)) == str(schema)


@pytest.mark.parametrize("order", [None, [0, 1, 2, 3], [0, 2, 3, 1], [3, 2, 1, 0]])
def test_functions_compute_what_the_operators_do(order: list[int] | None) -> None:
    given = torch.empty(2, 3, 4, 5, device="meta", dtype=torch.int32)
    cases: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "_to_dim_order_copy": ((given,), {"dtype": torch.float16, "dim_order": order}),
        "_empty_dim_order": (([2, 3, 4, 5],), {"dtype": torch.float16, "dim_order": order or [0, 1, 2, 3]}),
        "_clone_dim_order": ((given,), {"dim_order": order}),
    }
    for name, (args, kwargs) in cases.items():
        found = functional_operator(f"dim_order_ops::{name}", "out")
        assert found is not None
        registered = getattr(torch.ops.dim_order_ops, name).default
        try:
            expected = registered(*args, **kwargs)
        except AssertionError as refusal:
            with pytest.raises(ValueError, match="Failed to map") as caught:
                found.call(*args, **kwargs)
            assert str(caught.value) == str(refusal)
            continue
        made = found.call(*args, **kwargs)
        assert (made.dtype, made.shape, made.stride()) == (expected.dtype, expected.shape, expected.stride())


@pytest.mark.parametrize("name", ["et_copy::_h2d_copy", "et_copy::_d2h_copy"])
def test_what_copies_between_devices_is_checked_by_its_names_of_arguments(name: str) -> None:
    found = functional_operator(name, "out")
    assert found is not None
    layout = MemoryLayout(torch.float32, (2, 3), (0, 1))
    assert inference._infer(found, ((TENSOR, layout),), None) == ((torch.float32, (2, 3)),)


def _pointwise_kernels() -> list[tuple[str, FunctionalOperator]]:
    names = (name.partition(".")[::2] for name in sorted(installed.kernels() or ()))
    found = ((name, functional_operator(name, overload)) for name, overload in names)
    return [(name, one) for name, one in found if one and torch.Tag.pointwise in getattr(one.call, "tags", ())]


def test_pointwise_operators_make_of_one_element_what_they_make_of_many() -> None:
    chosen, compared = random.Random(0), 0
    shapes = [(), (1,), (3,), (2, 3), (2, 1), (0,), (4,)]
    for name, operator in _pointwise_kernels():
        types = {argument.name: str(argument.type) for argument in operator.call._schema.arguments}
        for _ in range(60):
            given = tuple(_described(types[argument], chosen, shapes) for _, argument in operator.inputs)
            quick = inference._pointwise(operator, given)
            if quick is not None:
                named = {
                    argument: inference._value(one) for (_, argument), one in zip(operator.inputs, given, strict=True)
                }
                made = operator.call(**named)
                assert quick == (made.dtype, tuple(made.shape)), (name, given)
                compared += 1
    assert compared > 1000


def _described(kind: str, chosen: random.Random, shapes: list[tuple[int, ...]]) -> tuple[int, Any]:
    if "Tensor" in kind:
        if kind.startswith("Optional") and chosen.random() < 0.3:
            return NULL, None
        sizes = chosen.choice(shapes)
        dtype = chosen.choice([torch.float32, torch.float16, torch.float64, torch.bfloat16, torch.int32, torch.bool])
        return TENSOR, MemoryLayout(dtype, sizes, tuple(range(len(sizes))))
    if "number" in kind or "float" in kind:
        return DOUBLE, chosen.choice([1, 2.5, True, 0, -1])
    if "bool" in kind:
        return BOOL, chosen.choice([True, False])
    return (STRING, chosen.choice(["none", "tanh", "floor", "trunc"])) if "str" in kind else (NULL, None)


def test_compile_specs_are_executorchs() -> None:
    spec = runtime._CompileSpec("key", b"value")
    assert isinstance(spec, CompileSpec) and spec == CompileSpec("key", b"value") == spec
    assert spec != CompileSpec("key", b"other")
    assert repr(spec) == repr(CompileSpec("key", b"value"))
    assert type(runtime.compile_spec("key", b"value")) is CompileSpec  # it is imported in this process
    assert dataclasses.asdict(spec) == {"key": "key", "value": b"value"}
    assert dataclasses.replace(spec, key="other") == CompileSpec("other", b"value")
    assert type(pickle.loads(pickle.dumps(spec))) is CompileSpec and pickle.loads(pickle.dumps(spec)) == spec
