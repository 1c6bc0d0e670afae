"""Files on ARM's kernels, which qemu runs: outputs as here, and at most the instructions of ExecuTorch's files."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import ExecutorchBackendConfig, ExecutorchProgramManager, to_edge_transform_and_lower
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from random_programs import random_method
from torch import nn
from torch.export import ExportedProgram, export

import exir_lowering
from exir_lowering import cli
from exir_lowering.errors import InputError
from exir_lowering.verification.aarch64 import Emulator, OnAarch64, compare, default_folder, pack, unpack

DEVICE = Path(__file__).parents[1] / "device"
VALUES = [
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(3, 4).to(torch.bfloat16),
    torch.tensor([True, False]),
    torch.zeros(0, 3),
    torch.tensor(7),
    torch.randint(-9, 9, (2, 1)).to(torch.int8),
]


def test_what_the_client_reads_and_writes() -> None:
    for one, back in zip(VALUES, unpack(pack(VALUES)), strict=True):
        assert torch.equal(one, back) and (one.dtype, one.dim_order()) == (back.dtype, back.dim_order())
    assert len(pack([1, 2.0, True])) == 3 * 8 + 8 + 8 + 1
    with pytest.raises(InputError, match="an input is 'x', expected numbers and tensors"):
        pack(["x"])


def test_what_is_not_set_up_is_said_with_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "relu.pte"
    exir_lowering.lower(export(nn.ReLU(), (torch.ones(2),)), "xnnpack").emit().save(file)
    assert cli.main(["check", str(file), "--on", "aarch64", "--device", str(tmp_path)]) == 2
    assert "run `tests/device/set_up.sh" in capsys.readouterr().err
    for given, text in (
        (["--inputs", str(file)], "--inputs applies to --on"),
        (["--tolerance", "0.1"], "--tolerance applies to --on"),
        (["--on", "aarch64", "--runtime", "1.4.1"], "--runtime does not apply to --on"),
    ):
        assert cli.main(["check", str(file), *given]) == 2
        assert text in capsys.readouterr().err
    with pytest.raises(InputError, match=r"tolerance: got -1\.0, expected a number above 0"):
        compare(None, file, exir_lowering.load(file), "forward", [torch.ones(2)], tolerance=-1.0)


# -- by night, on Debian 12, as root ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    """The emulator, set up the first time."""
    if shutil.which("apt-get") is None or (shutil.which("qemu-aarch64") is None and os.getuid() != 0):
        pytest.skip("needs Debian 12, and root the first time")
    set_up(default_folder())
    return Emulator(default_folder())


def set_up(folder: Path, *sources: Path) -> None:
    """Set it up in a folder, with sources in the client."""
    version = metadata.version("executorch").partition("+")[0]
    subprocess.run([str(DEVICE / "set_up.sh"), str(folder), version, *map(str, sources)], check=True)


def on_arm(emulator: Emulator, folder: Path, content: Any, inputs: Any) -> OnAarch64:
    """Compare a file's "forward"."""
    path = folder / "model.pte"
    path.write_bytes(content)
    return compare(emulator, path, exir_lowering.load(path), "forward", inputs)


def both(program: ExportedProgram, initial: str = "") -> tuple[Any, ExecutorchProgramManager]:
    """Return the content of our file, and ExecuTorch's, which has the first values of buffers named so."""
    ours = exir_lowering.lower(program, "xnnpack").emit().buffer
    config = ExecutorchBackendConfig(passes=[InitializedMutableBufferPass([initial])] if initial else [])
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    return ours, edge.to_executorch(config)


class Counter(nn.Module):
    """Counts its calls, beside an image in channels_last, a number that it returns and an integer that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        self.calls += 1
        return self.conv(x).to(memory_format=torch.channels_last), self.calls.clone(), n


@pytest.mark.nightly
def test_a_method_with_state_and_a_number(
    emulator: Emulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = torch.randn(1, 3, 8, 8), 4
    content = exir_lowering.lower(export(Counter().eval(), inputs), "xnnpack").emit().buffer
    found = on_arm(emulator, tmp_path, content, inputs)
    assert found.ok and len(found.outputs) >= 2, found
    assert any("XnnpackBackend" in name for name, _ in found.rows)
    assert 0.5 < sum(count for _, count in found.rows) / found.instructions < 3  # tracing counts, too
    torch.save(inputs, tmp_path / "inputs.pt")
    inputs_file = str(tmp_path / "inputs.pt")
    capsys.readouterr()
    assert not cli.main(["check", str(tmp_path / "model.pte"), "--on", "aarch64", "--inputs", inputs_file, "--json"])
    assert json.loads(capsys.readouterr().out)["instructions"] == found.instructions


WRONG = 'extern "C" float expf(float x) { return x > 0 ? 1 : 0; }\n'


@pytest.mark.nightly
def test_a_kernel_that_is_wrong_on_arm_only_is_found(emulator: Emulator, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in emulator.folder.iterdir():
        if path.is_dir():  # what was downloaded; the rest is made anew
            (broken / path.name).symlink_to(path)
    (tmp_path / "wrong.cpp").write_text(WRONG)
    set_up(broken, tmp_path / "wrong.cpp")
    content = exir_lowering.lower(export(nn.Softmax(-1), (torch.randn(2, 5),)), []).emit().buffer
    assert on_arm(emulator, tmp_path, content, (torch.randn(2, 5),)).ok
    assert not on_arm(Emulator(broken), tmp_path, content, (torch.randn(2, 5),)).ok


@pytest.fixture(scope="module")
def fewer() -> dict[int, bool | None]:
    """Whether our file takes at most ExecuTorch's instructions, by seed; None where ExecuTorch's is wrong."""
    return {}


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_random_programs(emulator: Emulator, tmp_path: Path, part: int, fewer: dict[int, bool | None]) -> None:
    ran = 0
    for seed in range(part * 40, part * 40 + 40):
        module = random_method(seed, 8)
        calls = [(torch.randn(3, 4), torch.randn(3, 4), 3) for _ in range(2)]
        try:
            ours, theirs = both(export(module, copy.deepcopy(calls[0])), "store_")
        except Exception:  # what torch or ExecuTorch cannot do
            continue
        found = on_arm(emulator, tmp_path, ours, calls[0])
        assert found.ok and equals_eager(ours, module, calls) is not None, (seed, found)
        count = emulator_count(emulator, tmp_path, theirs.buffer, calls[0])
        changed = equals_eager(theirs.buffer, module, calls)
        right = changed is not None and writes(theirs) >= changed
        fewer[seed] = found.instructions <= count if right else None
        ran += 1
        if ran == 20:
            break
    assert ran == 20


@pytest.mark.nightly
def test_random_programs_take_at_most_executorchs_instructions(fewer: dict[int, bool | None]) -> None:
    """On 95 % of them, all parts together; a file that loses state, as some of ExecuTorch's do, is no yardstick."""
    if len(fewer) < 200:
        pytest.skip("needs all parts of test_random_programs")
    compared = {seed: one for seed, one in fewer.items() if one is not None}
    more = [seed for seed, one in compared.items() if not one]
    assert len(compared) >= 160 and len(more) <= len(compared) // 20, (len(compared), more)


def equals_eager(content: Any, module: nn.Module, calls: list[tuple[Any, ...]]) -> int | None:
    """Return how many buffers a module changes in some calls; None if a file's results are not those of each."""
    module, loaded, changed = copy.deepcopy(module), exir_lowering.load(content), set[str]()
    for call in calls:
        given, before = copy.deepcopy(call), {name: one.clone() for name, one in module.named_buffers()}
        with torch.no_grad():
            returned = [one for one in module(*given) if one is not None]
        written = [new for new, old in zip(given[:2], call[:2], strict=True) if not torch.equal(new, old)]
        expected = [*written, *returned]
        found = [one for one in loaded.run("forward", *call) if one is not None]
        if len(found) != len(expected):
            return None
        for got, wanted in zip(map(torch.as_tensor, found), map(torch.as_tensor, expected), strict=True):
            if got.shape != wanted.shape or not torch.allclose(got.double(), wanted.double(), rtol=1e-4, atol=1e-4):
                return None
        changed |= {name for name, one in module.named_buffers() if not torch.equal(one, before[name])}
    return len(changed)


def writes(manager: ExecutorchProgramManager) -> int:
    """Return how many tensors a file writes that are no inputs: its state."""
    plan = manager.executorch_program.execution_plan[0]
    calls = [one.instr_args for chain in plan.chains for one in chain.instructions]
    kernels: list[Any] = [call for call in calls if hasattr(call, "op_index")]
    written = {call.args[0] for call in kernels if plan.operators[call.op_index].name == "aten::copy_"}
    return len(written.difference(plan.inputs))


def emulator_count(emulator: Emulator, folder: Path, content: Any, inputs: Any) -> int:
    """Return the instructions of ExecuTorch's file."""
    path = folder / "theirs.pte"
    path.write_bytes(content)
    return emulator.call(path, "forward", inputs).instructions


@pytest.mark.nightly
def test_the_models_of_the_latency_table(emulator: Emulator, tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from latency_engines import build
    from latency_models import MODELS

    more = []
    for name in MODELS:
        subject = build(name)
        ours, theirs = both(subject.program)
        found = on_arm(emulator, tmp_path, ours, subject.built.inputs)
        assert found.ok, (name, found)
        more += [name] * (found.instructions > emulator_count(emulator, tmp_path, theirs.buffer, subject.built.inputs))
    assert len(more) <= len(MODELS) // 20, more
