"""Serialised programs: what is read is what was written, for every kind of program, and lowers to the same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge
from models import MODELS, exported
from quantized_models import quantized
from random_programs import random_programs
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from exir_lowering import graphs, lower, plan
from exir_lowering._upstream.fakes import FakeTensor
from exir_lowering.graphs.serialized import NotSerialisableError, decode, encode
from exir_lowering.graphs.serialized.arguments import DROPPED


def edge(program: ExportedProgram) -> ExportedProgram:
    return to_edge(program, compile_config=EdgeCompileConfig(_check_ir_validity=False)).exported_program()


def round_trip(program: ExportedProgram) -> ExportedProgram:
    """Write and read a program, compare, and return what was read."""
    encoded = encode(program)
    made = decode(encoded.graph, encoded.pieces)
    again = encode(made)
    assert again.graph == encoded.graph
    assert [piece.data_ptr() for piece in again.pieces] == [piece.data_ptr() for piece in encoded.pieces]
    assert_equal(made, program)
    return made


def assert_equal(one: ExportedProgram, other: ExportedProgram) -> None:
    assert_equal_graphs(one.graph_module, other.graph_module)
    for field in ("graph_signature", "range_constraints", "dialect"):
        assert repr(getattr(one, field)) == repr(getattr(other, field))
    assert one._guards_code == other._guards_code
    assert [repr(entry) for entry in one.module_call_graph] == [repr(entry) for entry in other.module_call_graph]
    for mine, its in ((one.state_dict, other.state_dict), (one.constants, other.constants)):
        assert list(mine) == list(its)
        for name in mine:
            assert type(mine[name]) is type(its[name]) and mine[name].data_ptr() == its[name].data_ptr()
            assert mine[name].stride() == its[name].stride() and mine[name].dtype is its[name].dtype
            assert mine[name].requires_grad == its[name].requires_grad and torch.equal(mine[name], its[name])
        shared = [[a is b for a in its.values()] for b in its.values()]
        assert [[a is b for a in mine.values()] for b in mine.values()] == shared


def assert_equal_graphs(one: GraphModule, other: GraphModule) -> None:
    nodes = list(zip(one.graph.nodes, other.graph.nodes, strict=True))
    for mine, its in nodes:
        assert (mine.op, mine.name) == (its.op, its.name)
        assert mine.target is its.target or (mine.op != "call_function" and mine.target == its.target)
        assert describe((mine.args, mine.kwargs)) == describe((its.args, its.kwargs))
        assert [key for key in its.meta if key not in DROPPED] == list(mine.meta)
        for key in set(mine.meta) - {"from_node", "nn_module_stack", "source_fn_stack"}:
            assert describe(mine.meta[key]) == describe(its.meta[key]), (mine.name, key)
        assert graphs.stack(mine) == graphs.stack(its) and graphs.modules(mine) == graphs.modules(its)
        if mine.op == "get_attr":
            value, original = graphs.attribute(one, mine.target), graphs.attribute(other, its.target)
            if isinstance(original, GraphModule):
                assert_equal_graphs(value, original)
            else:
                assert torch.equal(value, original)
    histories = [(origins(mine), origins(its)) for mine, its in nodes]
    assert len(set(histories)) == len({mine for mine, _ in histories}) == len({its for _, its in histories})


def origins(node: Node) -> tuple[Any, ...]:
    """Return the names and graphs that a node comes from; graphs are numbered anew, so only equality counts."""
    found = []
    for source in node.meta.get("from_node", ()):
        while source is not None:
            found.append((source.name, source.target, source.pass_name, source.graph_id))
            source = source.from_node[-1] if source.from_node else None
    return tuple(found)


def describe(value: Any) -> Any:
    """Return a value in which fake tensors, symbolic numbers, nodes and operators are told by what they are."""

    def leaf(one: Any) -> Any:
        if isinstance(one, FakeTensor):
            sizes = str((tuple(one.shape), one.stride(), one.storage_offset()))
            return (type(one), sizes, one.dtype, one.device, one.requires_grad, isinstance(one, nn.Parameter))
        if isinstance(one, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return str(one) if one.node.expr.is_number else (type(one), str(one.node.expr), one.node.hint)
        if isinstance(one, float):
            return repr(one)
        return one.name if isinstance(one, Node) else (type(one), str(one))

    leaves, spec = pytree.tree_flatten(value)
    return [leaf(one) for one in leaves], str(spec).replace("immutable_list", "list").replace("immutable_", "")


@pytest.mark.parametrize("model", [*MODELS])
def test_models_are_read_as_they_were_written(model: str) -> None:
    program = exported(model)[2]
    round_trip(program)
    round_trip(edge(program))


QUICK = ("bert", "convnext")


@pytest.mark.parametrize(
    "model", [model if model in QUICK else pytest.param(model, marks=pytest.mark.nightly) for model in MODELS]
)
def test_models_that_were_read_lower_to_the_same_bytes(model: str) -> None:
    program = exported(model)[2]
    made = round_trip(program)
    assert plan(made, "xnnpack").to_json() == plan(program, "xnnpack").to_json()
    assert lower(made, "xnnpack").emit().buffer == lower(program, "xnnpack").emit().buffer


@pytest.mark.parametrize("dynamic", [False, True])
def test_quantised_programs(dynamic: bool) -> None:
    program = quantized(dynamic)
    made = round_trip(program)
    round_trip(edge(program))
    assert lower(made, "xnnpack").emit().buffer == lower(program, "xnnpack").emit().buffer


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        both = torch.cat([self.linear(x), y, x])
        rows = both.shape[0]
        return both[1:].relu(), both.reshape(rows * 2, 4), rows // 2 + 1, torch.full((rows, 2), 0.5)


def test_symbolic_sizes() -> None:
    shapes = {"x": {0: Dim("b", min=3, max=60)}, "y": {0: Dim("c", min=2)}}
    program = export(Sizes(), (torch.randn(5, 8), torch.randn(4, 8)), dynamic_shapes=shapes)
    made = round_trip(program)
    round_trip(edge(program))
    assert lower(made, "xnnpack").emit().buffer == lower(program, "xnnpack").emit().buffer
    with pytest.raises(AssertionError, match="Guard failed"):
        made.module()(torch.randn(61, 8), torch.randn(4, 8))


class Floats(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        return x.shape[0] * 1.5, x * (x.shape[0] / 3)


def test_symbolic_floats() -> None:
    round_trip(export(Floats(), (torch.randn(5, 8),), dynamic_shapes=({0: Dim("b", min=3)},)))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.mean() > 1, torch.sin, lambda x: x * float("inf"), (x,))

        return torch.cond(x.sum() > 0, lambda x: inner(x @ self.weight), lambda x: x.cos(), (x,))


def test_nested_graphs() -> None:
    program = export(Branches(), (torch.randn(3, 4),))
    made = round_trip(program)
    round_trip(edge(program))
    assert lower(made, "xnnpack").emit().buffer == lower(program, "xnnpack").emit().buffer


@pytest.mark.parametrize("seed", [0, 100])
def test_random_programs(seed: int) -> None:
    for program in random_programs(seed, 2):
        made = {name: round_trip(method) for name, method in program.methods.items()}
        assert lower(made).emit().buffer == lower(program.methods).emit().buffer


class Unusual(nn.Module):
    """Arguments and results of all kinds, weights that share memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(40)
        self.register_buffer("first", memory[:12].view(3, 4))
        self.register_buffer("second", memory[4:20].view(4, 4).t())
        self.register_buffer("empty", torch.zeros(0, 4))
        self.weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.tied = self.weight

    def forward(self, x: dict[str, torch.Tensor], *, scale: float = 2.0, name: str = "n") -> dict[str, Any]:
        y = x["a"] * scale @ self.weight + self.tied
        return {
            "y": torch.nan_to_num(y, nan=float("inf"), neginf=-0.0).clamp(min=-float("inf")),
            "z": (self.first @ self.second, torch.cat([self.empty, y]).to(torch.float64), [name, None, 3]),
            "c": torch.full((2,), 1.5 - 2j, dtype=torch.complex64, device="cpu").real,
            "m": torch.empty_like(y, memory_format=torch.preserve_format).zero_(),
        }


def test_values_of_all_kinds() -> None:
    program = export(Unusual(), ({"a": torch.randn(4, 4)},), {"scale": 2.5, "name": "n"})
    encoded = encode(program)
    assert len(encoded.pieces) == 3  # the shared memory, the weight, the example input
    made = round_trip(program)
    expected, found = (p.module()(*p.example_inputs[0], **p.example_inputs[1]) for p in (program, made))
    assert str(expected) == str(found)


def test_bytes_depend_on_the_program_only(tmp_path: Path) -> None:
    """A second process, with other addresses and another hash seed, writes the same bytes, and reads them."""
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from models import exported\n"
        "from exir_lowering.graphs.serialized import decode, encode\n"
        "folder = Path(sys.argv[1]); found = encode(exported('bert')[2])\n"
        "(folder / 'digests').write_text(' '.join(found.digests())); (folder / 'graph').write_bytes(found.graph)\n"
        "assert encode(decode(found.graph, found.pieces)).graph == found.graph\n"
    )
    folders = [str(Path(__file__).parents[1] / "support")]
    command = [sys.executable, "-c", script, str(tmp_path), *folders]
    subprocess.run(command, check=True, env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(filter(None, sys.path))})
    encoded = encode(exported("bert")[2])
    assert (tmp_path / "graph").read_bytes() == encoded.graph
    assert (tmp_path / "digests").read_text().split() == list(encoded.digests())


def test_what_is_left_out_does_not_count() -> None:
    class Here(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu() + 1

    class There(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu() + 1

    one, other = (edge(export(model, (torch.zeros(3),))) for model in (Here(), There()))
    assert encode(one).graph != encode(other).graph
    places = ("debug_handle", "from_node", "stack_trace", "nn_module_stack")
    assert encode(one, leave_out=places).graph == encode(other, leave_out=places).graph
    other.graph.find_nodes(op="placeholder")[0].meta["val"].unsqueeze_(0)
    assert encode(one, leave_out=places).graph != encode(other, leave_out=places).graph


def nonzero() -> ExportedProgram:
    class Found(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.nonzero()

    return export(Found(), (torch.zeros(3),))


def with_meta(value: Any) -> ExportedProgram:
    program = export(nn.ReLU(), (torch.zeros(3),))
    next(iter(program.graph.nodes)).meta["mine"] = value
    return program


def with_weight(weight: torch.Tensor) -> ExportedProgram:
    program = export(nn.Linear(2, 2), (torch.zeros(1, 2),))
    program.state_dict["weight"] = weight
    return program


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (nonzero, "depends on data.*in meta.*node 'nonzero'"),
        (lambda: with_meta(object()), "a value of the type object.*in meta.'mine'.*node 'input'"),
        (lambda: with_meta(lambda: 1), "a value of the type function"),
        (lambda: with_weight(torch.eye(2).to_sparse()), "sparse"),
        (lambda: with_weight(torch.zeros(2, 2, device="meta")), "device meta"),
        (lambda: with_weight(torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8)), "quantised"),
        (lambda: lower(exported("bert")[2], "xnnpack")["forward"], "an attribute of the type LoweredBackendModule"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_says_why(make: Any, reason: str) -> None:
    with pytest.raises(NotSerialisableError, match=f"(?s)^not serialisable: .*{reason}"):
        encode(make())
