"""Control flow: partitions inside of cond, map, scan and while_loop, nested in each other, and around them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from functorch.experimental.control_flow import map as torch_map
from lowering_support import TagPartitioner, by_operator, delegates, edge_program, placeholders
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import exir_lowering
from exir_lowering.graphs import is_delegate_call, operator_name, walk

HIGHER_ORDER = ("cond", "map_impl", "scan", "while_loop")
X = torch.linspace(-1, 1, 12).reshape(3, 4) + 0.25  # the sum, which cond looks at, is not near 0
INPUTS = (X, -X, X.abs() * 3, X * 0.1)


class Base(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.full((4,), 3.0))
        self.register_buffer("shift", torch.full((4,), 0.5), persistent=False)
        self.constant = torch.full((4,), 2.0)


class Cond(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda v: self.linear(v) + self.shift, lambda v: v * self.constant, (x,))


class CondInCond(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(v: torch.Tensor) -> torch.Tensor:
            return torch.cond(v.sum() > 1, lambda u: u * self.scale, lambda u: u + self.shift, (v,))

        return torch.cond(x.sum() > 0, lambda v: inner(self.linear(v)), lambda v: v * self.scale, (x,))


class Map(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch_map(lambda row, scale: row * scale + self.linear.bias, x, self.scale)


class Scan(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        carry, rows = scan(lambda c, row: (c + row * self.scale, c * self.linear.bias), torch.zeros(4), x)
        return rows + carry


class WhileLoop(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.tensor(0)
        return while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, self.linear(v) * self.constant), (steps, x))[1]


MODELS: list[type[Base]] = [Cond, CondInCond, Map, Scan, WhileLoop]


def not_higher_order(node: torch.fx.Node) -> str | None:
    return None if operator_name(node) in HIGHER_ORDER else "t"


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
@pytest.mark.parametrize("tag_of", [not_higher_order, lambda node: "t"], ids=["inside", "whole"])
def test_equals_eager(model: type[Base], tag_of: Callable[[torch.fx.Node], str | None]) -> None:
    module = model().eval()
    program = edge_program(module, (X,))
    lowered = exir_lowering.to_backend(program, TagPartitioner(tag_of))["forward"]
    lowered.validate()
    run = lowered.module()
    for x in INPUTS:
        torch.testing.assert_close(run(x), module(x))


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_weights_reach_their_partition_and_nothing_is_left_over(model: type[Base]) -> None:
    program = edge_program(model().eval(), (X,))
    lowered = exir_lowering.to_backend(program, TagPartitioner(not_higher_order))["forward"]
    programs = [delegate.original_module for delegate in delegates(lowered)]
    owned = {name for p in programs for name in (*p.state_dict, *p.constants)}
    read = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    lifted = {s.target for s in program.graph_signature.input_specs if s.target is not None and s.arg.name in read}
    assert lifted <= owned
    assert not lifted & {*lowered.state_dict, *lowered.constants}
    assert not read & set(placeholders(lowered.graph_module)) - {"x"}
    for _, module in walk(lowered.graph_module):
        assert not [n for n in module.graph.nodes if "delegation_tag" in n.meta]
        assert not [name for name, _ in module.named_children() if name.startswith("fused_")]
        operators = [n for n in module.graph.nodes if n.op == "call_function" and not is_delegate_call(n)]
        assert {operator_name(n) for n in operators} <= {*HIGHER_ORDER, "getitem"}


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_runtime_equals_eager(model: type[Base]) -> None:
    module = model().eval()
    tags = TagPartitioner(by_operator("aten.mul.Tensor", "aten.add.Tensor"), XnnpackBackend.__name__)
    lowered = exir_lowering.to_backend(edge_program(module, (X,)), tags)
    assert len(delegates(lowered["forward"])) >= 1
    program = exir_lowering.load(lowered.emit().buffer)
    for x in INPUTS:
        torch.testing.assert_close(program.run("forward", x)[0], module(x), atol=1e-5, rtol=1e-5)


def test_a_branch_that_is_called_twice_keeps_its_operands() -> None:
    """Two calls of one graph with different weights: neither weight can move into it."""
    module = Cond().eval()
    program = edge_program(module, (X,))
    graph = program.graph_module.graph
    cond = next(n for n in graph.nodes if operator_name(n) == "cond")
    assert sum(1 for n in graph.nodes if n.op == "get_attr") == 2
    with graph.inserting_after(cond):
        again = graph.node_copy(cond, lambda n: n)
    item = next(iter(cond.users))
    with graph.inserting_after(again):
        second = graph.node_copy(item, lambda n: again if n is cond else n)
    output = graph.output_node()
    output.args = ((item,),)
    with graph.inserting_before(output):
        add = next(
            n.target for _, m in walk(program.graph_module) for n in m.graph.nodes if "add.Tensor" in str(n.target)
        )
        total = graph.call_function(add, (item, second))
        total.meta = dict(item.meta)
    output.args = ((total,),)
    program.graph_signature.output_specs[0].arg.name = total.name
    program.graph_module.recompile()
    lowered = exir_lowering.to_backend(program, TagPartitioner(not_higher_order))["forward"]
    for x in INPUTS:
        torch.testing.assert_close(lowered.module()(x), 2 * module(x))
