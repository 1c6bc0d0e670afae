"""Control flow in ExecuTorch's runtime: what branches and loops return is right, however they follow each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from executorch.exir import ExecutorchBackendConfig
from executorch.exir.passes import MemoryPlanningPass
from executorch.runtime import Runtime
from functorch.experimental.control_flow import map as torch_map
from random_flow import run_random
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim, export
from torch.utils import _pytree as pytree

import exir_lowering
from exir_lowering import InputError, LoweringOptions

X = torch.linspace(-1, 1, 16).reshape(4, 4) + 0.25  # the sum, which conditions look at, is not near 0
INPUTS = (X, -X, X.abs() * 3, X * 0.1, X)
Models = dict[str, Callable[..., Any]]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Forget which sizes torch has seen: it takes a function that was exported with other ones for another."""
    torch.compiler.reset()


class Model(torch.nn.Module):
    """A function, with a layer and state that it may use."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(4))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def check(model: Model, program: Any, calls: Sequence[tuple[torch.Tensor, ...]], config: Any = None, **how: Any) -> Any:
    """Compare calls of a file with the model, in our way of loading it and in ExecuTorch's own."""
    partitioner = how.pop("partitioner", None)
    lowered = exir_lowering.lower(program, partitioner, options=LoweringOptions(**how))
    artifact = lowered.emit(config)
    file = artifact.buffer
    loaded, program = exir_lowering.load(file), Runtime.get().load_program(file)  # it does not copy the file
    stock = program.load_method("forward")
    for call in calls:
        with torch.no_grad():
            expected = pytree.tree_leaves(model(*call))
        for results in (loaded.run("forward", *call), stock.execute(list(call))):
            for got, value in zip(results, expected, strict=True):
                torch.testing.assert_close(got, value, atol=1e-5, rtol=1e-5)
    return artifact


def positive(x: torch.Tensor, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any) -> Any:
    return torch.cond(x.sum() > 0, yes, no, operands or (x,))


def two(m: Model, x: torch.Tensor) -> Any:
    a = positive(x, lambda t: t + 1, lambda t: t - 1)
    return a + positive(x, lambda t: t * 2, lambda t: t * 3)


def both_returned(m: Model, x: torch.Tensor) -> Any:
    return positive(x, lambda t: t + 1, lambda t: t - 1), positive(x, lambda t: t * 2, lambda t: t * 3)


def one_reads_the_other(m: Model, x: torch.Tensor) -> Any:
    a = positive(x, lambda t: t @ t + 1, lambda t: t - 1)
    return a, positive(a, lambda t: t @ t, lambda t: t @ (t + 1))


def several_results(m: Model, x: torch.Tensor) -> Any:
    a, c = positive(x, lambda t: (t + 1, t * 5), lambda t: (t - 1, t * 6))
    b, d = positive(c, lambda t, u: (t * 2, t + u), lambda t, u: (t * 3, t - u), x, a)
    return a + b, c, d


def product_behind(m: Model, x: torch.Tensor) -> Any:
    a = positive(x, lambda t: t + 1, lambda t: t - 1) * 2
    return a + positive(x, lambda t: t * 2, lambda t: t * 3)


def copies(m: Model, x: torch.Tensor) -> Any:
    def twice(t: torch.Tensor) -> Any:
        u = t + 1
        return u, u.clone()

    y = x * 2
    a, b = positive(x, twice, lambda t: (t.clone(), t.clone()), y)
    c = positive(x, lambda t: m.linear.weight.clone(), lambda t: t * 1)
    return a, b, c, (x + 5) ** 2 + y


def in_branches(m: Model, x: torch.Tensor) -> Any:
    def inner(t: torch.Tensor) -> Any:
        return torch.cond(t.max() > 1, lambda u: u * 2, lambda u: m.linear(u), (t,))

    a = positive(x, lambda t: inner(t) + inner(t + 1), lambda t: inner(t - 1))
    return a, positive(x, inner, lambda t: t * 3)


def in_loops(m: Model, x: torch.Tensor) -> Any:
    def body(carry: torch.Tensor, row: torch.Tensor) -> Any:
        a = positive(row, lambda t: t + 1, lambda t: t - 1)
        b = positive(carry, lambda t: t * 0.2, lambda t: t * 0.3)
        return a + b, a * b

    return torch_map(lambda row: body(row, row * 2)[1], x), *scan(body, torch.ones(4), x)


def loops_in_branches(m: Model, x: torch.Tensor) -> Any:
    def sums(t: torch.Tensor) -> Any:
        return scan(lambda carry, row: (carry + row, carry * row), t[0] * 1, t)

    a, b = positive(x, sums, lambda t: (t[0] - 1, t * 2))
    c, d = positive(x, lambda t: (t[0] - 1, torch_map(lambda row: row * 7, t)), sums)
    return a, b, c, d


def views(m: Model, x: torch.Tensor) -> Any:
    a = positive(x, lambda t: (t + 1).view(2, 8), lambda t: t.view(2, 8).clone())
    b = positive(x, lambda t: t * 2, lambda t: t * 3)
    return a.view(4, 4) + b, a, b.view(-1)


def loops_between(m: Model, x: torch.Tensor) -> Any:
    a = positive(x, lambda t: t + 1, lambda t: t - 1)
    rows = torch_map(lambda row, t: row @ t, x, a)
    _, c = while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, v @ a), (torch.tensor(0), x))
    return a, rows, c, a + rows


def state(m: Model, x: torch.Tensor) -> Any:
    old = positive(m.state, lambda t: t + 1, lambda t: t - 1)
    m.state.add_(positive(x, lambda t: t.sum(0), lambda t: t.sum(1)))
    return old, positive(m.state, lambda t, s: t + s, lambda t, s: t - s, x, m.state)


_CONDITIONS = (two, both_returned, one_reads_the_other, several_results, product_behind, copies, in_branches, in_loops)
CONDITIONS: Models = {
    function.__name__: function for function in (*_CONDITIONS, loops_in_branches, views, loops_between, state)
}


@pytest.mark.parametrize("partitioner", [None, "xnnpack"])
@pytest.mark.parametrize("name", CONDITIONS)
def test_results_of_conditions_live_as_long_as_they_are_read(name: str, partitioner: str | None) -> None:
    model = Model(CONDITIONS[name])
    check(model, export(model, (X,)), [(x,) for x in INPUTS], partitioner=partitioner)


@pytest.mark.parametrize("name", ["several_results", "in_branches", "in_loops"])
def test_with_another_planner(name: str) -> None:
    model = Model(CONDITIONS[name])
    check(model, export(model, (X,)), [(x,) for x in INPUTS], memory_planner="naive")


def test_with_results_that_the_caller_places() -> None:
    model = Model(both_returned)
    config = ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(alloc_graph_output=False))
    check(model, export(model, (X,)), [(x,) for x in INPUTS], config)


class Sizes:
    """Conditions on a size between 2 and 10."""

    compared = staticmethod(lambda n: n > 5)
    computed = staticmethod(lambda n: n * 2 % 3 == 1)
    both = staticmethod(lambda n: (n > 5) & (n < 9))
    either = staticmethod(lambda n: (n > 7) | (n < 3))
    different = staticmethod(lambda n: n != 3)
    mixed = staticmethod(lambda n: ((n > 2) & (n != 4)) | (n == 10))


@pytest.mark.parametrize("name", [name for name in vars(Sizes) if not name.startswith("_")])
def test_conditions_on_sizes(name: str) -> None:
    def function(m: Model, x: torch.Tensor) -> Any:
        def nested(t: torch.Tensor) -> Any:
            return torch.cond(t.shape[0] > 6, lambda u: u * 2, lambda u: u * t.shape[0], (t,))

        condition = getattr(Sizes, name)(x.shape[0])
        a = torch.cond(condition, nested, lambda t: t - 1, (x,))
        return a, torch.cond(condition, lambda t: t + 1, nested, (x,))

    model, rows = Model(function), {0: Dim("n", min=2, max=10)}
    program = export(model, (X,), dynamic_shapes=((rows,),))
    check(model, program, [(torch.full((size, 4), 0.5),) for size in (4, 2, 3, 5, 6, 7, 8, 9, 10)])


def made_in_branches(m: Model, x: torch.Tensor) -> Any:
    def filled(t: torch.Tensor) -> torch.Tensor:
        t = t.clone()
        t[0] = 5.0
        t[:, 1] += torch.tensor(2.0)
        return t

    a = positive(x, lambda t: t * torch.tensor(2.0) + torch.zeros(4), lambda t: t[torch.tensor([1, 0, 3, 2])])
    b = positive(x, filled, lambda t: torch.full((4, 4), 3.0) + torch.arange(4))
    return a, b, positive(x, lambda t: torch.tensor([1.0, 2.0]), lambda t: torch.tensor([3.0, 4.0]))


def made_in_nested_graphs(m: Model, x: torch.Tensor) -> Any:
    def inner(t: torch.Tensor) -> torch.Tensor:
        return torch.cond(t.max() > 0.5, lambda u: u * torch.tensor(2.0), lambda u: u + torch.tensor([7.0]), (t,))

    rows = torch_map(lambda row: inner(row) + torch.tensor(3.0), x)
    return positive(x, inner, lambda t: t - torch.tensor(3)), rows


def made_in_loops(m: Model, x: torch.Tensor) -> Any:
    weights = scan(lambda c, row: (c + row * torch.tensor(0.5), c * torch.tensor([1.0, 2, 3, 4])), torch.zeros(4), x)
    return *weights, while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * torch.tensor(2.0)), (torch.tensor(0), x))[
        1
    ]


def loops(m: Model, x: torch.Tensor) -> Any:
    start = torch.tensor(0)
    a = while_loop(lambda v: v.sum() < 9, lambda v: (v.abs() + m.linear.weight.abs(),), (x,))[0]
    b, c = while_loop(lambda i, a, b: i < 5, lambda i, a, b: (i + 1, b.clone(), a + b), (start, x, x * 2))[1:]
    never = while_loop(lambda i, v: i < 0, lambda i, v: (i + 1, v * 2), (start, x))[1]
    again = while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, v @ m.linear.weight), (start, b))[1]
    return a, b, c, never.view(-1) + 1, again


def nested_loops(m: Model, x: torch.Tensor) -> Any:
    def inner(v: torch.Tensor) -> torch.Tensor:
        return while_loop(lambda j, u: j < 2, lambda j, u: (j + 1, m.linear(u) + v), (torch.tensor(0), v * 1))[1]

    def body(i: torch.Tensor, v: torch.Tensor) -> Any:
        return i + 1, torch.cond(v.sum() > 1, lambda t: inner(t) - 1, lambda t: t * 2, (v,))

    result = while_loop(lambda i, v: i < 3, body, (torch.tensor(0), x))[1]
    return result, torch_map(inner, x), positive(x, lambda t: inner(t), lambda t: t * 2)


def maps(m: Model, x: torch.Tensor) -> Any:
    a = torch_map(lambda ab, z: (ab[0] * ab[1] + z, ab[0] - z), (x, x + 1), x[0] * 1)
    return *a, torch_map(lambda ab: ab[0] * ab[1], (x, x + 1)), *torch_map(lambda row: (row * 2, row.sum()), x)


MADE_AND_LOOPS: Models = {
    function.__name__: function
    for function in (made_in_branches, made_in_nested_graphs, made_in_loops, loops, nested_loops, maps)
}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("partitioner", [None, "xnnpack"])
@pytest.mark.parametrize("name", MADE_AND_LOOPS)
def test_tensors_made_in_branches_and_loops(name: str, partitioner: str | None, fast: bool) -> None:
    model = Model(MADE_AND_LOOPS[name])
    check(model, export(model, (X,)), [(x,) for x in INPUTS], partitioner=partitioner, fast=fast)


def test_a_loop_carries_what_has_a_dynamic_size() -> None:
    def function(m: Model, x: torch.Tensor) -> Any:
        return while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * 2 + 1), (torch.tensor(0), x))[1]

    model, rows = Model(function), {0: Dim("n", min=2, max=10)}
    program = export(model, (X,), dynamic_shapes=((rows,),))
    check(model, program, [(torch.rand(size, 4),) for size in (4, 10, 2)])


def test_constants_made_in_branches_are_told_apart_by_the_cache(tmp_path: Any) -> None:
    for factor in (2.0, 3.0):
        model = Model(lambda m, x, by=factor: positive(x, lambda t: t * torch.tensor(by), lambda t: t - 1))
        check(model, export(model, (X,)), [(X,), (-X,)], cache=str(tmp_path), partitioner="xnnpack")


def dynamic_rows(m: Model, x: torch.Tensor) -> Any:
    return torch_map(lambda row: row * 2, x.transpose(0, 1) * 1)


def dynamic_carry(m: Model, x: torch.Tensor) -> Any:
    return scan(lambda carry, row: (carry + row.sum(), (carry * 2).sum()), x[:, 0] * 1, x)


def channels_last(m: Model, x: torch.Tensor) -> Any:
    images = x.reshape(1, 4, 2, 2).to(memory_format=torch.channels_last)
    return torch_map(lambda image: image * 2, images)


def carried_number(m: Model, x: torch.Tensor) -> Any:
    return while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * 2), (0, x))[1]


def returned_number(m: Model, x: torch.Tensor) -> Any:
    a, n = positive(x, lambda t: (t + 1, 3), lambda t: (t - 1, 4))
    return a * n


@pytest.mark.parametrize(
    ("function", "reason", "advice"),
    [
        (dynamic_rows, "stacks rows of the dynamic shape", "fix these sizes, or use while_loop"),
        (dynamic_carry, "carries the dynamic shape", "fix these sizes, or use while_loop"),
        (channels_last, "in the order [0, 2, 3, 1]", "loop over contiguous() tensors"),
        (carried_number, "carries the number 0", "carry torch.tensor(...) instead of numbers"),
        (returned_number, "returns the number", "return tensors"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_the_runtime_cannot_do_is_refused_before_a_backend_is_called(
    function: Callable[..., Any], reason: str, advice: str
) -> None:
    rows = {0: Dim("n", min=2, max=10)} if "dynamic" in function.__name__ else None
    program = export(Model(function), (X,), dynamic_shapes=((rows,),))
    for refuses in (exir_lowering.plan, exir_lowering.lower):
        with pytest.raises(InputError, match=r"Method 'forward': \w+ \(\w+\), at .*") as error:
            refuses(program, "xnnpack")
        assert reason in str(error.value)
        assert advice in str(error.value)


def rows_with_channels_last(m: Model, x: torch.Tensor) -> Any:
    images = x.reshape(2, 1, 2, 2, 2)

    def body(image: torch.Tensor) -> Any:
        return torch.nn.functional.conv2d(image, weight, padding=1) + image, image * 2

    weight = torch.linspace(-1, 1, 36).reshape(2, 2, 3, 3).to(memory_format=torch.channels_last)
    carry = scan(lambda c, image: (c + image, body(image)[0]), images[0] * 1, images)
    return *torch_map(body, images), torch_map(lambda image: body(image)[0], images) + images, *carry


@pytest.mark.parametrize("partitioner", [None, "xnnpack"])
def test_rows_are_stacked_in_contiguous_order(partitioner: str | None) -> None:
    model = Model(rows_with_channels_last)
    check(model, export(model, (X,)), [(x,) for x in INPUTS], partitioner=partitioner)


@pytest.mark.parametrize("seed", [1, 0, *range(2, 12)])
def test_random_models(seed: int) -> None:
    """`python tests/support/hunt.py flow` looks at more of them."""
    assert run_random(seed) == ""


@pytest.mark.parametrize("seed", [0, 2, 12, 13, 18])
def test_random_models_of_many_operators(seed: int) -> None:
    assert run_random(seed, many=True) == ""


@pytest.mark.parametrize("fast", [True, False])
def test_the_number_of_rows_stays_dynamic(fast: bool) -> None:
    def mapped(m: Model, x: torch.Tensor) -> Any:
        rows = torch_map(lambda row, other: row.tanh() + other, x, x.sum(0))
        return while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, v * 0.5), (torch.zeros((), dtype=torch.int64), rows))

    model = Model(mapped)
    program = export(model, (torch.randn(3, 4),), dynamic_shapes=(({0: Dim("n", min=2, max=9)},),))
    check(model, program, [(torch.randn(n, 4),) for n in (2, 9, 3)], fast=fast)
