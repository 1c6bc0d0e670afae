"""Programs with sizes that depend on data: converted as often as one likes, and untouched by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from executorch import exir
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge, to_edge_transform_and_lower
from executorch.exir._serialize._program import deserialize_pte_binary
from lowering_support import NoopBackend, TagPartitioner
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from exir_lowering import LoweringError, LoweringOptions, load, lower, plan, to_backend
from exir_lowering.compat import patch_executorch


class _Nonzero(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1).nonzero() * 2


class _Masked(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].relu() + 1


class _Item(torch.nn.Module):
    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        number = count.item()
        torch._check(number >= 0)
        torch._check(number <= x.shape[0])
        return x[:number] + 1


class _Dynamic(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


@dataclass(frozen=True)
class Model:
    """A model with inputs."""

    module: type[torch.nn.Module]
    inputs: tuple[Any, ...]
    dynamic_shapes: Any = None

    def export(self) -> ExportedProgram:
        torch.manual_seed(0)
        return torch.export.export(self.module().eval(), self.inputs, dynamic_shapes=self.dynamic_shapes)


MODELS = {
    "nonzero": Model(_Nonzero, (torch.tensor([1.0, -1.0, 2.0, 0.5]),)),
    "mask": Model(_Masked, (torch.tensor([1.0, -1.0, 2.0, 0.5]),)),
    "item": Model(_Item, (torch.arange(4.0), torch.tensor(2))),
    "dynamic": Model(_Dynamic, (torch.ones(3, 4),), ({0: Dim("n", max=8)},)),
}


def _described(program: ExportedProgram) -> Mapping[str, Any]:
    """Describe all that the values of a program's nodes share: the shape environment, and what tensors remember."""
    values = [node.meta["val"] for node in program.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    mode = values[0].fake_mode
    said = {name: value for name, value in vars(mode.shape_env).items() if name not in ("log", "fake_tensor_cache")}
    said.pop("_expr_sym_node_id", None)  # the address of what was looked at last
    tables = {
        name: {repr(key): repr(entry) for key, entry in value.items()} if isinstance(value, dict) else repr(value)
        for name, value in said.items()
    }
    memos = [{name: repr(value) for name, value in vars(value).items() if "memo" in name} for value in values]
    graph = [(node.name, str(node.target), repr(node.args), repr(node.meta.get("val"))) for node in program.graph.nodes]
    return {"environment": tables, "memos": memos, "graph": graph, "ranges": repr(program.range_constraints)}


@pytest.mark.parametrize("name", MODELS)
def test_a_program_is_converted_again_and_again_and_stays_as_it_is(name: str) -> None:
    program = MODELS[name].export()
    before = _described(program)
    plan(program, "xnnpack")
    first = lower(program, XnnpackPartitioner())
    file = first.emit().buffer
    assert first.emit().buffer == file
    assert lower(program, XnnpackPartitioner()).emit().buffer == file
    both = lower({"one": program, "two": program}, "reference")
    assert both.emit().buffer == lower({"one": program, "two": program}, "reference").emit().buffer
    assert _described(program) == before
    upstream = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    as_it_is = lower(program, XnnpackPartitioner(), options=LoweringOptions(rewrites="none")).emit().buffer
    # But for the digests, which ours has besides, and which move the segments.
    theirs, ours = (deserialize_pte_binary(content).program for content in (bytes(upstream.buffer), as_it_is))
    if name != "nonzero":  # ExecuTorch plans columns, which its kernel does not write
        assert ours.execution_plan == theirs.execution_plan
    assert ours.constant_buffer == theirs.constant_buffer
    assert ours.backend_delegate_data == theirs.backend_delegate_data


@pytest.mark.parametrize("name", MODELS)
def test_a_program_in_edge_dialect_stays_as_it_is(name: str) -> None:
    program = to_edge(MODELS[name].export()).exported_program()
    before = _described(program)
    files = [to_backend(program, "reference").emit().buffer for _ in range(2)]
    plan(program, "reference")
    assert files[0] == files[1]
    assert _described(program) == before


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("partitioner", ["xnnpack", "reference"])
def test_what_the_runtime_computes_is_what_the_model_computes(name: str, partitioner: str) -> None:
    model = MODELS[name]
    program = model.export()
    expected = program.module()(*model.inputs)
    plan(program, partitioner)
    file = lower(program, partitioner).emit().buffer
    (got,) = load(file).run("forward", *model.inputs)
    torch.testing.assert_close(got, expected)


FOUND: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "places": lambda x: torch.nonzero(x, as_tuple=True),
    "columns": lambda x: torch.nonzero(x).t() + 1,
    "one column": lambda x: torch.nonzero(x)[:, 0] + 1,
    "taken": lambda x: x[torch.nonzero(x, as_tuple=True)] * 2,
    "transposed": lambda x: torch.nonzero(x).t().contiguous().float().sum(1),
}


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 2)])
@pytest.mark.parametrize("name", FOUND)
def test_values_in_another_order_whose_sizes_depend_on_data(name: str, shape: tuple[int, ...]) -> None:
    class Find(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return FOUND[name](x)

    some = (torch.arange(float(torch.Size(shape).numel())) % 3).view(shape)
    file = lower(torch.export.export(Find(), (some,))).emit().buffer
    for x in (some, torch.zeros(shape), torch.ones(shape)):
        expected = pytree.tree_leaves(FOUND[name](x))
        torch.testing.assert_close(list(load(file).run("forward", x)), expected)


class _Breaking(TagPartitioner):
    def partition(self, exported_program: ExportedProgram) -> Any:
        raise ValueError("broken on purpose")


class _BreakingBackend(NoopBackend):
    backend_id = "echo"

    def preprocess_all(self, edge_programs: Any, compile_specs: Any) -> Any:
        raise ValueError("broken on purpose")


@pytest.mark.parametrize("name", MODELS)
def test_a_failure_leaves_the_program_as_it_is(name: str) -> None:
    program = MODELS[name].export()
    before = _described(program)
    failing: list[Callable[[], object]] = [
        lambda: lower(program, _Breaking()),
        lambda: lower(program, TagPartitioner(), backends={"echo": _BreakingBackend()}),
    ]
    for fail in failing:
        with pytest.raises(LoweringError, match="broken on purpose"):
            fail()
        assert _described(program) == before
    assert lower(program, "reference").emit().buffer


class Split(torch.nn.Module):
    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        one, other = x.split(sizes.tolist())
        return torch.cat([one * 2, other - 1])


def test_what_is_split_by_data_is_lowered_by_executorchs_calls_too() -> None:
    """Its verifier runs each operator, which these sizes do not let it."""
    x, calls = torch.randn(8, 4), [torch.tensor(sizes) for sizes in ([3, 5], [0, 8], [8, 0])]
    program = torch.export.export(Split(), (x, calls[0]))
    with patch_executorch():
        edge = exir.to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        buffer = edge.to_executorch().buffer
    loaded = load(buffer)
    for sizes in calls:
        torch.testing.assert_close(loaded.run("forward", x, sizes)[0], Split()(x, sizes))
