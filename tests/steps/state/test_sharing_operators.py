"""Composite operators may return what they are given, or a view of it, and not declare it: eager PyTorch decides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stateful import Way, differences, eager, exported, lowered, run_file
from torch import nn

import exir_lowering

CALLS = 3
ONE = torch.ones(1)
X = torch.arange(16.0).view(4, 4)
OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda s: F.dropout(s, 0.5, False),
    "dropout of nothing": lambda s: F.dropout(s, 0.0, True),
    "alpha_dropout": lambda s: F.alpha_dropout(s, 0.5, False),
    "feature_dropout": lambda s: F.dropout2d(s[None, None], 0.5, False)[0, 0],
    "type_as": lambda s: s.type_as(ONE),
    "type_as, another type": lambda s: s.type_as(ONE.long()).float(),
    "broadcast_tensors": lambda s: torch.broadcast_tensors(s, ONE)[0],
    "broadcast_tensors, second": lambda s: torch.broadcast_tensors(ONE, s)[1],
    "einsum": lambda s: torch.einsum("ij->ji", s),
    "einsum, product": lambda s: torch.einsum("ij,jk->ik", s, X),
    "meshgrid": lambda s: torch.meshgrid(s[:, 0], s[0], indexing="ij")[0],
    "sum_to_size": lambda s: s.sum_to_size(4, 4),
    "chain_matmul": lambda s: torch.chain_matmul(s),
    "cartesian_prod": lambda s: torch.cartesian_prod(s.reshape(-1)).view(4, 4),
    "pad": lambda s: F.pad(s, (0, 0)),
    "to": lambda s: s.to(torch.float32),
    "contiguous": lambda s: s.contiguous(),
    "flatten": lambda s: s.flatten().unflatten(0, (4, 4)),
    "matrix_power": lambda s: torch.linalg.matrix_power(s, 1),
    "two of them": lambda s: torch.einsum("ij->ji", F.dropout(s, 0.5, False)).type_as(s),
}


class Each(nn.Module):
    """Does the same with each operator, in buffers of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        for name in "sb":
            self.register_buffer(name, X + number)

    def forward(self, operator: Callable[..., Any], program: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = program(self, operator, x)
        return value


def kept(m: Any, operator: Any, x: torch.Tensor) -> Any:
    value = operator(m.s)
    m.b.copy_(value)
    m.s.add_(x)
    return m.b * 1


def returned(m: Any, operator: Any, x: torch.Tensor) -> Any:
    value = operator(m.s)
    m.s.add_(x)
    return value


def written(m: Any, operator: Any, x: torch.Tensor) -> Any:
    operator(m.s).add_(x)
    return m.s * 1


def intermediate(m: Any, operator: Any, x: torch.Tensor) -> Any:
    value = x * 2
    operator(value).add_(x)
    return value


def overwritten(m: Any, operator: Any, x: torch.Tensor) -> Any:
    value = x * 2
    seen = operator(value)
    value.add_(x)
    return seen * 1


def without_gradients(m: Any, operator: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        value = operator(m.s)
    with torch.no_grad():
        m.s.add_(x)
    return value * 1


PROGRAMS = (kept, returned, written, intermediate, overwritten, without_gradients)
NOT_EXPORTED = {("meshgrid", written), ("meshgrid", intermediate)}  # they write into what overlaps itself


class All(nn.Module):
    def __init__(self, program: Callable[..., Any]) -> None:
        super().__init__()
        self.program = program
        self.operators = {name: one for name, one in OPERATORS.items() if (name, program) not in NOT_EXPORTED}
        self.each = nn.ModuleList(Each(number) for number in range(len(self.operators)))

    def forward(self, x: torch.Tensor) -> Any:
        return tuple(each(one, self.program, x) for each, one in zip(self.each, self.operators.values(), strict=True))


@functools.cache
def made(program: Callable[..., Any]) -> tuple[list[str], Any, Any]:
    """Return the operators, and what they return in each call, lowered and in eager PyTorch."""
    model = All(program)
    calls = [("forward", [X + number]) for number in range(CALLS)]
    low = lowered(exported({"forward": model}, dict(calls[:1])), Way())
    return (
        [*model.operators],
        run_file(low.emit().buffer, low.programs, calls),
        eager({"forward": model}, calls),
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("operator", OPERATORS)
def test_results_are_eagers(operator: str, program: Callable[..., Any]) -> None:
    names, got, expected = made(program)
    if operator in names:
        place = names.index(operator)
        assert differences([[call[place]] for call in got], [[call[place]] for call in expected]) == []


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="torch sees that dropout may return its input, and refuses it")
def test_branches_return_memory_of_their_own() -> None:
    """They may not return what they are given, and torch refuses branches that do."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("s", X.clone())

        def forward(self, x: torch.Tensor) -> Any:
            y = torch.cond(x.sum() > 0, lambda x: F.dropout(x, 0.5, False), lambda x: x + 1, (x,))
            self.s.add_(x)
            return y + self.s

    low = exir_lowering.lower(torch.export.export(Model().eval(), (X,)))
    loaded = exir_lowering.load(low.emit().buffer)
    assert differences([loaded.run("forward", X), loaded.run("forward", -X)], [[3 * X], [-X + 1 + X]]) == []


def test_sizes_that_are_not_known() -> None:
    def function(x: torch.Tensor) -> Any:
        value = x * 2
        turned = torch.einsum("ij->ji", value)
        seen = torch.broadcast_tensors(turned, ONE)[0].sum_to_size(turned.shape)
        seen.add_(1)
        return value, turned * 1

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return function(x)

    program = torch.export.export(Model(), (X,), dynamic_shapes=({0: torch.export.Dim("n", max=8)},))
    loaded = exir_lowering.load(exir_lowering.lower(program).emit().buffer)
    for x in (X, X[:2]):
        assert differences([loaded.run("forward", x)], [function(x)]) == []


def test_what_is_computed_keeps_its_source_line() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            value = x * 2
            turned = torch.einsum("ij->ji", value)  # here
            value.add_(1)
            return turned * 1

    low = exir_lowering.lower(torch.export.export(Model(), (X,)))
    (node,) = (node for node in low.programs["forward"].graph.nodes if "permute" in node.name)
    assert "# here" in str(node.meta["stack_trace"])
