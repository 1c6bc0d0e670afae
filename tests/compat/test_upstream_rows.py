"""The weak spots M3 to M12 of ExecuTorch's engine: shown there, and absent here.

Each test runs on both engines where both can run. The upstream half states what ExecuTorch 1.5 does, so that
a row documents itself, and so that a test here fails on the day on which upstream does better.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import forked
import pytest
import torch
from executorch.exir import to_edge, to_edge_transform_and_lower
from executorch.exir.backend import backend_api
from executorch.exir.backend.backend_api import MethodProgramsPartitionerSpec
from executorch.exir.backend.backend_details import BackendDetails
from folders import SUPPORT
from functorch.experimental.control_flow import map as torch_map
from lowering_support import TagPartitioner, by_operator, delegates, edge_program
from torch._export.verifier import SpecViolationError
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, SymIntArgument, TensorArgument
from torch.fx import GraphModule, Node

import exir_lowering
from exir_lowering import (
    DelegationSpec,
    LoweringOptions,
    Partitioner,
    PartitionResult,
    PreprocessResult,
)
from exir_lowering.errors import BackendFailure, InputError, PartitionerContractError, PluginLoadError
from exir_lowering.graphs import operator_name

Engine = Callable[..., ExportedProgram]

X = torch.tensor([1.0, -2.0, 3.0])
CALLS = (X, X * 2, X - 1)


class RowA(BackendDetails):
    """Remembers the shape of each of its `preprocess_multimethod` calls."""

    calls: list[dict[str, int]] = []  # noqa: RUF012

    @classmethod
    def preprocess(cls, edge_program: ExportedProgram, compile_specs: Any) -> PreprocessResult:
        return PreprocessResult(b"row")

    @classmethod
    def preprocess_multimethod(cls, edge_programs: Any, compile_specs: Any) -> Any:
        cls.calls.append({method: len(programs) for method, programs in edge_programs.items()})
        return {m: [PreprocessResult(b"row") for _ in programs] for m, programs in edge_programs.items()}


class RowB(BackendDetails):
    """As `RowA`, counted apart."""

    calls: list[dict[str, int]] = []  # noqa: RUF012

    @classmethod
    def preprocess(cls, edge_program: ExportedProgram, compile_specs: Any) -> PreprocessResult:
        return PreprocessResult(b"row")

    @classmethod
    def preprocess_multimethod(cls, edge_programs: Any, compile_specs: Any) -> Any:
        cls.calls.append({method: len(programs) for method, programs in edge_programs.items()})
        return {m: [PreprocessResult(b"row") for _ in programs] for m, programs in edge_programs.items()}


class RowFails(BackendDetails):
    """Raises, without any context of its own."""

    @classmethod
    def preprocess(cls, edge_program: ExportedProgram, compile_specs: Any) -> PreprocessResult:
        raise ZeroDivisionError("no such kernel")


def _same_name(payload: bytes, module: str) -> type[BackendDetails]:
    def preprocess(edge_program: ExportedProgram, compile_specs: Any) -> PreprocessResult:
        return PreprocessResult(payload)

    return type("RowTwin", (BackendDetails,), {"preprocess": staticmethod(preprocess), "__module__": module})


TWINS = (_same_name(b"first", "vendor_one"), _same_name(b"second", "vendor_two"))


def upstream(program: ExportedProgram, *partitioners: Partitioner) -> ExportedProgram:
    """Lower one method with ExecuTorch's engine, as `EdgeProgramManager.to_backend` does."""
    for partitioner in partitioners:
        spec = MethodProgramsPartitionerSpec({"forward": program}, {"forward": partitioner})
        program = backend_api.to_backend(spec)["forward"]
    return program


def ours(program: ExportedProgram, *partitioners: Partitioner) -> ExportedProgram:
    """Lower one method with this engine."""
    return exir_lowering.to_backend(program, list(partitioners))["forward"]


both_engines = pytest.mark.parametrize("engine", [ours, upstream], ids=["ours", "upstream"])


def everything(backend: str = "RowA") -> TagPartitioner:
    return TagPartitioner(lambda node: "t", backend)


def lifted(program: ExportedProgram) -> list[str]:
    """Return the targets of a program's parameters, buffers and constants, one for each placeholder."""
    return [str(s.target) for s in program.graph_signature.input_specs if s.kind is not InputKind.USER_INPUT]


# -- M3: memory ------------------------------------------------------------------------------------

MEMORY = """
import json, os, re, sys
import torch
from executorch.exir import to_edge
from executorch.exir.backend.backend_api import MethodProgramsPartitionerSpec, to_backend
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
import exir_lowering
from lowering_support import TagPartitioner

MEGABYTES, METHODS, engine = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

inside = []
class Noop(BackendDetails):
    @classmethod
    def preprocess(cls, edge_program, compile_specs):
        inside.append(status("VmRSS"))
        return PreprocessResult(b"noop")

class Model(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
    def forward(self, x):
        return x + self.weight

def lower(weight, methods):
    programs = {
        f"m{i}": to_edge(torch.export.export(Model(weight), (torch.zeros(()),))).exported_program()
        for i in range(methods)
    }
    partitioners = {name: TagPartitioner(lambda node: "t", "Noop") for name in programs}
    def run():
        if engine == "upstream":
            return to_backend(MethodProgramsPartitionerSpec(programs, partitioners))
        return exir_lowering.to_backend(programs, partitioners)
    return run

lower(torch.nn.Parameter(torch.ones(1000)), METHODS)()  # what is imported and cached at the first use
weight = torch.nn.Parameter(torch.ones(MEGABYTES * 2**20 // 4))
run = lower(weight, METHODS)
inside.clear()
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = status("VmRSS")
lowered = run()
print(json.dumps({
    "inside": max(inside) - before,
    "peak": status("VmHWM") - before,
    "bytes": weight.nbytes,
    "calls": len(inside),
    "elsewhere": sum(
        tensor.data_ptr() != weight.data_ptr()
        for program in lowered.values()
        for delegate in program.graph_module.children()
        for tensor in delegate.original_module.state_dict.values()
    ),
    "owners": sum(
        list(delegate.original_module.state_dict) == ["weight"]
        for program in lowered.values()
        for delegate in program.graph_module.children()
    ),
}))
"""


def _memory(engine: str, megabytes: int) -> dict[str, Any]:
    run = forked.run(MEMORY, megabytes, 4, engine, cwd=SUPPORT)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the memory of the process from /proc")
def test_m3_one_weight_in_four_methods_takes_no_extra_memory() -> None:
    found = _memory("ours", 256)
    assert found["calls"] == 4
    assert (found["owners"], found["elsewhere"]) == (4, 0), "a delegate holds other memory than the model"
    assert found["inside"] < 0.05 * found["bytes"]
    assert found["peak"] < 0.05 * found["bytes"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the memory of the process from /proc")
def test_m3_upstream_copies_the_weight_for_each_method() -> None:
    found = _memory("upstream", 64)
    assert found["calls"] == 4
    assert found["inside"] > 3.9 * found["bytes"]


class Lends(BackendDetails):
    """Remembers where the weights that it was lent are."""

    pointers: list[int] = []  # noqa: RUF012

    @classmethod
    def preprocess(cls, edge_program: ExportedProgram, compile_specs: Any) -> PreprocessResult:
        tensors = (*edge_program.state_dict.values(), *edge_program.constants.values())
        cls.pointers += [tensor.data_ptr() for tensor in tensors]
        return PreprocessResult(b"row")


class Stored(torch.nn.Module):
    """A parameter, a buffer, a non-persistent buffer and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("kept", torch.tensor([4.0, 5.0, 6.0]))
        self.register_buffer("np", torch.tensor([7.0, 8.0, 9.0]), persistent=False)
        self.constant = torch.tensor([0.5, 0.25, 0.125])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.weight) * self.kept + self.np * self.constant


@both_engines
def test_m3_no_storage_is_copied_for_the_backend(engine: Engine) -> None:
    program = edge_program(Stored(), (X,))
    tensors = (*program.state_dict.values(), *program.constants.values())
    own = {tensor.data_ptr() for tensor in tensors}
    Lends.pointers.clear()
    engine(program, everything("Lends"))
    assert len(Lends.pointers) == len(own) == 4
    if engine is upstream:
        assert not own & set(Lends.pointers)
    else:
        assert own == set(Lends.pointers)


# -- M4: the input is not changed ------------------------------------------------------------------


@both_engines
def test_m4_the_input_keeps_its_constants_and_can_be_lowered_twice(engine: Engine) -> None:
    module = Stored()
    program = edge_program(module, (X,))
    constants, graph = dict(program.constants), str(program.graph)
    first = engine(program, everything())
    if engine is upstream:
        assert set(constants) - set(program.constants) == {"np", "constant"}
        with pytest.raises(KeyError, match="np"):
            program.module()(X)
        with pytest.raises(SpecViolationError):
            engine(program, everything())
        return
    assert list(program.constants) == list(constants)
    assert all(program.constants[name] is tensor for name, tensor in constants.items())
    assert str(program.graph) == graph
    assert not [node for node in program.graph.nodes if "delegation_tag" in node.meta]
    program.validate()
    second = engine(program, everything())
    for run in (program.module(), first.module(), second.module()):
        assert torch.equal(run(X), module(X))


# -- M5: one call per backend ----------------------------------------------------------------------


class Chain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(torch.sin(x))


@both_engines
def test_m5_each_backend_is_called_once_for_all_methods(engine: Engine) -> None:
    exported = torch.export.export(Chain(), (X,))
    programs = {"prefill": exported, "decode": exported}
    a, b = (
        TagPartitioner(by_operator("aten.sin.default"), "RowA"),
        TagPartitioner(by_operator("aten.cos.default"), "RowB"),
    )
    partitioners = {"prefill": [a, b], "decode": [b]}
    RowA.calls.clear()
    RowB.calls.clear()
    if engine is upstream:
        to_edge_transform_and_lower(programs, partitioner=partitioners)
        assert RowB.calls == [{"decode": 1}, {"prefill": 1}]
    else:
        exir_lowering.lower(programs, partitioners)
        assert RowB.calls == [{"prefill": 1, "decode": 1}]
    assert RowA.calls == [{"prefill": 1}]


# -- M6, M7: shared constants ----------------------------------------------------------------------


class Lists(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.tensor([5.0, 6.0, 7.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.sin(torch.cat([x, self.b])), self.b])


def _one_tag_per_cat(node: Node) -> str | None:
    return f"t_{node.name}" if operator_name(node) == "aten.cat.default" else None


@both_engines
def test_m6_a_constant_in_a_list_is_shared_by_two_partitions(engine: Engine) -> None:
    module = Lists()
    program = edge_program(module, (X,))
    partitioner = TagPartitioner(_one_tag_per_cat, "RowA")
    if engine is upstream:
        with pytest.raises(RuntimeError, match=r"constant data node \(b_b\) is tagged with"):
            engine(program, partitioner)
        return
    lowered = engine(program, partitioner)
    owners = [delegate.original_module for delegate in delegates(lowered)]
    assert [lifted(owner) for owner in owners] == [["b"], ["b"]]
    assert {owner.state_dict["b"].data_ptr() for owner in owners} == {program.state_dict["b"].data_ptr()}
    assert "b" not in lowered.state_dict
    assert torch.equal(lowered.module()(X), module(X))


class ManyReaders(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("c", torch.tensor([0.5, 2.0, -1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin((x + self.c) * self.c - self.c) * self.c


def _around_sin(node: Node) -> str | None:
    if operator_name(node) == "aten.sin.default":
        return None
    return "after" if node.name == "aten_mul_tensor_1" else "before"


@both_engines
def test_m7_one_placeholder_per_partition_however_many_readers(engine: Engine) -> None:
    module = ManyReaders()
    program = edge_program(module, (X,))
    lowered = engine(program, TagPartitioner(_around_sin, "Lends"))
    owners = [delegate.original_module for delegate in delegates(lowered)]
    assert torch.equal(lowered.module()(X), module(X))
    if engine is upstream:
        assert [lifted(owner) for owner in owners] == [["c", "c", "c"], ["c"]]
        return
    assert [lifted(owner) for owner in owners] == [["c"], ["c"]]
    assert {owner.state_dict["c"].data_ptr() for owner in owners} == {program.state_dict["c"].data_ptr()}


# -- M8: mutated buffers ---------------------------------------------------------------------------


class State(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("s", torch.tensor([0.0, 1.0, 2.0]))
        self.register_buffer("r", torch.tensor([3.0, 4.0, 5.0]))
        self.register_buffer("np", torch.tensor([6.0, 7.0, 8.0]), persistent=False)


class AlsoReturned(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.s.add_(x)
        return self.s


class OneValueTwoBuffers(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = self.s + x
        self.s.copy_(new)
        self.r.copy_(new)
        return new * 2


class OneValueTwoBuffersReadBack(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.s - self.r
        self.s.add_(x)
        self.r.copy_(self.s)
        return before + self.r


class IndirectWrite(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.s
        self._write(state, x)
        return torch.sin(state) + x

    def _write(self, target: torch.Tensor, x: torch.Tensor) -> None:
        target.copy_(torch.maximum(target, x))


class TwoWrites(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.s.add_(x)
        seen = self.s * 2
        self.s.mul_(0.5)
        return seen + self.s


class ReturnedAndUsed(State):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.s.add_(x)
        return self.s, torch.cos(self.s)


class ReadByTwo(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x + self.s
        second = torch.sin(first) * self.s
        self.s.add_(second)
        return second


class ThroughView(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.s.view(3, 1)[1:].add_(x[:2].view(2, 1))
        return self.s + x


class NonPersistent(State):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.np.add_(x)
        return self.np * 2


def _split_by_sin(node: Node) -> str | None:
    """Two partitions around the sin (which stays), by what comes before and after it."""
    if operator_name(node) == "aten.sin.default":
        return None
    return "after" if any(operator_name(n) == "aten.sin.default" for n in _ancestors(node)) else "before"


def _ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    queue = list(node.all_input_nodes)
    while queue:
        current = queue.pop()
        if current not in found:
            found.add(current)
            queue += current.all_input_nodes
    return found


TAGGINGS: dict[str, Callable[[], TagPartitioner | None]] = {
    "host": lambda: None,
    "one": lambda: everything(),
    "each": lambda: TagPartitioner(lambda node: node.name, "RowA"),
    "around": lambda: TagPartitioner(_split_by_sin, "RowA"),
    "one-host-state": lambda: TagPartitioner(lambda node: "t", "RowA", state=False),
}

STATES = [
    AlsoReturned,
    OneValueTwoBuffers,
    OneValueTwoBuffersReadBack,
    IndirectWrite,
    TwoWrites,
    ReturnedAndUsed,
    ReadByTwo,
    ThroughView,
    NonPersistent,
]


@cache
def _edge(model: type[State]) -> ExportedProgram:
    return exir_lowering.lower(torch.export.export(model(), (X,)))["forward"]


@pytest.mark.parametrize("tagging", TAGGINGS)
@pytest.mark.parametrize("model", STATES, ids=lambda model: model.__name__)
def test_m8_state_equals_eager_over_three_calls(model: type[State], tagging: str) -> None:
    program = copy.deepcopy(_edge(model))  # a run writes into the buffers that the program holds
    lowered = exir_lowering.to_backend(program, TAGGINGS[tagging]())["forward"]
    assert bool(delegates(lowered)) is (tagging != "host")
    eager, run = model(), lowered.module()
    for x in CALLS:
        torch.testing.assert_close(run(x), eager(x), rtol=0, atol=0)


def test_m8_a_partition_owns_the_state_that_it_returns() -> None:
    lowered = exir_lowering.to_backend(_edge(AlsoReturned), everything())["forward"]
    (delegate,) = delegates(lowered)
    assert set(delegate.original_module.graph_signature.buffers_to_mutate.values()) == {"s"}
    assert not lowered.graph_signature.buffers_to_mutate


def test_m8_upstream_refuses_a_mutated_buffer_that_is_returned() -> None:
    with pytest.raises(AssertionError, match="currently not supported"):
        upstream(edge_program(AlsoReturned(), (X,)), everything())


def test_m8_upstream_refuses_one_value_written_to_two_buffers() -> None:
    exported = torch.export.export(OneValueTwoBuffers(), (X,))
    with pytest.raises(SpecViolationError):
        to_edge_transform_and_lower(exported, partitioner=[everything()])


# -- M9: SymInt inputs -----------------------------------------------------------------------------


class Reshape(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x).reshape(x.shape[0] * 2, -1)


@both_engines
def test_m9_a_symint_input_is_typed_as_one(engine: Engine) -> None:
    shapes = {"x": {0: torch.export.Dim("n", min=2, max=8)}}
    program = edge_program(Reshape(), (torch.randn(4, 6),), dynamic_shapes=shapes)
    lowered = engine(program, TagPartitioner(by_operator("aten.view_copy.default"), "RowA"))
    (delegate,) = delegates(lowered)
    signature = delegate.original_module.graph_signature
    placeholders = [node for node in delegate.original_module.graph.nodes if node.op == "placeholder"]
    assert [type(node.meta["val"]) for node in placeholders][1:] == [torch.SymInt]
    kinds = [type(spec.arg) for spec in signature.input_specs]
    if engine is upstream:
        assert kinds == [TensorArgument, TensorArgument]
        return
    assert kinds == [TensorArgument, SymIntArgument]
    run = lowered.module()
    for size in (2, 4, 8):
        x = torch.randn(size, 6)
        assert torch.equal(run(x), Reshape()(x))


# -- M10: control flow -----------------------------------------------------------------------------


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.linspace(-0.4, 0.4, 9).reshape(3, 3))


class InCond(Weights):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda v: v @ self.w + 1, lambda v: torch.sin(v), (x,))


class InMap(Weights):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch_map(lambda row, w: row @ w + 1, x, self.w)


class InScan(Weights):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def step(carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            carry = carry * 2 + row @ self.w
            return carry, carry + 1

        return scan(step, torch.zeros(4, 3), x)


class InWhile(Weights):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v @ self.w + 1), (torch.tensor(0), x))


class CondInWhile(Weights):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def body(i: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, torch.cond(v.sum() > 0, lambda u: u @ self.w - 1, lambda u: torch.sin(u) * 2, (v,))

        return while_loop(lambda i, v: i < 3, body, (torch.tensor(0), x))


class MapInCond(Weights):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def yes(v: torch.Tensor) -> torch.Tensor:
            return torch_map(lambda row, w: row @ w + 1, v, self.w)

        return torch.cond(x.sum() > 0, yes, lambda v: torch.sin(v) * 2, (x,))


CONTROL_FLOW = [InCond, InMap, InScan, InWhile, CondInWhile, MapInCond]
NESTED_WHILE = (InWhile, CondInWhile)
Y = torch.linspace(-1, 2, 24).reshape(2, 4, 3)


class PerGraph(TagPartitioner):
    """One tag for the arithmetic of each graph."""

    def __init__(self) -> None:
        names: dict[int, str] = {}
        kept = ("aten.gt.", "aten.lt.")

        def tag_of(node: Node) -> str | None:
            name = operator_name(node)
            if not name.startswith("aten.") or name.startswith(kept):
                return None
            return names.setdefault(id(node.graph), f"graph{len(names)}")

        super().__init__(tag_of, "RowA")


def left_over(module: GraphModule) -> list[str]:
    """Return what a lowering left behind, in every module but the delegates' own."""
    found = []
    for name, child in module.named_modules():
        if "original_module" in name:
            continue
        if name.rpartition(".")[2].startswith("fused_"):
            found.append(name)
        if isinstance(child, GraphModule):
            found += [f"{name}:{node.name}" for node in child.graph.nodes if "delegation_tag" in node.meta]
    return found


@cache
def _control_flow(model: type[Weights]) -> ExportedProgram:
    return edge_program(model(), (Y,))


@both_engines
@pytest.mark.parametrize("model", CONTROL_FLOW, ids=lambda model: model.__name__)
def test_m10_branches_are_lowered_own_their_weights_and_are_left_clean(model: type[Weights], engine: Engine) -> None:
    module, program = model(), copy.deepcopy(_control_flow(model))
    lowered = engine(program, PerGraph())
    for y in (Y, -Y):
        torch.testing.assert_close(lowered.module()(y), module(y))
    owners = [delegate.original_module for delegate in delegates(lowered)]
    if engine is upstream:
        assert left_over(lowered.graph_module)
        assert not any(owner.state_dict for owner in owners)
        if model in NESTED_WHILE:
            assert not owners
        return
    assert left_over(lowered.graph_module) == []
    owning = [owner for owner in owners if "w" in owner.state_dict]
    assert len(owning) == 1
    assert owning[0].graph_signature.input_specs[0].kind is InputKind.PARAMETER
    assert owning[0].state_dict["w"].data_ptr() == program.state_dict["w"].data_ptr()
    assert "w" not in lowered.state_dict


# -- M11: nothing is kept alive --------------------------------------------------------------------


@both_engines
@pytest.mark.parametrize("backend", ["RowA", "RowFails"], ids=["success", "failure"])
def test_m11_programs_and_weights_die_with_their_last_reference(engine: Engine, backend: str) -> None:
    program = edge_program(ManyReaders(), (X,))
    alive = [weakref.ref(program.graph_module), weakref.ref(program.state_dict["c"])]
    lowered: ExportedProgram | None = None
    try:
        lowered = engine(program, TagPartitioner(_around_sin, backend))
    except (ZeroDivisionError, BackendFailure):
        assert backend == "RowFails"
    if lowered is not None:
        alive.append(weakref.ref(lowered.graph_module))
    assert (lowered is None) is (backend == "RowFails")
    del program, lowered
    gc.collect()
    dead = [reference() is None for reference in alive]
    if engine is upstream:
        assert not any(dead)
    else:
        assert all(dead)


# -- M12: traps of the interface -------------------------------------------------------------------


class Diamond(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = torch.sin(x)
        far = torch.cos(near)
        return near + far


@both_engines
def test_m12_a_list_of_partitioners_to_to_backend(engine: Engine) -> None:
    manager = to_edge(torch.export.export(Chain(), (X,)))
    partitioners = [
        TagPartitioner(by_operator("aten.sin.default"), "RowA"),
        TagPartitioner(by_operator("aten.cos.default"), "RowB"),
    ]
    if engine is upstream:
        with pytest.raises(TypeError, match="'list' object is not callable"):
            manager.to_backend(partitioners)
        return
    lowered = exir_lowering.to_backend(manager.exported_program(), partitioners)["forward"]
    assert [delegate.backend_id for delegate in delegates(lowered)] == ["RowA", "RowB"]


@both_engines
def test_m12_a_single_partitioner_for_exported_programs(engine: Engine) -> None:
    exported = torch.export.export(Chain(), (X,))
    if engine is upstream:
        with pytest.raises(TypeError, match="object is not iterable"):
            to_edge_transform_and_lower(exported, partitioner=everything())
        return
    for given in (everything(), [everything()], {"forward": everything()}, {"forward": [everything()]}):
        lowered = exir_lowering.lower(exported, given)["forward"]
        assert [delegate.backend_id for delegate in delegates(lowered)] == ["RowA"]


@both_engines
def test_m12_a_misspelt_method_is_named_with_a_suggestion(engine: Engine) -> None:
    manager = to_edge(torch.export.export(Chain(), (X,)))
    if engine is upstream:
        with pytest.raises(AssertionError, match=r"^Partitioner for method foward is not provided$"):
            manager.to_backend({"foward": everything()})
        return
    expected = r"no method 'foward'; the methods are 'forward'\. Did you mean 'forward'\?"
    with pytest.raises(InputError, match=expected):
        exir_lowering.to_backend({"forward": manager.exported_program()}, {"foward": everything()})


class Forgets(TagPartitioner):
    """Tags with two tags and names the destination of one."""

    def __init__(self) -> None:
        super().__init__(lambda node: f"t_{node.name}", "RowA")

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        super().partition(exported_program)
        return PartitionResult(exported_program, {"t_aten_sin_default": DelegationSpec("RowA", [])})


@both_engines
def test_m12_a_tag_without_a_destination_is_an_error(engine: Engine) -> None:
    program = edge_program(Chain(), (X,))
    if engine is upstream:
        assert len(delegates(engine(program, Forgets()))) == 1
        return
    with pytest.raises(PartitionerContractError) as caught:
        engine(program, Forgets())
    assert caught.value.violation == "tag_without_destination"
    for word in ("Forgets", "'forward'", "aten_cos_default", "'t_aten_cos_default'", "'t_aten_sin_default'"):
        assert word in str(caught.value)


@both_engines
def test_m12_two_backend_classes_of_one_name_are_an_error(engine: Engine) -> None:
    program = edge_program(Chain(), (X,))
    if engine is upstream:
        (delegate,) = delegates(engine(program, everything("RowTwin")))
        assert delegate.processed_bytes == b"second"
        return
    with pytest.raises(PluginLoadError, match=r"vendor_one\.RowTwin and vendor_two\.RowTwin"):
        engine(program, everything("RowTwin"))
    for twin, payload in zip(TWINS, (b"first", b"second"), strict=True):
        lowered = exir_lowering.to_backend(program, everything("RowTwin"), backends={"RowTwin": twin})
        assert [delegate.processed_bytes for delegate in delegates(lowered["forward"])] == [payload]


@both_engines
def test_m12_a_failing_backend_is_told_with_its_context(engine: Engine) -> None:
    program = edge_program(ManyReaders(), (X,))
    partitioner = TagPartitioner(_around_sin, "RowFails")
    if engine is upstream:
        with pytest.raises(ZeroDivisionError, match=r"^no such kernel$"):
            engine(program, partitioner)
        return
    with pytest.raises(BackendFailure) as caught:
        engine(program, partitioner)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    message = str(caught.value)
    for words in (
        "'RowFails'",
        "ZeroDivisionError: no such kernel",
        "method 'forward'",
        ":before",
        "aten_add_tensor",
        "aten_sub_tensor",
        "test_upstream_rows.py",
        "return torch.sin((x + self.c) * self.c - self.c) * self.c",
    ):
        assert words in message
    assert ":after" not in message


@both_engines
def test_m12_a_tag_that_is_not_convex_is_split_or_told_with_its_path(engine: Engine) -> None:
    program = edge_program(Diamond(), (X,))
    partitioner = TagPartitioner(by_operator("aten.sin.default", "aten.add.Tensor", tag="around"), "RowA")
    if engine is upstream:
        with pytest.raises(AssertionError, match=r"^Invalid partition, found dependency cycles$"):
            engine(program, partitioner)
        return
    lowered = engine(program, partitioner)
    assert len(delegates(lowered)) == 2
    assert torch.equal(lowered.module()(X), Diamond()(X))
    with pytest.raises(PartitionerContractError) as caught:
        exir_lowering.to_backend(program, partitioner, options=LoweringOptions(non_convex="raise"))
    assert caught.value.violation == "not_convex"
    assert "aten_sin_default -> aten_cos_default -> aten_add_tensor" in str(caught.value)
    assert "'around'" in str(caught.value)
