"""A method reads all its state before it writes any: what `torch.export` means by a signature holds in the file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from executorch.exir import to_edge
from stateful import Call, Way, differences, eager, exported, lowered, run, run_file
from torch import nn
from torch.export import ExportedProgram

import exir_lowering

CALLS = 5
F, I, B = torch.float32, torch.int64, torch.bool  # noqa: E741


class Of(nn.Module):
    """Calls a function, with state at hand."""

    def __init__(self, function: Callable[..., Any], **state: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in state.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, nn.Parameter(value.clone(), requires_grad=value.requires_grad))
            else:
                self.register_buffer(name, value, persistent=not name.startswith("loose"))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def filled(*shape: int, dtype: torch.dtype = F, start: int = 1) -> torch.Tensor:
    """Return small integers, each another one."""
    numbers = torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)
    return numbers % 2 == 0 if dtype is B else numbers.to(dtype)


def last(start: int) -> torch.Tensor:
    """Return an image in channels last; ExecuTorch's kernels take nothing else beside it, no number either."""
    return filled(1, 2, 2, 3, start=start).to(memory_format=torch.channels_last)


CASES: dict[str, Callable[[], tuple[nn.Module, Callable[[int], Call]]]] = {}


def case(*inputs: torch.Tensor, **state: torch.Tensor) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a case of a function of state `m` and inputs, which grow from call to call."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES[function.__name__] = lambda: (
            Of(function, **state),
            lambda number: [one if one.dtype is B else one + 2 * number * (one.dtype is F) for one in inputs],
        )
        return function

    return add


X = filled(4)
ROW = torch.tensor([2])


# -- what came out wrong ----------------------------------------------------------------------------------------------


@case(X, start=filled(4, start=10), state=filled(4))
def reset_from_another_buffer(m: Any, x: torch.Tensor) -> Any:
    y = m.state + x
    m.state.copy_(m.start)
    return y


@case(X, start=filled(4, start=10), state=filled(4))
def reset_from_a_buffer_that_is_written(m: Any, x: torch.Tensor) -> Any:
    y = m.state + x
    m.state.copy_(m.start)
    m.start.add_(x)
    return y


@case(X, a=filled(4), b=filled(4, start=10))
def swap(m: Any, x: torch.Tensor) -> Any:
    old = m.a.clone()
    m.a.copy_(m.b)
    m.b.copy_(old)
    return m.a + x, m.b * 2


@case(X, p1=filled(4), p2=filled(4, start=10))
def delay_line(m: Any, x: torch.Tensor) -> Any:
    y = x + 10 * m.p1 + 100 * m.p2
    m.p2.copy_(m.p1)
    m.p1.copy_(x)
    return y


@case(X, p2=filled(4), p1=filled(4, start=10))
def delay_line_declared_in_the_other_order(m: Any, x: torch.Tensor) -> Any:
    y = x + 10 * m.p1 + 100 * m.p2
    m.p2.copy_(m.p1)
    m.p1.copy_(x)
    return y


@case(X, p1=filled(4), p2=filled(4), p3=filled(4), p4=filled(4))
def delay_line_of_four(m: Any, x: torch.Tensor) -> Any:
    y = x + m.p1 + 10 * m.p2 + 100 * m.p3 + 1000 * m.p4
    m.p4.copy_(m.p3)
    m.p3.copy_(m.p2)
    m.p2.copy_(m.p1)
    m.p1.copy_(x)
    return y


@case(X, a=filled(4), c=filled(2, 2, start=10))
def view_of_a_clone(m: Any, x: torch.Tensor) -> Any:
    y = x + m.c.view(4)
    m.c.copy_(m.a.clone().view(2, 2))
    m.a.add_(x)
    return y


@case(filled(4, dtype=I), a=filled(4, dtype=I), c=filled(2, 2, start=10, dtype=I))
def view_of_a_clone_of_integers(m: Any, x: torch.Tensor) -> Any:
    y = x + m.c.view(4)
    m.c.copy_(m.a.clone().view(2, 2))
    m.a.add_(x)
    return y


@case(filled(2, 2), a=filled(2, 2), c=filled(4, start=10))
def view_after_permutations_that_cancel(m: Any, x: torch.Tensor) -> Any:
    y = x + m.c.view(2, 2)
    m.c.copy_(m.a.permute(1, 0).permute(1, 0).reshape(4))
    m.a.add_(x)
    return y


@case(filled(2, 2), a=filled(2, 2), c=filled(2, 2, start=10))
def permutations_that_cancel(m: Any, x: torch.Tensor) -> Any:
    y = x + m.c
    m.c.copy_((m.a.permute(1, 0).contiguous()).permute(1, 0).contiguous())
    m.a.add_(x)
    return y


@case(filled(2, 2, dtype=I), a=filled(2, 2, dtype=I), c=filled(4, start=10, dtype=I))
def view_after_permutations_of_integers_that_cancel(m: Any, x: torch.Tensor) -> Any:
    y = x + m.c.view(2, 2)
    m.c.copy_(m.a.permute(1, 0).permute(1, 0).reshape(4))
    m.a.add_(x)
    return y


# -- relatives --------------------------------------------------------------------------------------------------------


@case(X, a=filled(4), b=filled(4, start=10), c=filled(4, start=20))
def rotation_of_three(m: Any, x: torch.Tensor) -> Any:
    first = m.a.clone()
    m.a.copy_(m.b)
    m.b.copy_(m.c)
    m.c.copy_(first)
    return m.a + x, m.b + 0, m.c + 0


@case(X, a=filled(4), b=filled(2, 2, start=10), c=filled(4, 1, start=20))
def rotation_of_three_through_views(m: Any, x: torch.Tensor) -> Any:
    first = m.a.clone()
    m.a.copy_(m.b.view(4))
    m.b.copy_(m.c.view(2, 2))
    m.c.copy_(first.view(4, 1))
    return m.a + x, m.b + 0, m.c + 0


@case(X, a=filled(4), b=filled(4, start=10), c=filled(4, start=20), d=filled(4, start=30))
def two_swaps(m: Any, x: torch.Tensor) -> Any:
    a, c = m.a + 0, m.c.clone()
    m.a.copy_(m.b)
    m.b.copy_(a)
    m.c.copy_(m.d)
    m.d.copy_(c)
    return m.a + 10 * m.b + 100 * m.c + 1000 * m.d + x


@case(X, a=filled(4), b=filled(4, start=10), c=filled(4, start=20))
def swap_that_a_third_one_reads(m: Any, x: torch.Tensor) -> Any:
    old = m.a.clone()
    m.c.copy_(m.a)
    m.a.copy_(m.b)
    m.b.copy_(old)
    return m.c + x, m.a + 0


@case(filled(2, 2), a=filled(2, 2), b=filled(2, 2, start=10))
def swap_transposed(m: Any, x: torch.Tensor) -> Any:
    old = m.a.t().clone()
    m.a.copy_(m.b.t())
    m.b.copy_(old)
    return m.a + x, m.b + 0


@case(filled(2, 2), a=filled(2, 2))
def transposed_onto_itself(m: Any, x: torch.Tensor) -> Any:
    m.a.copy_(m.a.t().clone() + x)
    y = m.a + 0
    m.a.copy_(m.a.t().clone())
    return y


@case(X, a=filled(4))
def flipped_onto_itself(m: Any, x: torch.Tensor) -> Any:
    y = m.a + x
    m.a.copy_(m.a.flip(0))
    return y


@case(filled(1, start=5), window=filled(6))
def shifted_onto_itself(m: Any, x: torch.Tensor) -> Any:
    y = m.window.sum() + x
    m.window.copy_(torch.cat([m.window[1:], x]))
    return y, m.window[1:3] * 1


@case(filled(1, start=5), window=filled(6))
def shifted_by_slices(m: Any, x: torch.Tensor) -> Any:
    m.window[:-1] = m.window[1:].clone()
    m.window[-1:] = x
    return m.window * 2


@case(X, a=filled(4))
def returned_and_written(m: Any, x: torch.Tensor) -> Any:
    old = m.a.clone()
    m.a.add_(x)
    return m.a, old


@case(X, a=filled(4), b=filled(4, start=10))
def returned_old_and_written_from_another(m: Any, x: torch.Tensor) -> Any:
    old = m.a.clone()
    m.a.copy_(m.b)
    m.b.add_(x)
    return old, m.a, m.b


@case(X, a=filled(4))
def only_read_and_returned(m: Any, x: torch.Tensor) -> Any:
    return m.a, m.a.view(2, 2), x + m.a


@case(X, a=filled(4))
def view_of_the_old_value(m: Any, x: torch.Tensor) -> Any:
    old = m.a.clone().view(2, 2)
    m.a.mul_(2)
    return old, m.a.view(2, 2), old.t()


@case(X, a=filled(4))
def view_that_sees_the_write(m: Any, x: torch.Tensor) -> Any:
    alias = m.a.view(2, 2)
    m.a.add_(x)
    alias[0].mul_(2)
    return alias, m.a[1:]


@case(X, a=filled(4), b=filled(4), c=filled(2, 2))
def one_value_in_three_buffers(m: Any, x: torch.Tensor) -> Any:
    y = m.a + 10 * m.b + 100 * m.c.view(4)
    new = x * 2
    m.a.copy_(new)
    m.b.copy_(new)
    m.c.copy_(new.view(2, 2))
    return y, new


@case(X, a=filled(4), b=filled(4))
def input_in_two_buffers(m: Any, x: torch.Tensor) -> Any:
    y = m.a + 10 * m.b
    m.a.copy_(x)
    m.b.copy_(x)
    return y, x


@case(X, a=filled(4))
def input_as_state_and_as_result(m: Any, x: torch.Tensor) -> Any:
    y = m.a + 1
    m.a.copy_(x)
    return x, y, m.a


@case(X, a=filled(4), b=filled(4))
def written_input(m: Any, x: torch.Tensor) -> Any:
    y = m.a + x
    m.a.copy_(x)
    x.add_(1)
    m.b.copy_(x)
    return y, m.b + m.a


@case(X, a=filled(4))
def input_exchanged_with_state(m: Any, x: torch.Tensor) -> Any:
    old = m.a.clone()
    m.a.copy_(x)
    x.copy_(old)
    return old * 2


@case(X, filled(4, start=20), a=filled(4))
def two_inputs_and_state_in_a_circle(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    old = m.a.clone()
    m.a.copy_(x)
    x.copy_(y)
    y.copy_(old)
    return m.a + 0


@case(filled(1, 3), ROW, a=filled(4, 3), b=filled(4, 3, start=20))
def rows_of_another_buffer(m: Any, x: torch.Tensor, row: torch.Tensor) -> Any:
    m.a.index_put_((row,), m.b[1:2])
    m.b.index_put_((row,), x)
    return m.a + 0, m.b.sum(0)


@case(filled(1, 3), ROW, a=filled(4, 3), b=filled(4, 3, start=20))
def rows_of_each_other(m: Any, x: torch.Tensor, row: torch.Tensor) -> Any:
    old = m.a[row]
    m.a[row] = m.b[row]
    m.b[row] = old + x
    return m.a + 0, m.b + 0


@case(filled(1, 3), ROW, a=filled(4, 3), b=filled(4, 3, start=20))
def rows_with_what_they_were_before(m: Any, x: torch.Tensor, row: torch.Tensor) -> Any:
    before = m.a.clone()
    m.a.index_copy_(0, row, x)
    m.b.copy_(before)
    return m.a.sum(0), m.b + 0


@case(filled(2, 3), a=filled(4, 3), b=filled(4, 3, start=20))
def slices_of_each_other(m: Any, x: torch.Tensor) -> Any:
    old = m.a[:2].clone()
    m.a[:2] = m.b[2:]
    m.b[2:] = old
    m.b[:2].add_(x)
    return m.a + 0, m.b + 0


@case(filled(2, 3), a=filled(4, 3), index=torch.tensor([3, 0, 1, 2]))
def rows_by_a_buffer_of_indices(m: Any, x: torch.Tensor) -> Any:
    y = m.a[m.index]
    m.a.index_put_((m.index[:2],), x)
    m.index.copy_(m.index.flip(0))
    return y


@case(X, count=torch.tensor(3.0), steps=torch.tensor(2))
def no_dimensions(m: Any, x: torch.Tensor) -> Any:
    y = x + m.count * m.steps
    m.count.copy_(m.steps)
    m.steps.add_(1)
    return y


@case(X, count=torch.tensor(3.0), other=torch.tensor(5.0))
def swap_without_dimensions(m: Any, x: torch.Tensor) -> Any:
    old = m.count.clone()
    m.count.copy_(m.other)
    m.other.copy_(old)
    return x + m.count, m.other


@case(X, flags=filled(4, dtype=B), seen=filled(4, dtype=B))
def booleans(m: Any, x: torch.Tensor) -> Any:
    y = torch.where(m.flags, x, -x)
    m.seen.copy_(m.flags)
    m.flags.copy_(x > 4)
    return y, m.seen | m.flags


@case(filled(4, dtype=I), a=filled(4, dtype=torch.int32), b=filled(4, dtype=torch.int32, start=10))
def integers(m: Any, x: torch.Tensor) -> Any:
    old = m.a.clone()
    m.a.copy_(m.b)
    m.b.copy_(old + x)
    return m.a, m.b * 2


@case(torch.empty(0, 3), a=torch.empty(0, 3), b=filled(2), c=torch.empty(0, 3))
def empty_buffers(m: Any, x: torch.Tensor) -> Any:
    y = m.a + x
    m.a.copy_(m.c)
    m.c.copy_(x)
    m.b.add_(1)
    return y, m.b + x.sum()


@case(X, a=filled(4), n=filled(4, dtype=I, start=10))
def other_types(m: Any, x: torch.Tensor) -> Any:
    y = m.a + m.n
    old = m.a.clone()
    m.a.copy_(m.n)
    m.n.copy_(old + x)
    return y


@case(X, a=filled(4), loose=filled(4, start=10))
def not_in_the_state_dict(m: Any, x: torch.Tensor) -> Any:
    old = m.a.clone()
    m.a.copy_(m.loose)
    m.loose.copy_(old)
    return m.a + x, m.loose + 0


@case(last(1), a=last(1), b=last(20))
def channels_last(m: Any, x: torch.Tensor) -> Any:
    y = m.a + x
    old = m.a.clone()
    m.a.copy_(m.b)
    m.b.copy_(old)
    return y, m.b.clone()


@case(filled(3), a=filled(2, 3), b=filled(3))
def broadcast(m: Any, x: torch.Tensor) -> Any:
    y = m.a + m.b
    m.a.copy_(m.b)
    m.b.copy_(x)
    return y, m.a + 0


@case(filled(1), a=filled(2, 3))
def a_number_everywhere(m: Any, x: torch.Tensor) -> Any:
    y = m.a * 2
    m.a.copy_(x.expand(2, 3))
    return y


@case(X, a=filled(4), never=filled(4))
def written_and_never_read(m: Any, x: torch.Tensor) -> Any:
    m.never.copy_(m.a)
    m.a.copy_(x)
    return x * 2


@case(X, a=filled(4))
def filled_with_a_constant(m: Any, x: torch.Tensor) -> Any:
    y = m.a + x
    m.a.fill_(3)
    return y


@case(X, a=filled(2, 2), n=filled(4, dtype=I), flags=filled(4, dtype=B))
def a_number_copied(m: Any, x: torch.Tensor) -> Any:
    y = m.a.view(4) + m.n + m.flags + x
    m.a[:, 1:].copy_(7)
    m.n.copy_(2.5)
    m.flags.copy_(0)
    return y, m.n * 2, m.a[:, :1].add_(1)


@case(X, a=filled(4), b=filled(4, start=10), c=filled(2, 2, start=20))
def written_twice_from_each_other(m: Any, x: torch.Tensor) -> Any:
    y = m.a + 10 * m.b + 100 * m.c.view(4)
    m.a.copy_(x)
    m.a.copy_(m.b)
    m.c.copy_(m.b.view(2, 2))
    m.c.view(4).copy_(m.a)
    m.b.copy_(x)
    return y, m.c.view(4), m.c + m.c


@case(filled(2, 3), filled(3), a=filled(3, 2), b=filled(2, 3), c=filled(1, 2, 3))
def views_of_what_was_copied_in_another_order(m: Any, x: torch.Tensor, row: torch.Tensor) -> Any:
    y = m.a.view(6) + m.b.view(6) + m.c.view(6)
    m.a.copy_(x.t())
    m.b.copy_(row)
    m.c.view(2, 3).t().copy_(m.a)
    inner = (x + 1).copy_(m.a.t().flip(0))
    inner.t().copy_(m.a)
    return y, m.a.view(6), m.b.view(6) + 1, m.c.view(6) * 2, inner.view(6)


@case(X, a=filled(4), b=filled(4, start=10))
def zeroed_after_it_was_copied(m: Any, x: torch.Tensor) -> Any:
    y = m.b + x
    m.b.copy_(m.a)
    m.a.zero_()
    m.a.add_(x)
    return y


@case(X, a=filled(4), b=filled(4, start=10))
def written_back_as_it_was(m: Any, x: torch.Tensor) -> Any:
    old = m.a.clone()
    m.a.add_(x)
    y = m.a * 2
    m.a.copy_(old)
    m.b.add_(m.a)
    return y, m.b + 0


@case(X, a=filled(4), b=filled(4, start=10))
def branches_read_what_is_written_later(m: Any, x: torch.Tensor) -> Any:
    y = torch.cond(x.sum() > 20, lambda a, b, x: a + x, lambda a, b, x: b - x, (m.a, m.b, x))
    m.a.copy_(m.b)
    m.b.copy_(x)
    return y


@case(X, a=filled(4), b=filled(4, start=10))
def branches_make_what_is_written(m: Any, x: torch.Tensor) -> Any:
    new, other = torch.cond(x.sum() > 20, lambda a, b: (b + 0, a + 1), lambda a, b: (a * 2, b.clone()), (m.a, m.b))
    m.a.copy_(other)
    m.b.copy_(new)
    return m.a + x


# -- how they are run -------------------------------------------------------------------------------------------------

WAYS = (Way(), Way(rewrites="none"), Way("xnnpack"), Way("own"))
DOORS = (
    Way("xnnpack", "none"),
    Way("reference"),
    Way("some", seed=1),
    Way("some own", "none", seed=2),
    Way(edge="executorch"),
    Way("xnnpack", "none", edge="to_backend"),
)
WRONG_ONCE = list(CASES)[:11]


@functools.cache
def made(name: str) -> tuple[dict[str, ExportedProgram], Sequence[tuple[str, Call]], list[list[torch.Tensor]]]:
    """Return the program of a case, its calls, and what they return in eager PyTorch."""
    model, inputs = CASES[name]()
    calls = [("forward", inputs(number)) for number in range(CALLS)]
    expected = eager({"forward": model}, calls)
    assert any(differences([each], [expected[0]]) for each in expected[1:]), "the calls show nothing"
    return exported({"forward": model}, dict(calls[:1])), calls, expected


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_each_call_is_eagers(name: str, way: Way) -> None:
    programs, calls, expected = made(name)
    low = lowered(programs, way)
    file = low.emit().buffer
    assert differences(run_file(file, low.programs, calls), expected) == []


@pytest.mark.parametrize("way", DOORS, ids=str)
@pytest.mark.parametrize("name", WRONG_ONCE)
def test_through_other_doors(name: str, way: Way) -> None:
    programs, calls, expected = made(name)
    assert differences(run(programs, calls, way), expected) == []


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_parameter_that_is_written(way: Way, requires_grad: bool) -> None:
    """It is state, or an error that names the line."""

    def function(m: Any, x: torch.Tensor) -> Any:
        y = m.weight * x
        with torch.no_grad():
            m.weight.copy_(m.bias)
            m.bias.add_(1)
        return y

    weight = nn.Parameter(filled(4), requires_grad=requires_grad)
    model = Of(function, weight=weight, bias=filled(4, start=10))
    calls = [("forward", [X + number]) for number in range(CALLS)]
    programs = exported({"forward": model}, dict(calls[:1]))
    try:
        file = lowered(programs, way).emit().buffer
    except exir_lowering.InputError as error:
        assert "weight" in str(error) and "test_state.py" in str(error)
        return
    assert differences(run_file(file, programs, calls), eager({"forward": model}, calls)) == []


@pytest.mark.parametrize("way", [Way(), Way(edge="executorch")], ids=str)
def test_a_parameter_that_is_written_twice_and_not_read(way: Way) -> None:
    """ExecuTorch's conversion takes it for unused."""

    def write(m: Any, x: torch.Tensor) -> Any:
        with torch.no_grad():
            m.weight.copy_(m.bias)
            m.bias.add_(x)
            m.weight.copy_(m.bias)
        return x + 1

    weight, bias = nn.Parameter(filled(4), requires_grad=False), filled(4, start=10)
    models = {
        "write": Of(write, weight=weight, bias=bias),
        "read": Of(lambda m, x: m.weight * x, weight=weight, bias=bias),
    }
    models["read"].weight = models["write"].weight
    calls = [(name, [X + number]) for number in range(CALLS) for name in ("write", "read")]
    programs = exported(models, dict(calls[:2]))
    file = lowered(programs, way).emit().buffer
    assert differences(run_file(file, programs, calls), eager(models, calls)) == []
    with pytest.raises(exir_lowering.InputError, match="'weight', which is not among its inputs"):
        exir_lowering.lower(to_edge(programs["write"]).exported_program())


@pytest.mark.parametrize("alias", [lambda a: a, lambda a: a.view(2, 2), lambda a: a[1:]], ids=["same", "view", "part"])
def test_buffers_that_share_their_storage(alias: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """They are one state, or an error that says so: torch cannot always convert what writes into one of them."""
    state = filled(4)
    model = Of(lambda m, x: (x + m.a, m.b * 2, m.a.copy_(x), m.b + 1)[::2], a=state, b=alias(state))
    calls = [("forward", [X + number]) for number in range(CALLS)]
    programs = exported({"forward": model}, dict(calls[:1]))
    try:
        file = lowered(programs, Way()).emit().buffer
    except exir_lowering.InputError:
        return
    assert differences(run_file(file, programs, calls), eager({"forward": model}, calls)) == []
