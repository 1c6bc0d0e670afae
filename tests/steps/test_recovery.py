"""A backend that fails on some operators: what becomes of them, and that the file is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from delegate_support import runner
from executorch.exir import to_edge
from lowering_support import TagPartitioner, delegates
from random_programs import random_programs
from torch.export import ExportedProgram, export
from torch.fx import Node

from exir_lowering import (
    BackendContractError,
    BackendFailure,
    CoverageError,
    InputError,
    LoweringOptions,
    cli,
    load,
    lower,
)
from exir_lowering.backends.reference import ReferenceBackend, ReferenceDelegate
from exir_lowering.graphs import is_operator, operator_name, walk
from exir_lowering.plugins import registry

SPLIT, FALLBACK = (LoweringOptions(on_backend_error=mode, rewrites="none") for mode in ("split", "fallback"))


Problem = Callable[[Sequence[Node], int], Exception | None]
"""Takes the operators of a partition and the bytes of its weights: returns what is raised."""


class Fails(ReferenceBackend):
    """The reference backend, which fails on partitions that a function names something in.

    Attributes:
        asked: How many operators each partition of each call had.
        weights: How many bytes of weights each of them had.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem
        self.asked: list[list[int]] = []
        self.weights: list[list[int]] = []

    def preprocess_all(self, edge_programs: Any, compile_specs: Any, **context: Any) -> Any:
        programs = [program for found in edge_programs.values() for program in found]
        operators = [
            [node for _, module in walk(program.graph_module) for node in module.graph.nodes if is_operator(node)]
            for program in programs
        ]
        self.asked.append([len(found) for found in operators])
        self.weights.append([
            sum(tensor.nbytes for tensor in (*program.state_dict.values(), *program.constants.values()))
            for program in programs
        ])  # fmt: skip
        for found, weights in zip(operators, self.weights[-1], strict=True):
            problem = self.problem(found, weights)
            if problem is not None:
                raise problem
        return super().preprocess_all(edge_programs, compile_specs, **context)


def on(*names: str) -> Problem:
    """Fail on operators of these names."""

    def problem(nodes: Sequence[Node], weights: int) -> Exception | None:
        bad = [node for node in nodes if operator_name(node) in names]
        return RuntimeError(f"no kernel for {operator_name(bad[0])}") if bad else None

    return problem


class Chain(torch.nn.Module):
    """Forty operators, three of which are unlike the others, with state and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.sin(x) * self.weight + 1
        self.seen.add_(torch.tanh(x))
        x = torch.cond(x.sum() > 0, lambda y: torch.tanh(y) * 2 + 1, lambda y: torch.cos(y) - 1, (x,))
        for _ in range(6):
            x = torch.cos(x) - self.weight
        return x / 2 + self.seen


X = torch.rand(4)


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    torch.manual_seed(0)
    return export(Chain(), (X,))


@pytest.fixture(scope="module")
def edge(program: ExportedProgram) -> ExportedProgram:
    return to_edge(program).exported_program()


def everything(backend: str = "reference") -> TagPartitioner:
    return TagPartitioner(lambda node: "all", backend=backend, nested=True)


def check(lowered: Any, program: ExportedProgram) -> None:
    eager, loaded = program.module(), load(lowered.emit().buffer)
    for _ in range(3):
        torch.testing.assert_close(loaded.run("forward", X)[-1], eager(X))


@pytest.mark.parametrize("options", [SPLIT, FALLBACK], ids=["split", "fallback"])
def test_what_fails_stays_on_the_host_and_the_rest_is_right(
    program: ExportedProgram, edge: ExportedProgram, options: Any
) -> None:
    backend = Fails(on("aten.tanh.default"))
    lowered = lower(edge, everything(), backends={"reference": backend}, options=options)
    check(lowered, program)
    (method,) = lowered.report.methods
    left = [
        node for node in method.host if "failed on it: RuntimeError: no kernel for aten.tanh.default" in node.reason
    ]
    assert backend.asked[-1] == [sum(p.operators.values()) for p in method.partitions]  # all of them, in one call
    refused = lowered.report.refused
    assert {name for one in refused for name in one.nodes} == {node.node for node in left}
    assert all(one.backend_id == "reference" and "tanh" in "".join(one.sources) for one in refused)
    assert "failed on" in lowered.report.to_text()
    if options is SPLIT:
        # The call of the branches as well, as one of them has what fails; then the branches are taken by themselves.
        assert [node.operator for node in left] == ["aten.tanh.default", "cond", "aten.tanh.default"]
        assert len(method.partitions) <= 6  # put together again around what fails
    else:
        assert len(left) > 20 and len(refused) == 2


class NoCopies(TagPartitioner):
    """Wants each constant that it tags for one partition only."""

    def partition(self, exported_program: ExportedProgram) -> Any:
        result = super().partition(exported_program)
        for node in exported_program.graph.find_nodes(op="placeholder"):
            if "delegation_tag" in node.meta:
                node.meta["no_copy"] = True
        return result


@pytest.mark.parametrize("options", [SPLIT, FALLBACK], ids=["split", "fallback"])
def test_constants_that_must_not_be_copied_follow_their_readers(options: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sigmoid(), torch.nn.Linear(4, 4))
    program = export(model, (X[None],))
    backend = Fails(on("aten.sigmoid.default"))
    partitioner = NoCopies(lambda node: "all", backend="reference")
    lowered = lower(to_edge(program).exported_program(), partitioner, backends={"reference": backend}, options=options)
    (result,) = load(lowered.emit().buffer).run("forward", X[None])
    torch.testing.assert_close(result, model(X[None]))
    assert any("failed on it" in node.reason for node in lowered.report.methods[0].host)


def test_the_next_partitioner_gets_it(edge: ExportedProgram) -> None:
    backends = {"reference": Fails(on("aten.tanh.default")), "second": ReferenceBackend()}
    lowered = lower(edge, [everything(), everything("second")], backends=backends, options=SPLIT)
    (method,) = lowered.report.methods
    seconds = [partition for partition in method.partitions if partition.backend_id == "second"]
    assert sum(one.operators.get("aten.tanh.default", 0) for one in seconds) == 2
    assert [node.operator for node in method.host] == ["cond"]  # whose branches the first one has parts of


def test_pieces_are_as_small_as_the_backend_takes_them(program: ExportedProgram, edge: ExportedProgram) -> None:
    def problem(nodes: Sequence[Node], weights: int) -> Exception | None:
        return RuntimeError("at most 5 layers") if len(nodes) > 5 else None

    backend = Fails(problem)
    lowered = lower(edge, everything(), backends={"reference": backend}, options=SPLIT)
    check(lowered, program)
    assert max(backend.asked[-1]) <= 5
    assert [one.nodes for one in lowered.report.refused] == [("cond",)]  # one operator, with more than five in it
    assert lowered.report.methods[0].coverage > 0.9


def test_few_lowerings_find_one_operator_of_many() -> None:
    class Deep(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number in range(100):
                x = torch.tanh(x) if number == 61 else torch.sin(x) + 1
            return x

    program, backend = export(Deep(), (X,)), Fails(on("aten.tanh.default"))
    lowered = lower(program, everything(), backends={"reference": backend}, options=SPLIT)
    (refused,) = lowered.report.refused
    assert lowered.report.methods[0].coverage > 0.99 and len(lowered.report.methods[0].partitions) == 2
    assert len(backend.asked) <= 2 * 8 + 8, "two pieces for each halving, and the calls before and after"
    assert "torch.tanh(x) if number == 61" in "".join(refused.sources)


def test_every_order_of_failures_gives_the_same_bytes(edge: ExportedProgram) -> None:
    contents = {
        lower(edge, everything(), backends={"reference": Fails(on("aten.tanh.default", "aten.cos.default"))},
              options=SPLIT).emit().buffer
        for _ in range(2)
    }  # fmt: skip
    assert len(contents) == 1
    without = TagPartitioner(
        lambda node: None if operator_name(node) in ("aten.tanh.default", "aten.cos.default", "cond") else "all",
        backend="reference",
        nested=True,
    )
    plain = lower(edge, without, options=LoweringOptions(rewrites="none"))
    payloads = [one.processed_bytes for one in delegates(plain["forward"])]
    lowered = lower(
        edge, everything(), backends={"reference": Fails(on("aten.tanh.default", "aten.cos.default"))}, options=SPLIT
    )
    assert ([one.processed_bytes for one in delegates(lowered["forward"])] == payloads) is True


def test_what_is_no_failure_of_a_partition_is_raised(program: ExportedProgram, edge: ExportedProgram) -> None:
    class Together(Fails):
        def preprocess_all(self, edge_programs: Any, compile_specs: Any, **context: Any) -> Any:
            if sum(map(len, edge_programs.values())) > 1:
                raise RuntimeError("not more than one")
            return super().preprocess_all(edge_programs, compile_specs, **context)

    class Liar(ReferenceBackend):
        def preprocess_all(self, edge_programs: Any, compile_specs: Any, **context: Any) -> Any:
            return {}

    two = TagPartitioner(lambda node: operator_name(node) if node.op == "call_function" else None, backend="reference")
    with pytest.raises(BackendFailure, match="not more than one"):
        lower(edge, two, backends={"reference": Together(lambda nodes, weights: None)})
    check(lower(edge, two, backends={"reference": Together(lambda nodes, weights: None)}, options=SPLIT), program)
    with pytest.raises(BackendContractError):
        lower(edge, everything(), backends={"reference": Liar()}, options=SPLIT)
    failing = {"reference": Fails(on("aten.tanh.default"))}
    with pytest.raises(BackendFailure, match=r"no kernel for aten\.tanh"):
        lower(edge, everything(), backends=failing)
    with pytest.raises(CoverageError):
        strict = LoweringOptions(on_backend_error="split", require_coverage=1.0)
        lower(edge, everything(), backends=failing, options=strict)
    with pytest.raises(InputError, match='expected "raise", "fallback", "split" or None'):
        LoweringOptions(on_backend_error="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [SPLIT, FALLBACK], ids=["split", "fallback"])
@pytest.mark.parametrize("seed", range(6))
def test_a_backend_that_fails_now_and_then(
    program: ExportedProgram, edge: ExportedProgram, options: LoweringOptions, seed: int
) -> None:
    """A licence server that is busy, say: what was lowered is kept, and what was not stays on the host."""
    chance = random.Random(seed)

    def now_and_then(nodes: Sequence[Node], weights: int) -> Exception | None:
        return RuntimeError("busy") if chance.random() < 0.3 else None

    pieces = TagPartitioner(lambda node: operator_name(node) if node.op == "call_function" else None, "reference")
    check(lower(edge, pieces, backends={"reference": Fails(now_and_then)}, options=options), program)


class NoTanh(ReferenceBackend):
    """A backend that another process can import; it fails on one operator."""

    def preprocess(self, program: ExportedProgram, *given: Any, **also: Any) -> Any:
        nodes = [node for _, module in walk(program.graph_module) for node in module.graph.nodes if is_operator(node)]
        if any(operator_name(node) == "aten.tanh.default" for node in nodes):
            raise RuntimeError("no kernel for aten.tanh.default")
        return super().preprocess(program, *given, **also)


def test_the_command_says_what_failed(
    program: ExportedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.export.save(program, "model.pt2")
    monkeypatch.setitem(registry._registered[registry.BACKENDS], "mine", NoTanh)
    Path("mine_of_recovery.py").write_text(PARTITIONER)
    command = ["lower", "model.pt2", "-p", "mine_of_recovery:make", "-o", "out.pte", "--no-cache"]
    assert cli.main([*command, "--on-backend-error", "split"]) == 0
    assert Path("out.pte").is_file()
    assert "forward: mine failed on aten_tanh_default" in " ".join(capsys.readouterr().out.split())


PARTITIONER = """
from exir_lowering.backends.reference import executable
from exir_lowering.partitioners import SupportPartitioner


def make():
    return SupportPartitioner({"mine": executable()})
"""


class Sometimes:
    """Fails by the names, the number, the weights or the combination of operators, as a seed says."""

    KINDS = ("name", "size", "pair", "heavy", "both")

    def __init__(self, rng: random.Random, kind: str) -> None:
        self.kind, self.most, self.bytes = kind, rng.randint(1, 4), rng.choice([0, 16, 64, 100])
        self.bad = set(
            rng.sample(["aten.add.Tensor", "aten.mul.Tensor", "aten.sigmoid.default", "aten.relu.default"], 2)
        )

    def __call__(self, nodes: Sequence[Node], weights: int) -> Exception | None:
        names, many, heavy = {operator_name(node) for node in nodes}, len(nodes) > self.most, weights > self.bytes
        failed = {"name": bool(self.bad & names), "pair": self.bad <= names, "heavy": heavy, "both": heavy or many}
        if not failed.get(self.kind, many):
            return None
        return RuntimeError(self.kind)


@pytest.mark.parametrize("number", range(len(Sometimes.KINDS)))
def test_random_programs_are_right_whatever_fails(number: int) -> None:
    check_random_program(number, Sometimes.KINDS[number])


def check_random_program(number: int, kind: str) -> None:
    rng = random.Random(number)
    (program,) = random_programs(4242 + number, 1)
    tags: dict[str, str | None] = {}
    tag = TagPartitioner(lambda node: tags.setdefault(node.name, rng.choice(("a", "b", None))), backend="reference")
    problem = Sometimes(rng, kind)
    backend, options = Fails(problem), FALLBACK if number % 4 == 1 else SPLIT
    lowered = lower(program.methods, tag, backends={"reference": backend}, options=options)
    if any(method.partitions for method in lowered.report.methods):  # else the last call was one that failed
        assert kind not in ("size", "both") or max(backend.asked[-1]) <= problem.most
        assert kind not in ("heavy", "both") or max(backend.weights[-1]) <= problem.bytes
    delegate = ReferenceDelegate()
    for method, calls in program.inputs.items():
        run = runner(lowered, method, reference=delegate)
        for call, expected in zip(calls, program.expected[method], strict=True):
            inputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in call]
            torch.testing.assert_close([*run(*inputs), *inputs], expected, rtol=1e-4, atol=1e-4)
