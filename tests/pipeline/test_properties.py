"""What must hold for every program and every choice of tags: random programs, random tags, random backends."""

from __future__ import annotations

import copy
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
from executorch.exir.backend.utils import tag_constant_data, tag_mutated_buffer
from hypothesis import HealthCheck, given, settings, strategies as st
from lowering_support import NoopBackend, delegates
from random_programs import ORIGIN, Interpreter, RandomProgram, random_programs
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, SymIntArgument
from torch.fx import Node

from exir_lowering import Backend, DelegationSpec, LoweredMethods, LoweringOptions, Partitioner, PartitionResult, lower
from exir_lowering.backends.echo import EchoBackend
from exir_lowering.graphs import DELEGATION_TAG, every_node, is_delegate_call, is_getitem, nested_graphs, walk

MORE = int(os.environ.get("EXIR_LOWERING_EXAMPLES", "0"))
"""How many examples to run instead of the usual number; they are then drawn at random."""

PROGRAMS = int(os.environ.get("EXIR_LOWERING_PROGRAMS", "8" if MORE else "4"))
SEED = int(os.environ.get("EXIR_LOWERING_SEED", "0"))
BACKENDS = ("echo", "noop", "second_noop")
AS_IT_IS = LoweringOptions(rewrites="none")
LIFTED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


# -- random tags ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tags:
    """The tags of one partitioner: 0 leaves a node on the host.

    Attributes:
        operators: A number for each run of operators, in the order of the graphs; repeated when there are more.
        run: How many operators in a row get the same number.
        constants: Who tags constants: ExecuTorch's helpers, chance, or nobody.
        lifted: A number for each constant, for chance.
        backends: The backend of each tag.
    """

    operators: tuple[int, ...]
    run: int
    constants: str
    lifted: tuple[int, ...]
    backends: tuple[str, ...]


class RandomPartitioner(Partitioner):
    """Tags as it is told, and remembers which operators of the input it left."""

    def __init__(self, tags: Tags) -> None:
        super().__init__()
        self.tags = tags
        self.claimed: set[int] = set()

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        tags = self.tags
        operators = [node for _, node in every_node(exported_program.graph_module) if node.op == "call_function"]
        for i, node in enumerate(operators):
            if _tag(node, tags.operators[i // tags.run % len(tags.operators)]) and ORIGIN in node.meta:
                self.claimed.add(node.meta[ORIGIN])
        if tags.constants in ("helpers", "constants"):
            tag_constant_data(exported_program)
        if tags.constants in ("helpers", "state"):
            tag_mutated_buffer(exported_program)
        if tags.constants == "chance":
            specs = exported_program.graph_signature.input_specs
            placeholders = [node for node in exported_program.graph.nodes if node.op == "placeholder"]
            lifted = [n for n, spec in zip(placeholders, specs, strict=True) if spec.kind in LIFTED]
            for node, number in zip(lifted, itertools.cycle(tags.lifted), strict=False):
                _tag(node, number)
        destinations = {f"t{i}": DelegationSpec(backend, []) for i, backend in enumerate(tags.backends, start=1)}
        return PartitionResult(exported_program, destinations)


def _tag(node: Node, number: int) -> bool:
    if number:
        node.meta[DELEGATION_TAG] = f"t{number}"
    return bool(number)


@st.composite
def _tags(draw: st.DrawFn, operators: int) -> Tags:
    count = draw(st.integers(1, 4))
    run = draw(st.sampled_from([1, 1, 2, 3, 99]))
    numbers = st.integers(0, count)
    length = max(1, -(-operators // run))
    constants = draw(st.sampled_from(["nobody", "helpers", "helpers", "constants", "state", "chance"]))
    return Tags(
        operators=tuple(draw(st.lists(numbers, min_size=length, max_size=length))),
        run=run,
        constants=constants,
        lifted=tuple(draw(st.lists(numbers, min_size=10, max_size=10))) if constants == "chance" else (),
        backends=tuple(draw(st.lists(st.sampled_from(BACKENDS), min_size=count, max_size=count))),
    )


@st.composite
def _cases(draw: st.DrawFn) -> tuple[int, dict[str, list[Tags]]]:
    """Draw the number of a program, and for each of its methods the tags of one to three partitioners."""
    which = draw(st.integers(0, PROGRAMS - 1))
    tags = {
        name: draw(st.lists(_tags(_operators(program)), min_size=1, max_size=draw(st.sampled_from([1, 1, 2, 3]))))
        for name, program in _programs()[which].methods.items()
    }
    return which, tags


def _operators(program: ExportedProgram) -> int:
    return sum(n.op == "call_function" for _, n in every_node(program.graph_module))


@lru_cache
def _programs() -> list[RandomProgram]:
    return random_programs(SEED, PROGRAMS)


@lru_cache
def _edge_results(which: int) -> dict[str, list[list[Any]]]:
    """Return what the Edge programs give before lowering."""
    program = _programs()[which]
    return {name: _run(Interpreter(method), program.inputs[name]) for name, method in program.methods.items()}


# -- the property -----------------------------------------------------------------------------------------------------


class CountingEcho(EchoBackend):
    """The echo backend, counting its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def preprocess_all(self, edge_programs: Any, compile_specs: Any) -> Any:
        self.calls += 1
        return super().preprocess_all(edge_programs, compile_specs)


@dataclass
class Lowering:
    """One run of the engine with fresh partitioners and backends."""

    program: RandomProgram
    tags: Mapping[str, Sequence[Tags]]
    echo: CountingEcho = field(default_factory=CountingEcho)
    noops: dict[str, NoopBackend] = field(default_factory=lambda: {name: NoopBackend() for name in BACKENDS[1:]})
    partitioners: dict[str, list[RandomPartitioner]] = field(default_factory=dict)

    def run(self) -> LoweredMethods:
        self.partitioners = {name: [RandomPartitioner(tags) for tags in found] for name, found in self.tags.items()}
        backends: dict[str, Backend] = {"echo": self.echo, **self.noops}
        return lower(self.program.methods, self.partitioners, backends=backends, options=AS_IT_IS)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Run tiny operators in one thread: waking others takes longer than the work, and the order of sums may differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


_FAST = settings(
    max_examples=MORE or 50,
    derandomize=not MORE,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


def test_the_programs_equal_the_modules_that_they_come_from() -> None:
    """Before lowering: otherwise a difference after it would not tell anything."""
    for which, program in enumerate(_programs()):
        for name, results in _edge_results(which).items():
            _require_close(results, program.expected[name])


@_FAST
@given(_cases())
def test_lowering_keeps_every_promise(case: tuple[int, dict[str, list[Tags]]]) -> None:
    which, tags = case
    program = _programs()[which]
    before = {name: _snapshot(method) for name, method in program.methods.items()}
    lowering = Lowering(program, tags)
    lowered = lowering.run()

    for name, method in program.methods.items():
        assert _snapshot(method) == before[name]
        _require_valid(lowered[name])
        _require_contract(lowered[name])
        _require_each_operator_once(name, method, lowered, lowering.partitioners[name])
        results = _run(Interpreter(lowered[name]), program.inputs[name])
        _require_equal(results, _edge_results(which)[name])
        _require_close(results, program.expected[name])
    _require_one_call(lowering, lowered)


@settings(_FAST, max_examples=MORE or 30)
@given(_cases())
def test_lowering_twice_gives_the_same(case: tuple[int, dict[str, list[Tags]]]) -> None:
    which, tags = case
    first, second = Lowering(_programs()[which], tags).run(), Lowering(_programs()[which], tags).run()
    for name in first:
        assert _text(first[name]) == _text(second[name])
        assert _payloads(first[name]) == _payloads(second[name])


@settings(_FAST, max_examples=MORE or 30)
@given(_cases(), st.data())
def test_lowered_programs_can_be_lowered_again(case: tuple[int, dict[str, list[Tags]]], data: st.DataObject) -> None:
    """A delegate call is an operator like any other then: it may end up in a delegate itself."""
    which, tags = case
    program = _programs()[which]
    first = Lowering(program, tags).run()
    before = {name: _snapshot(method) for name, method in first.items()}
    again = {name: [data.draw(_tags(_operators(method)))] for name, method in first.items()}
    second = Lowering(RandomProgram(dict(first), program.inputs, program.expected, program.nested), again).run()
    for name, method in first.items():
        assert _snapshot(method) == before[name]
        _require_valid(second[name])
        _require_contract(second[name])
        _require_equal(_run(Interpreter(second[name]), program.inputs[name]), _edge_results(which)[name])


# -- what the property is made of -------------------------------------------------------------------------------------


def _run(call: Any, inputs: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    """Return the results of consecutive calls, each with its inputs after it: programs may write into them."""
    results = []
    for arguments in inputs:
        own = copy.deepcopy(arguments)
        results.append(copy.deepcopy([*call(*own), *own]))
    return results


def _require_equal(results: list[list[Any]], expected: list[list[Any]]) -> None:
    for got, want in zip(_flat(results), _flat(expected), strict=True):
        assert type(got) is type(want)
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        else:
            assert got == want


def _require_close(results: list[list[Any]], expected: list[list[Any]]) -> None:
    for got, want in zip(_flat(results), _flat(expected), strict=True):
        assert isinstance(got, torch.Tensor) == isinstance(want, torch.Tensor)
        if isinstance(want, torch.Tensor):
            torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-4, atol=1e-4)
        else:
            assert got == want


def _flat(calls: list[list[Any]]) -> list[Any]:
    return [value for results in calls for value in results]


def _snapshot(program: ExportedProgram) -> tuple[Any, ...]:
    """Describe all of a program that lowering must not change."""
    nodes = [
        (path, node.op, node.name, node.target, repr(node.args), repr(node.kwargs), list(node.users))
        for path, node in every_node(program.graph_module)
    ]
    meta = [{key: id(value) for key, value in node.meta.items()} for _, node in every_node(program.graph_module)]
    attributes = [(path, [*module._modules, *module.meta]) for path, module in walk(program.graph_module)]
    tables = [
        {name: (id(tensor), tensor.detach().numpy().tobytes()) for name, tensor in table.items()}
        for table in (program.state_dict, program.constants)
    ]
    signature = repr(program.graph_signature)
    return nodes, meta, attributes, tables, signature, repr(program.range_constraints), repr(program.module_call_graph)


def _require_valid(program: ExportedProgram) -> None:
    program.validate()
    for held in (program, *(delegate.original_module for delegate in delegates(program))):
        if held is not program:
            held.validate()
        for _, module in walk(held.graph_module):
            module.graph.lint()
            _require_acyclic(list(module.graph.nodes))
            assert not [node.name for node in module.graph.nodes if DELEGATION_TAG in node.meta]


def _require_acyclic(nodes: list[Node]) -> None:
    place = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        assert all(place[source] < place[node] for source in node.all_input_nodes), f"{node.name} before its inputs"


def _require_contract(program: ExportedProgram) -> None:
    """Check what a backend may count on, for every delegate."""
    for call in _calls(program):
        assert len(set(call.args[1:])) == len(call.args) - 1, "one value is passed twice"
    for delegate in delegates(program):
        part = delegate.original_module
        specs = part.graph_signature.input_specs
        ranks = [[*LIFTED, InputKind.USER_INPUT].index(spec.kind) for spec in specs]
        assert ranks == sorted(ranks)
        tensors = [
            id(part.state_dict[spec.target] if spec.target in part.state_dict else part.constants[spec.target])
            for spec in specs
            if spec.kind is not InputKind.USER_INPUT
        ]
        assert len(set(tensors)) == len(tensors), "two placeholders for one tensor"
        held = {spec.target for spec in specs if spec.kind is not InputKind.USER_INPUT}
        assert held == {*part.state_dict, *part.constants}
        *body, output = part.graph.nodes
        placeholders = [node for node in body if node.op == "placeholder"]
        for node, spec in zip(placeholders, specs, strict=True):
            assert node.users, f"{node.name} is not used"
            assert isinstance(spec.arg, SymIntArgument) == isinstance(node.meta["val"], (int, torch.SymInt))
        returned = list(output.args[0])
        assert not set(returned) & set(placeholders), "an input is passed through"
        outputs = part.graph_signature.output_specs
        results = [v for v, spec in zip(returned, outputs, strict=True) if spec.kind is OutputKind.USER_OUTPUT]
        assert results, "no result"
        assert len(set(results)) == len(results), "one result is returned twice"
        for value, spec in zip(returned, outputs, strict=True):
            assert isinstance(spec.arg, SymIntArgument) == isinstance(value.meta["val"], (int, torch.SymInt))


def _calls(program: ExportedProgram) -> list[Node]:
    return [n for _, n in every_node(program.graph_module) if is_delegate_call(n)]


def _origins(program: ExportedProgram) -> list[int]:
    """Return the numbers of a program's own operators; what delegates return has the number of its producer."""
    return [
        node.meta[ORIGIN]
        for _, node in every_node(program.graph_module)
        if node.op == "call_function" and not is_delegate_call(node) and not is_getitem(node)
    ]


def _require_each_operator_once(
    name: str,
    program: ExportedProgram,
    lowered: LoweredMethods,
    partitioners: Sequence[RandomPartitioner],
) -> None:
    """Check that no operator is lost or doubled, and that each is where its tag says or a reason is given."""
    host = _origins(lowered[name])
    moved = [origin for delegate in delegates(lowered[name]) for origin in _origins(delegate.original_module)]
    assert Counter(host + moved) == Counter(_origins(program))
    claimed = set().union(*(partitioner.claimed for partitioner in partitioners))
    inside = _inside_of(program, claimed)
    assert not {origin for origin in moved if origin not in claimed | inside}, "not tagged, but moved"
    (report,) = [method for method in lowered.report.methods if method.name == name]
    reasons = {node.node.rsplit(".", maxsplit=1)[-1]: node.reason for node in report.host}
    for _, node in every_node(lowered[name].graph_module):
        if node.op == "call_function" and node.meta.get(ORIGIN) in claimed and not is_getitem(node):
            assert reasons[node.name] != "not claimed", f"{node.name} was tagged, and stayed without a reason"


def _inside_of(program: ExportedProgram, claimed: set[int]) -> set[int]:
    """Return the operators of graphs that a claimed operator calls: they move with it."""
    inside: set[int] = set()
    for _, module in walk(program.graph_module):
        for node in module.graph.nodes:
            if node.meta.get(ORIGIN) in claimed:
                for nested in nested_graphs(module, node):
                    inside.update(n.meta[ORIGIN] for _, n in every_node(nested.module) if ORIGIN in n.meta)
    return inside


def _require_one_call(lowering: Lowering, lowered: LoweredMethods) -> None:
    used = Counter(delegate.backend_id for program in lowered.values() for delegate in delegates(program))
    assert lowering.echo.calls == (1 if used["echo"] else 0)
    for name, noop in lowering.noops.items():
        assert len(noop.calls) == (1 if used[name] else 0)
        assert sum(sum(call.values()) for call in noop.calls) == used[name]


def _text(program: ExportedProgram) -> str:
    graphs = [str(module.graph) for _, module in walk(program.graph_module)]
    parts = [str(delegate.original_module.graph) for delegate in delegates(program)]
    return "\n".join([*graphs, *parts, repr(program.graph_signature)])


def _payloads(program: ExportedProgram) -> list[tuple[str, bytes]]:
    return [(delegate.backend_id, delegate.processed_bytes) for delegate in delegates(program)]
