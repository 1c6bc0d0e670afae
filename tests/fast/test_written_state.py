"""The fast conversion writes state as torch does: buffers, views of what was written, operators of users that write."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import both_ways
import pytest
import torch
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  (it registers torch.ops.llama)
from torch import nn
from torch.export import Dim, export

from exir_lowering import load, lower
from exir_lowering.errors import LoweringError


class State(nn.Module):
    """Calls a function, with buffers and a weight at hand."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("a", torch.zeros(4, 4))
        self.register_buffer("b", torch.ones(4, 4))
        self.register_buffer("count", torch.zeros(1, dtype=torch.long))
        self.weight = nn.Parameter(torch.eye(4) + 0.5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def rows_by_index(m: State, x: torch.Tensor) -> Any:
    m.b.index_copy_(0, m.count, x[:1])
    m.a.index_copy_(0, m.count, (m.b @ m.weight)[:1])
    m.count.add_(1)
    return m.a + m.b


def repeated_heads(m: State, x: torch.Tensor) -> Any:
    k = m.a.index_copy_(0, m.count, x[:1])[:, None].expand(4, 2, 4).reshape(4, 8)
    return x + 1, k @ k.t(), k.sum()


def views_that_share_a_view(m: State, x: torch.Tensor) -> Any:
    m.a.index_copy_(0, m.count, x[:1])
    shared = m.a[:, None]
    turned = shared.transpose(1, 2)
    return x + 1, turned + 1, shared + 2


def columns_by_number(m: State, x: torch.Tensor) -> Any:
    m.a[:, m.count] = x[:, :1]
    return m.a.sum()


def assigned(m: State, x: torch.Tensor) -> Any:
    m.a.copy_(x)
    return m.a * 2


def assigned_of_another_type(m: State, x: torch.Tensor) -> Any:
    m.count.copy_(x[0, :1])
    return m.count + 1


def assigned_and_expanded(m: State, x: torch.Tensor) -> Any:
    m.a.copy_(x[0])
    return m.a


def exchanged(m: State, x: torch.Tensor) -> Any:
    old = m.a.clone()
    m.a.copy_(m.b)
    m.b.copy_(old)
    return x + m.a


def several_times(m: State, x: torch.Tensor) -> Any:
    m.a.add_(x).mul_(2)
    between = m.a.relu()
    m.a.sub_(1)
    return between, m.a


def without_effect(m: State, x: torch.Tensor) -> Any:
    return nn.functional.dropout(m.a, 0.5, False, True).add_(x) * 2


def view_of_what_was_not_written(m: State, x: torch.Tensor) -> Any:
    kept = nn.functional.dropout(m.a, 0.5, False, True)
    return x * 3, kept[1:] + 1


def view_of_what_was_written_before(m: State, x: torch.Tensor) -> Any:
    kept = nn.functional.dropout(m.a.add_(x), 0.5, False, True)
    return x * 3, kept[1:] + 1


def under_no_grad(m: State, x: torch.Tensor) -> Any:
    with torch.no_grad():
        m.a.mul_(2)
        m.count.add_(1)
    return m.a + x


def old_view_is_read(m: State, x: torch.Tensor) -> Any:
    turned, old = m.a.t(), m.a + 1
    m.a.add_(x)
    return turned + 1, old


def row_by_number(m: State, x: torch.Tensor) -> Any:
    m.a[0] = x[0]
    return m.a + 1


def returned_view(m: State, x: torch.Tensor) -> Any:
    return m.a.add_(x).unsqueeze(1)


COVERED = (
    *(rows_by_index, repeated_heads, views_that_share_a_view, columns_by_number, assigned, assigned_of_another_type),
    *(assigned_and_expanded, exchanged, several_times, without_effect),
    *(view_of_what_was_not_written, view_of_what_was_written_before),
)
LEFT = (old_view_is_read, row_by_number, returned_view)  # to ExecuTorch's conversion


@pytest.mark.parametrize("way", ["xnnpack", "none unchecked"])
@pytest.mark.parametrize("function", [*COVERED, *LEFT])
def test_state_is_written_as_torch_writes_it(function: Callable[..., Any], way: str) -> None:
    outcome = both_ways.compare(export(State(function), (torch.randn(4, 4),)), way)
    assert outcome.differences == [] and outcome.error is None
    assert (not outcome.left) is (function in COVERED), outcome.left


@pytest.mark.parametrize("function", [*COVERED, *LEFT, under_no_grad])
def test_files_keep_state_over_calls(function: Callable[..., Any]) -> None:
    check_calls(State(function))


def check_calls(module: nn.Module) -> None:
    """Check three calls of a file against the module."""
    given = [torch.randn(4, 4) for _ in range(3)]
    loaded = load(lower(export(copy.deepcopy(module), (given[0],)), "xnnpack").emit().buffer)
    for x in given:
        expected = torch.utils._pytree.tree_leaves(module(x))
        torch.testing.assert_close(list(loaded.run("forward", x)), expected, atol=1e-4, rtol=1e-4)


@torch.library.custom_op("written_state::accumulate", mutates_args=("state",))
def accumulate(state: torch.Tensor, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return state.add_(x) * factor


@accumulate.register_fake
def _(state: torch.Tensor, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return torch.empty_like(state)


OPERATORS_OF_USERS: dict[str, Callable[[State, torch.Tensor], Any]] = {
    "result is read": lambda m, x: accumulate(m.a, x @ m.weight) + m.a,
    "other factor": lambda m, x: accumulate(m.a, x=x, factor=3.0) - m.a,
    "several": lambda m, x: (accumulate(m.a, m.b), accumulate(m.b, m.a), m.a.add_(1), accumulate(m.a, m.b), m.a * m.b)[
        3:
    ],
    "intermediate value": lambda m, x: (lambda y: accumulate(y, x) + y)(x * 2),
    "view afterwards": lambda m, x: (accumulate(m.a, x), m.a.t()[1:] + 1),
    "itself": lambda m, x: (accumulate(m.a, m.a), m.a + 1),
}


@pytest.mark.parametrize("name", OPERATORS_OF_USERS)
def test_operators_of_users_that_write(name: str) -> None:
    outcome = both_ways.compare(export(State(OPERATORS_OF_USERS[name]), (torch.randn(4, 4),)))
    assert outcome.differences == [] and outcome.error is None and outcome.left == ()


@pytest.mark.parametrize("part", ["a part", "an input"])
def test_parts_that_operators_of_users_write_are_left_to_torch(part: str) -> None:
    def function(m: State, x: torch.Tensor) -> Any:
        return accumulate(m.a[1:] if part == "a part" else x, m.b[1:] if part == "a part" else m.b), m.a + x

    outcome = both_ways.compare(export(State(function), (torch.randn(4, 4),)))
    assert outcome.differences == [] and "written_state.accumulate.default, which writes" in outcome.left[0]


class Cached(nn.Module):
    """A layer of attention over ExecuTorch's cache, at a position that a tensor says."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 16, 2, 4))
        self.register_buffer("values", torch.zeros(1, 16, 2, 4))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        start, y = position[0].item(), self.linear(x).view(1, -1, 2, 4)
        torch.ops.llama.update_cache(y, self.keys, start)
        torch.ops.llama.update_cache(y * 2, self.values, start)
        found: torch.Tensor = torch.ops.llama.custom_sdpa(y, self.keys, self.values, start, None, 0.0, True, 1.0)
        return self.linear(found.reshape(1, -1, 8))


@pytest.mark.parametrize("way", ["xnnpack", "none unchecked"])
def test_a_cache_that_an_operator_of_users_writes(way: str) -> None:
    sizes = ({1: Dim("length", max=15)}, None)
    program = export(Cached(), (torch.randn(1, 3, 8), torch.tensor([2])), dynamic_shapes=sizes)
    outcome = both_ways.compare(program, way)
    assert outcome.differences == [] and outcome.left == ()


def rows_up_to(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    rows = n.item()
    torch._check(rows >= 1)
    torch._check(rows <= 4)
    return x[:rows] * 2


def rows_made(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    rows, more = torch.stack([n, n + 1]).tolist()
    torch._check(rows >= 0)
    torch._check(more >= 0)
    torch._check(rows + more <= 6)
    return torch.cat([x.new_ones(rows, 4), x.new_zeros(more, 4)])


def negative(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    factor = n.item()
    torch._check(factor > -5)
    torch._check(factor < 5)
    return x * factor


@pytest.mark.parametrize(("function", "covered"), [(rows_up_to, True), (rows_made, True), (negative, False)])
def test_numbers_that_are_read_from_tensors(function: Callable[..., Any], covered: bool) -> None:
    class Of(nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> Any:
            return function(x, n)

    outcome = both_ways.compare(export(Of(), (torch.randn(4, 4), torch.tensor(2))))
    assert outcome.differences == [] and outcome.error is None
    assert (not outcome.left) is covered, outcome.left


class Drawn(nn.Module):
    """Buffers, views and in-place operators, in the order of chance; every tensor is 4 by 4."""

    STEPS: tuple[Callable[[Any, Any], Any], ...] = (
        lambda p, q: p.add_(q),
        lambda p, q: p.mul_(2),
        lambda p, q: p.copy_(q),
        lambda p, q: p.zero_(),
        lambda p, q: p.index_copy_(0, torch.tensor([1, 2]), q[:2]),
        lambda p, q: p.t(),
        lambda p, q: p.unsqueeze(0).transpose(1, 2)[0],
        lambda p, q: p[None].expand(2, 4, 4).select(0, 1),
        lambda p, q: p.view(2, 8).view(4, 4) if p.is_contiguous() else p.reshape(4, 4),
        lambda p, q: p.relu(),
        lambda p, q: p + q,
        lambda p, q: p @ q,
        lambda p, q: p.clone(),
    )

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.register_buffer("a", torch.zeros(4, 4))
        self.register_buffer("b", torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> Any:
        drawn = random.Random(self.seed)
        values = [self.a, self.b, x * 0.5]
        for _ in range(drawn.randint(3, 9)):
            step, places = drawn.choice(self.STEPS), [drawn.choice((*range(3), -1, -1)) for _ in range(2)]
            values.append(step(*(values[place] for place in places)))
        return [one * 1 for one in drawn.sample(values, 3)]


def check_drawn(seed: int) -> bool:
    """Check a program both ways, and its file; return whether it was converted the fast way."""
    try:
        Drawn(seed)(torch.randn(4, 4))
        program = export(Drawn(seed), (torch.randn(4, 4),))
        lower(copy.deepcopy(program), "xnnpack")
    except (RuntimeError, LoweringError):  # it writes where elements overlap, or what else cannot be
        return False
    outcome = both_ways.compare(program, "none unchecked")
    assert outcome.differences == [], (seed, outcome)
    check_calls(Drawn(seed))
    return not outcome.left


def test_random_programs_that_write() -> None:
    assert sum(map(check_drawn, range(12))) >= 3


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_many_random_programs_that_write(part: int) -> None:
    assert sum(map(check_drawn, range(100 + part * 200, 300 + part * 200))) >= 60
