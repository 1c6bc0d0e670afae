"""OpenVINO behind one word. CI installs the extra; elsewhere it is tested where it is installed."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from lowering_support import delegates
from models import mobilenet_v2
from torch.export import Dim, export

import exir_lowering
from exir_lowering.partitioners import RuledPartitioner, deny

CI = bool(os.environ.get("CI"))
needs_openvino = pytest.mark.skipif(find_spec("openvino") is None and not CI, reason="needs the extra openvino")

# OpenVINO computes with bfloat16 where a CPU has it, whatever the file says; oneDNN's variable tells it not to.
FLOAT32 = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "OMP_NUM_THREADS": "1"}

HIDDEN = """
import sys
from importlib.abc import MetaPathFinder

class Hide(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in HIDDEN else found(name, package)
sys.meta_path.insert(0, Hide())
"""

RUN = """
import sys, torch, exir_lowering
for name in sys.argv[1:]:
    calls = torch.load(name + ".calls")
    program = exir_lowering.load(name + ".pte")
    for method, inputs, expected, tolerance in calls:
        results, wanted = program.run(method, *inputs), expected if isinstance(expected, tuple) else (expected,)
        assert [got.shape for got in results] == [right.shape for right in wanted], (name, method)
        for got, right in zip(results, wanted):
            torch.testing.assert_close(got, right, atol=tolerance, rtol=0)
        print(name, method, "equal")

exported = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
assert exir_lowering.lower(exported, "openvino").report.methods[0].host == ()
try:
    import executorch.backends.openvino
except ImportError as error:
    print("without", "nncf" in str(error))
"""

Call = tuple[str, tuple[torch.Tensor, ...], Any, float]
Case = tuple[str, exir_lowering.LoweredMethods, list[Call]]
"""A name, a lowered program, and calls with what eager PyTorch returns."""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.linear = torch.nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.relu(self.conv(x)).mean((2, 3)))


class Head(torch.nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.linear = net.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.linear(x)) * 2


class Counter(torch.nn.Module):
    """State that stays on the host, beside a network that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(1, 5))
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sum.add_(self.net(x))
        return self.sum * 1


class Odd(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.trunc(x)


class Scalars(torch.nn.Module):
    """Tensors without dimensions: a step counter, a predicate and a maximum go in and out, a mean does not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0.0))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.steps.add_(1)
        chosen = torch.cond(x.sum() > 0, lambda z: z * 2, lambda z: z - 1, (x,))
        return chosen, x * scale, self.steps * 2, x.max() - 1, torch.relu(x) / x.mean()


class Edges(torch.nn.Module):
    """Bools that are computed with, and tensors without elements, beside what OpenVINO takes."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, none: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = (x > 0) * (y > 0)
        counted = both.sum(1)
        return both, torch.where(both, both, x > 1), counted, none * 2 + none, torch.relu(x) + y


def image(batch: int = 1) -> torch.Tensor:
    return torch.linspace(-1, 1, batch * 3 * 8 * 8).reshape(batch, 3, 8, 8)


def backends(lowered: exir_lowering.LoweredMethods, method: str = "forward") -> list[str]:
    return [delegate.backend_id for delegate in delegates(lowered[method])]


def lower(programs: Any, partitioners: Any = "openvino") -> exir_lowering.LoweredMethods:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exir_lowering.lower(programs, partitioners)


def nightly_cases() -> Iterator[Case]:
    """Yield what only nightly tests ask for."""
    torch.manual_seed(0)
    model, inputs = mobilenet_v2()
    for module in model.modules():  # an untrained one gives numbers near 0, which would equal anything
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight)
    expected = model(*inputs)
    assert expected.abs().max() > 0.01
    yield "mobile", lower(export(model, inputs)), [("forward", inputs, expected, 1e-4)]

    net, x, y = Net().eval(), image(), torch.linspace(-1, 1, 4).reshape(1, 4)
    head = Head(net)
    programs = {"whole": export(net, (x,)), "head": export(head, (y,))}
    yield "two", lower(programs), [("whole", (x,), net(x), 1e-4), ("head", (y,), head(y), 1e-4)]


def cases() -> Iterator[Case]:
    from exir_lowering.backends.openvino import openvino

    torch.manual_seed(0)
    net, x = Net().eval(), image()
    counter = Counter().eval()
    exported, once = export(counter, (x,)), counter.net(x)
    yield "counter", lower(exported), [("forward", (x,), once * times, 1e-4) for times in (1, 2, 3)]

    dynamic = export(net, (image(2),), dynamic_shapes=({0: Dim("batch", min=1, max=8)},))
    yield "dynamic", lower(dynamic), [("forward", (image(n),), net(image(n)), 1e-4) for n in (2, 1, 8, 5)]

    ruled = RuledPartitioner(openvino(), deny(op="aten.relu"))
    yield "ruled", lower(export(net, (x,)), ruled), [("forward", (x,), net(x), 1e-4)]

    scalars, x, y = Scalars(), torch.linspace(-1, 2, 6).reshape(2, 3), torch.linspace(2, -1, 6).reshape(2, 3)
    exported, given = export(scalars, (x, torch.tensor(3.0))), (x, torch.tensor(3.0))
    lowered = lower(exported)  # now, as it starts with the state that the model has
    calls = [("forward", given, tuple(value.clone() for value in scalars(*given)), 1e-4) for _ in range(2)]
    yield "scalars", lowered, calls

    given = (x, y, torch.zeros(0, 3))
    yield "edges", lower(export(Edges(), given)), [("forward", given, Edges()(*given), 1e-4)]


@dataclass(frozen=True)
class Ran:
    """What was lowered, what the process that ran it printed, and where the files are."""

    lowered: dict[str, exir_lowering.LoweredMethods]
    printed: str
    folder: Path

    def equal(self, name: str) -> int:
        """Return how many calls of a file gave what eager PyTorch gives."""
        return sum(line.startswith(f"{name} ") and line.endswith("equal") for line in self.printed.splitlines())


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return _run(cases(), tmp_path_factory.mktemp("openvino"))


@pytest.fixture(scope="module")
def ran_at_night(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return _run(nightly_cases(), tmp_path_factory.mktemp("openvino"))


def _run(cases: Iterator[Case], folder: Path) -> Ran:
    """Lower cases, and run their files in the runtime of one process of its own, which does not have nncf."""
    lowered: dict[str, exir_lowering.LoweredMethods] = {}
    with torch.no_grad():
        for name, lowered[name], calls in cases:
            lowered[name].emit().save(folder / f"{name}.pte")
            torch.save(calls, folder / f"{name}.calls")
    return Ran(lowered, python({"nncf"}, RUN, *lowered, cwd=folder, env=FLOAT32), folder)


@needs_openvino
def test_a_convolutional_model(ran_at_night: Ran) -> None:
    lowered = ran_at_night.lowered["mobile"]
    assert backends(lowered) == ["OpenvinoBackend"] and not lowered.report.methods[0].host
    assert ran_at_night.equal("mobile") == 1


@needs_openvino
def test_a_map_of_two_methods(ran_at_night: Ran) -> None:
    assert [backends(ran_at_night.lowered["two"], method) for method in ("whole", "head")] == [["OpenvinoBackend"]] * 2
    assert ran_at_night.equal("two") == 2


@needs_openvino
def test_state_stays_on_the_host(ran: Ran) -> None:
    assert backends(ran.lowered["counter"]) == ["OpenvinoBackend"]
    assert ran.equal("counter") == 3


@needs_openvino
def test_results_of_dynamic_size_stay_on_the_host(ran: Ran) -> None:
    """ExecuTorch's delegate would return them with the largest size."""
    host = {node.operator: node.reason for node in ran.lowered["dynamic"].report.methods[0].host}
    assert all(host.values()) and "dynamic size" in host["aten.convolution.default"]
    assert ran.equal("dynamic") == 4


@needs_openvino
def test_tensors_without_dimensions_stay_on_the_host(ran: Ran) -> None:
    """ExecuTorch's delegate refuses them as inputs and outputs; inside of a partition they are as good as others."""
    (method,) = ran.lowered["scalars"].report.methods
    held = {node.operator for node in method.host if "without dimensions" in node.reason}
    assert {"aten.gt.Scalar", "aten.mul.Tensor", "aten.sub.Tensor"} <= held
    inside = {name for partition in method.partitions for name in partition.operators}
    assert {"aten.relu.default", "aten.div.Tensor"} <= inside
    assert ran.equal("scalars") == 2


@needs_openvino
def test_bool_arithmetic_and_empty_tensors_stay_on_the_host(ran: Ran) -> None:
    (method,) = ran.lowered["edges"].report.methods
    reasons = {reason: {n.operator for n in method.host if reason in n.reason} for reason in ("bools", "no elements")}
    assert reasons["bools"] == {"aten.mul.Tensor", "aten.where.self", "aten.sum.dim_IntList"}
    assert {"aten.mul.Tensor", "aten.add.Tensor"} <= reasons["no elements"]
    assert method.delegated >= 5 and backends(ran.lowered["edges"]).count("OpenvinoBackend") >= 1
    assert ran.equal("edges") == 1


@needs_openvino
def test_the_word_is_executorchs_partitioner(capsys: pytest.CaptureFixture[str]) -> None:
    """The word gives what ExecuTorch's class gives, and finds its backend by name."""
    from exir_lowering.backends.openvino import OpenvinoPartitioner, openvino

    made = openvino()
    assert isinstance(made, OpenvinoPartitioner)
    program = export(Net().eval(), (image(),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = (exir_lowering.lower(program, partitioner) for partitioner in (made, made.partitioner))
        exir_lowering.plan(export(Odd(), (torch.ones(2),)), made)
    assert "not supported" not in capsys.readouterr().out, "stdout may carry the JSON of a command"
    first, second = (delegates(lowered["forward"]) for lowered in (ours, theirs))
    assert [d.compile_specs for d in first] == [d.compile_specs for d in second]
    assert [(spec.key, spec.value) for spec in first[0].compile_specs] == [("device", b"CPU")]
    # OpenVINO numbers names anew in each model that it makes, so the bytes are never the same twice.
    assert len(first) == len(second) == 1
    assert abs(len(first[0].processed_bytes) - len(second[0].processed_bytes)) < 64


class Halves(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, 1)
        return first + second / second.abs().mean(dim=-1, keepdim=True).expand_as(second)


@needs_openvino
def test_it_gains_from_all_rewrites_but_pieces() -> None:
    from exir_lowering.backends.openvino import openvino

    program = export(Halves(), (torch.randn(2, 4),))
    made = openvino()

    def applied(partitioner: Any) -> set[str]:
        (method,) = exir_lowering.plan(program, partitioner).methods
        return {one.rewrite for one in method.rewritings}

    assert applied(made) == applied(made.partitioner) == {"broadcasts"}  # it takes means as they are
    assert applied("xnnpack") >= {"broadcasts", "reductions", "pieces"}


def python(hidden: set[str], script: str, *arguments: str, cwd: Path | None = None, env: Any = None) -> str:
    """Run a script in a process that does not find some packages."""
    done = forked.run(f"HIDDEN = {hidden!r}\n{HIDDEN}\n{script}", *arguments, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


WITHOUT = """
import json, os, sys, torch, exir_lowering
os.environ["OPENVINO_LIB_PATH"] = "/nowhere/libopenvino_c.so"
said = []

def attempt(call, *arguments):
    try:
        call(*arguments)
    except (exir_lowering.LoweringError, ImportError) as error:
        said.append([type(error).__name__, str(error)])

def plugin():
    import exir_lowering.backends.openvino

attempt(exir_lowering.lower, torch.export.export(torch.nn.ReLU(), (torch.ones(2),)), "openvino")
attempt(plugin)
for file in sys.argv[1:]:
    attempt(exir_lowering.load, file)
from exir_lowering import cli
assert cli.main(["plugins", "--json"]) == 0
print(json.dumps(said))
"""


def test_without_the_extra(request: pytest.FixtureRequest) -> None:
    """The word, the import, loading a file and the list of plug-ins say what to install; nothing else breaks."""
    lowered = find_spec("openvino") is not None or CI
    files = [str(request.getfixturevalue("ran").folder / "counter.pte")] if lowered else []
    *listed, said = python({"openvino", "nncf"}, WITHOUT, *files).strip().splitlines()
    install = 'pip install "exir-lowering[openvino]"'
    kinds, texts = zip(*json.loads(said), strict=True)
    assert kinds == ("PluginLoadError", "ImportError", *["BackendUnavailableError"] * len(files))
    assert all(install in text for text in texts) and all("openvino" in text.lower() for text in texts)
    found = {(p["group"], p["id"]): p["error"] for p in json.loads("\n".join(listed))}
    assert install in found.pop(("exir_lowering.partitioners", "openvino"))
    others = {"coreml", "ethos-u", "qnn", "tosa", "vulkan"}  # which say themselves what they need
    assert not any(error for (_, name), error in found.items() if name not in others)


@needs_openvino
def test_without_nncf(ran: Ran) -> None:
    """Lowering does not need the quantizer's library; importing ExecuTorch's package fails as it did before."""
    assert ran.printed.strip().splitlines()[-1] == "without True"
