"""State that several methods have: one state in the file if it was one memory, or if the caller says so."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import device_client
import pytest
import torch
from compile_support import compiled
from executorch.exir import ExecutorchBackendConfig, to_edge
from executorch.exir.passes import MemoryPlanningPass
from torch.export import ExportedProgram, export

from exir_lowering import InputError, LoweredModule, load, lower, plan
from exir_lowering.backends.reference import reference_partitioner
from exir_lowering.dynamo import reports
from exir_lowering.partitioners import SupportPartitioner, ops
from exir_lowering.steps.emit import Artifact

PARTITIONERS = {
    "host": None,
    "xnnpack": "xnnpack",
    "reference": "reference",
    "state on the host": reference_partitioner(own_state=False),
}
CALLS = ("read", "write", "write", "read", "other", "read", "reset", "read", "write", "other", "read", "returned")


class Model(torch.nn.Module):
    """A cache, which several methods have, and a count, which one has."""

    def __init__(self, first: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("cache", torch.arange(4.0) * first)
        self.register_buffer("count", torch.zeros(3), persistent=False)
        self.linear = torch.nn.Linear(4, 4)


class Write(torch.nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        self.model.cache.add_(x)
        self.model.count.add_(1.0)
        return self.model.linear(self.model.cache) * 2.0, self.model.count * 1.0


class Read(Write):
    """It only reads the cache, through views too."""

    def forward(self, x: torch.Tensor) -> Any:
        return (self.model.linear(self.model.cache.view(2, 2).reshape(4) + x),)


class Returned(Write):
    def forward(self, x: torch.Tensor) -> Any:
        return self.model.cache, x + 1.0


class Reset(Write):
    def forward(self, x: torch.Tensor) -> Any:
        self.model.cache.copy_(x * 0.5)
        return (x + 1.0,)


class Other(torch.nn.Module):
    """It has a state of its own, and the cache under another name."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.inner = model
        self.register_buffer("own", torch.full((5,), 3.0))

    def forward(self, x: torch.Tensor) -> Any:
        self.own.add_(2.0)
        big = torch.cat([self.own, self.own, x, x, self.own]).cumsum(0)  # activations that fill memory 1
        return big, self.inner.cache * x


KINDS = {"write": Write, "read": Read, "returned": Returned, "reset": Reset, "other": Other}


def eager(model: Model) -> dict[str, torch.nn.Module]:
    return {name: kind(model) for name, kind in KINDS.items()}


def programs_of(model: Model, *names: str) -> dict[str, ExportedProgram]:
    return {name: export(KINDS[name](model), (torch.ones(4),)) for name in names or KINDS}


@pytest.fixture(scope="module", params=[0.0, 1.5], ids=["zeros", "initial values"])
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


@pytest.fixture(scope="module", params=PARTITIONERS)
def artifact(request: pytest.FixtureRequest, model: Model) -> Artifact:
    lowered = lower(programs_of(model), PARTITIONERS[request.param])
    return lowered.emit(constant_methods={"version": 3}, keep_originals=request.param == "xnnpack")


def check(run: Any, model: Model, calls: tuple[str, ...] = CALLS) -> None:
    """Compare calls one after the other with the model."""
    expected = eager(copy.deepcopy(model))
    torch.manual_seed(1)
    for name in calls:
        x = torch.randn(4)
        for got, want in zip(run(name, x), expected[name](x), strict=True):
            torch.testing.assert_close(got, want.clone())


def test_what_one_method_writes_is_what_the_others_read(artifact: Artifact, model: Model) -> None:
    """A constant method beside them changes nothing, and each load has a state of its own."""
    content = artifact.buffer
    program, other = load(content), load(content)

    def run(name: str, x: torch.Tensor) -> Any:
        other.run("write", x + 10)
        other.run("reset", x)
        assert program.run("version") == [3]
        return program.run(name, x)

    check(run, model)
    check(load(content).run, model, ("write", "write", "read", "other"))


@pytest.mark.parametrize("partitioner", ["xnnpack", "reference"])
def test_functions_that_are_compiled_apart_share_state_too(model: Model, partitioner: str) -> None:
    torch._dynamo.reset()
    functions = {
        name: compiled(module, partitioners=partitioner) for name, module in eager(copy.deepcopy(model)).items()
    }
    with torch.no_grad():
        check(lambda name, x: [result.clone() for result in functions[name](x)], model)
    assert len(reports()) >= len(functions)


@pytest.mark.parametrize("artifact", ["host", "xnnpack"], indirect=True)
def test_a_device_runs_the_same_file(artifact: Artifact, model: Model, device: Path, tmp_path: Path) -> None:
    calls = [("write", 1.0), ("version", None), ("read", 2.0), ("other", 0.5), ("write", 0.25), ("other", 3.0)]
    calls += [("read", 1.0), ("reset", 4.0), ("version", None), ("read", 1.0), ("returned", 0.0)]
    expected = eager(copy.deepcopy(model))
    results = device_client.run(device, artifact.save(tmp_path / "m.pte"), 4, calls)
    for (name, number), got in zip(calls, results, strict=True):
        want = [torch.tensor([3.0])] if number is None else expected[name](torch.full((4,), number))
        torch.testing.assert_close(got, torch.cat([each.detach().reshape(-1) for each in want]))


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return device_client.build(tmp_path_factory.mktemp("client"))


def test_modules_share_it(model: Model, tmp_path: Path) -> None:
    module = lower(programs_of(model), "xnnpack").module()

    def of(one: LoweredModule) -> Any:
        return lambda name, x: [value.clone() for value in one.method(name)(x)]

    check(of(module), model)
    check(of(LoweredModule.load(module.save(tmp_path / "m.pte"))), model)


def named(*models: torch.nn.Module) -> dict[str, ExportedProgram]:
    return {f"m{number}": export(model, (torch.ones(4),)) for number, model in enumerate(models)}


class Counter(torch.nn.Module):
    def __init__(self, size: int = 4, first: float = 0.0, writes: bool = True) -> None:
        super().__init__()
        self.writes = writes
        self.register_buffer("total", torch.full((size,), first))
        self.register_buffer("mine", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.writes:
            return x - self.total[:4].neg()
        self.total[:4].add_(x)
        self.mine.add_(1.0)
        return self.total[:4] + self.mine * 100


def totals(artifact: Artifact, methods: str = "0101", data: Any = None) -> list[float]:
    """Return what calls return."""
    program = load(artifact.buffer, data=data)
    return [program.run(f"m{method}", torch.ones(4))[0][0].item() for method in methods]


@pytest.mark.parametrize("partitioner", [reference_partitioner(own_state=False), "xnnpack"])
def test_what_is_shared_can_be_said(partitioner: Any) -> None:
    lowered = lower(named(Counter(), Counter()), partitioner)
    assert totals(lowered.emit()) == [101, 101, 202, 202]
    assert totals(lowered.emit(share_state=True)) == [101, 202, 303, 404]
    assert totals(lowered.emit(share_state=["total"])) == [101, 102, 203, 204]
    one = Counter()
    lowered = lower(named(one, one), partitioner)
    assert totals(lowered.emit()) == [101, 202, 303, 404]
    assert totals(lowered.emit(share_state=["mine"])) == [101, 201, 302, 402]
    assert totals(lowered.emit(share_state=False)) == [101, 101, 202, 202]
    planning = MemoryPlanningPass(share_mutable_buffers=True)
    for each in (planning, {"m0": planning, "m1": planning}):
        config = ExecutorchBackendConfig(memory_planning_pass=each)
        assert totals(lower(named(Counter(), Counter())).emit(config)) == [101, 202, 303, 404]


def test_a_method_that_only_reads_has_no_constant() -> None:
    lowered = lower(named(Counter(first=2.0), Counter(first=2.0, writes=False)), "xnnpack")
    assert totals(lowered.emit(), "1010") == [3, 103, 3, 204]
    for options in ({}, {"external_weights": "weights"}, {"config": ExecutorchBackendConfig(external_constants=True)}):
        made = lowered.emit(share_state=True, **options)  # type: ignore[arg-type]
        assert totals(made, "1010", list(made.data_files.values()) or None) == [3, 103, 4, 204], options


@pytest.mark.parametrize(
    ("models", "share", "parts"),
    [
        ((Counter(), Counter(5)), True, ("'total'", "'m0'", "'m1'", "float32 [4]", "float32 [5]")),
        ((Counter(), Counter(5, writes=False)), True, ("'total'", "'m0'", "'m1'")),
        ((Counter(), Counter(first=1.0)), ["total"], ("'total'", "different values", "'m0'", "'m1'")),
        ((Counter(), Counter()), ["totals"], ("'totals'", "'total'", "'mine'")),
        ((Counter(), Counter(writes=False)), ["mine"], ("'mine'", "one method only")),
        ((Counter(), Counter()), "total", ("'total'", '"auto"')),
        ((Counter(), Counter()), 3, ("3", '"auto"')),
    ],
)
def test_what_cannot_be_shared(models: Any, share: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        lower(named(*models)).emit(share_state=share)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_delegates_do_not_keep_what_is_shared() -> None:
    """By memory, lowering knows it; what is shared by name later may be inside of a delegate, which is an error."""
    one = Counter()
    shared = lower(named(one, one), "reference")
    assert totals(shared.emit()) == [101, 202, 303, 404]
    apart = lower(named(Counter(), Counter()), "reference")
    assert totals(apart.emit()) == [101, 101, 202, 202]
    with pytest.raises(InputError, match="own_state=False"):
        apart.emit(share_state=True)
    with pytest.raises(InputError, match=r"deny\(...\)"):
        lower(named(Counter(), Counter(writes=False)), {"m1": "reference"}).emit(share_state=["total"])


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.sin(self.total * x)
        self.total.add_(x)
        return first * self.total


@pytest.mark.parametrize(
    ("methods", "host", "kept"),
    [
        (1, [], "kept by reference"),
        (2, [], "kept by the runtime, not by reference: methods share it"),
        (1, ["aten.sin"], "kept by the runtime, not by reference: it is not in one partition alone that returns"),
    ],
)
def test_the_plan_says_who_keeps_state(methods: int, host: list[str], kept: str) -> None:
    partitioner = SupportPartitioner({"reference": ~ops(*host)}, own_state=True)
    model = Two()
    programs = {f"m{number}": export(model, (torch.ones(4),)) for number in range(methods)}
    assert kept in plan(programs, partitioner).to_text(width=200)
    assert "kept by" not in plan(programs, "xnnpack").to_text(width=200)
    program = load(lower(programs, partitioner).emit().buffer)
    for _ in range(2):
        for name in programs:
            torch.testing.assert_close(program.run(name, torch.ones(4))[0], model(torch.ones(4)))


def test_files_of_executorch() -> None:
    config = ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(share_mutable_buffers=True))
    made = to_edge(named(Counter(), Counter()), constant_methods={"version": 3}).to_executorch(config)
    program = load(made.buffer)
    assert [program.run(f"m{each}", torch.ones(4))[0][0].item() for each in "0101"] == [101, 202, 303, 404]
    assert program.run("version") == [3]


def test_listings() -> None:
    programs = programs_of(Model(), "write", "read", "other")
    planned = plan(programs)
    cache, count, own = planned.states
    assert cache.names == {"write": "model.cache", "read": "model.cache", "other": "inner.cache"}
    assert (cache.written_by, cache.read_by) == (("write",), ("write", "read", "other"))
    assert (cache.bytes, cache.shared, count.shared, own.names) == (16, True, False, {"other": "own"})
    lowered = lower(programs)
    line = "model.cache/inner.cache: 16 B, read by write and read and other, written by write, shared"
    for text in (planned.to_text(), str(lowered), lowered.report.to_text()):
        assert line in text
    data: Mapping[str, Any] = json.loads(planned.to_json())["states"][0]
    assert data["shared"] is True and data["names"] == dict(cache.names)
    assert not any(state.shared for state in lowered.emit(share_state=False).report.states)


class Attention(torch.nn.Module):
    """Reads a cache whose bound depends on what every method writes, and a softmax that has to know it."""

    def __init__(self, model: torch.nn.Module, step: float, bounded: bool) -> None:
        super().__init__()
        self.model, self.step, self.bounded = model, step, bounded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = x.clamp(-1, 1) * self.step if self.bounded else x * self.step
        self.model.cache.copy_(torch.cat([self.model.cache[1:], key.reshape(1, 4)]))
        return torch.nn.functional.scaled_dot_product_attention(
            x.clamp(-1, 1).reshape(1, 1, 4), self.model.cache[None], self.model.cache[None]
        )


class Cached(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(6, 4))


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("memory", ["one", "two"])
def test_what_is_written_is_bounded_by_all_methods_together(bounded: bool, memory: str) -> None:
    """The same rewrites as alone, if each method bounds what it writes; none if one does not."""
    models = [Cached()] * 2 if memory == "one" else [Cached(), Cached()]
    programs = {
        name: export(Attention(model, step, fine), (torch.ones(4),))
        for name, model, step, fine in (("prefill", models[0], 1.0, bounded), ("decode", models[1], 2.0, True))
    }
    alone = {name: len(plan({name: programs[name]}, "xnnpack").methods[0].rewritings) for name in programs}
    together = plan(programs, "xnnpack")
    assert alone["decode"] > 0
    if bounded:
        assert {method.name: len(method.rewritings) for method in together.methods} == alone
    else:
        decode = together.methods[1]
        assert len(decode.rewritings) < alone["decode"]
        refused = str(decode.refused_rewrites)
        assert "a method that may share it writes" in refused and "in every method that has it" in refused
    lowered = lower(programs, "xnnpack")
    for share in (True, False):
        program = load(lowered.emit(share_state=share).buffer)
        copies = [copy.deepcopy(models[0])] * 2 if share else [copy.deepcopy(one) for one in models]
        references = {
            "prefill": Attention(copies[0], 1.0, bounded), "decode": Attention(copies[1], 2.0, True),
        }  # fmt: skip
        for number, name in enumerate(("prefill", "decode", "decode", "prefill", "decode")):
            x = torch.randn(4) * 10**number
            torch.testing.assert_close(program.run(name, x)[0], references[name](x), rtol=1e-4, atol=1e-4)


class Adapting(torch.nn.Module):
    """One method changes a weight that the other one multiplies with."""

    def __init__(self, linear: torch.nn.Linear, writes: bool) -> None:
        super().__init__()
        self.linear, self.writes = linear, writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
                self.linear.bias.add_(x)
            return x + 1
        found: torch.Tensor = self.linear(x) + (self.linear.bias.clone() * 2 - self.linear.weight.sum(0))
        return found


@pytest.mark.parametrize("partitioner", [None, "reference", "xnnpack"])
def test_weights_that_one_method_writes(partitioner: Any) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 4)
    programs = {name: export(Adapting(linear, name == "learn"), (torch.ones(4),)) for name in ("learn", "infer")}
    lowered = lower(programs, partitioner)
    assert [state.shared for state in lowered.report.states] == [True, True]
    content = lowered.emit().buffer
    program, expected = load(content), copy.deepcopy(linear)
    for name in ("infer", "learn", "infer", "learn", "learn", "infer"):
        x = torch.randn(4)
        torch.testing.assert_close(program.run(name, x)[0], Adapting(expected, name == "learn")(x))


class Holder(torch.nn.Module):
    def __init__(self, state: torch.Tensor, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.register_buffer("state", state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.state.add_(x)
        return torch.relu(self.state) + self.state * x


@pytest.mark.parametrize("part", [lambda state: state.view(4), lambda state: state[0]], ids=["view", "slice"])
def test_state_that_overlaps_is_refused(part: Any) -> None:
    state = torch.zeros(2, 2)
    reader = part(state)
    lowered = lower(
        {
            "write": export(Holder(state, True), (torch.ones(2, 2),)),
            "read": export(Holder(reader, False), (torch.ones(reader.shape),)),
        }
    )
    with pytest.raises(InputError, match=r"'state' of method 'read' is a view of 'state' of"):
        lowered.emit()
    alone = load(lowered.emit(share_state=False).buffer)
    alone.run("write", torch.ones(2, 2))
    assert not alone.run("read", torch.ones(reader.shape))[0].any()


def test_state_that_is_only_read_is_not_folded() -> None:
    x = torch.ones(2, 2)
    models = {name: Holder(torch.ones(2, 2), name == "write") for name in ("write", "read")}
    models["read"].state = models["write"].state
    config = ExecutorchBackendConfig(do_quant_fusion_and_const_prop=True)
    buffer = lower({name: export(model, (x,)) for name, model in models.items()}).emit(config).buffer
    file = load(buffer)
    for wanted in (2.0, 3.0):
        file.run("write", x)
        assert torch.equal(file.run("read", x)[0], torch.full((2, 2), 2 * wanted))
