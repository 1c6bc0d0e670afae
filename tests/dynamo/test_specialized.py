"""Symbolic sizes for backends that have to know them: a compilation for each set of sizes."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import forked
import pytest
import torch
from compile_support import assert_near, clean, compiled, delegated, reasons
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import export
from torch.fx import _lazy_graph_module
from torch.fx.experimental.symbolic_shapes import free_symbols

from exir_lowering import lower
from exir_lowering.backends.reference import ReferenceBackend
from exir_lowering.dynamo import FallbackWarning, backend, reports
from exir_lowering.dynamo.graph import MOST

__all__ = ["clean"]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = torch.relu(self.convolution(x)).mean((2, 3))
        return torch.softmax(self.linear(pooled), -1) * x.shape[0]


def inputs(count: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    sizes = [torch.randint(3, 9, (3,), generator=random).tolist() for _ in range(count - 1)]
    sizes.insert(0, [3, 4, 5])  # with equal sizes, Dynamo would take them for one
    return [torch.randn(n, 2, h, w, generator=random) for n, h, w in sizes]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_xnnpack_runs_graphs_with_symbolic_sizes(grad: bool) -> None:
    model = Model().eval()
    counter = CompileCounterWithBackend(
        lambda module, given: backend(
            module, given, options={"partitioners": "xnnpack", "partitions": "all", "fallback": None}
        )
    )
    called = torch.compile(model, backend=counter, dynamic=True)
    with torch.set_grad_enabled(grad):
        for x in inputs(4):
            expected = model(x)
            found = called(x)
            assert_near(found, expected)
            if grad:
                weights = list(model.parameters())
                assert_near(torch.autograd.grad(found.sum(), weights), torch.autograd.grad(expected.sum(), weights))
    assert counter.frame_count == 1, "Dynamo compiles once"
    assert set(delegated()) == {"XnnpackBackend"}
    assert reasons() == []


def test_a_stride_of_a_dimension_of_size_one_says_nothing() -> None:
    """It may be any number in a tensor that is given, and has a symbol of a size in the graph."""

    def function(a: torch.Tensor) -> torch.Tensor:
        return (torch.sigmoid(a) * a.numel()).unsqueeze(0)

    called = torch.compile(function, backend="exir_lowering", dynamic=True, options={"partitioners": "xnnpack"})
    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(4, 1, 6)
    found, expected = (torch.autograd.grad((one(x).permute(1, 0, 2) * w).sum(), x)[0] for one in (called, function))
    assert_near(found, expected)


class Static(ReferenceBackend):
    """A backend that refuses symbolic sizes, and one number of rows."""

    def preprocess(self, program: Any, compile_specs: Any, context: Any = None) -> Any:
        values = [node.meta["val"] for node in program.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
        if any(free_symbols(value) for value in values):
            raise ValueError("symbolic sizes")
        if any(value.shape[:1] == (5,) for value in values):
            raise ValueError("five rows")
        self.lowered = getattr(self, "lowered", 0) + 1
        return super().preprocess(program, compile_specs, context)


def function(x: torch.Tensor) -> torch.Tensor:
    return (x * x.shape[0]).sin() @ x.T


def test_a_backend_that_refuses_symbolic_sizes_gets_known_ones() -> None:
    static = Static()
    called = compiled(function, partitioners="reference", backends={"reference": static}, dynamic=True)
    for rows in (2, 3, 2, 4, 3):
        x = torch.randn(rows, 4)
        assert_near(called(x), function(x))
    assert static.lowered == 3
    assert [report.backend for report in reports()] == ["exir_lowering"]


def test_sizes_that_fail_later_are_run_by_pytorch() -> None:
    called = compiled(function, partitioners="reference", backends={"reference": Static()}, dynamic=True)
    assert_near(called(torch.ones(2, 4)), function(torch.ones(2, 4)))
    with pytest.warns(FallbackWarning, match="five rows"):
        assert_near(called(torch.ones(5, 4)), function(torch.ones(5, 4)))
    assert_near(called(torch.ones(3, 4)), function(torch.ones(3, 4)))
    (report,) = reports()
    assert [fallback.instead for fallback in report.fallbacks] == ["eager"]


def test_sizes_that_fail_at_first_are_a_failure_of_the_backend() -> None:
    options = {"partitioners": "reference", "backends": {"reference": Static()}}
    called = torch.compile(function, backend=backend, options=options, dynamic=True)
    with pytest.warns(FallbackWarning, match="five rows"):
        assert_near(called(torch.ones(5, 4)), function(torch.ones(5, 4)))
    assert reports()[0].backend == "eager"


def test_the_sizes_that_were_not_used_for_longest_are_compiled_again() -> None:
    static = Static()
    called = compiled(function, partitioners="reference", backends={"reference": static}, dynamic=True)
    sizes = [rows for rows in range(2, MOST + 4) if rows != 5]
    for rows in sizes:
        called(torch.ones(rows, 4))
    before = static.lowered
    called(torch.ones(sizes[-1], 4))
    assert static.lowered == before
    called(torch.ones(sizes[0], 4))
    assert static.lowered == before + 1


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("partitioner", ["xnnpack", "reference"])
def test_threads_with_sizes_of_their_own(partitioner: str, warm: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
    called = torch.compile(
        model, backend="exir_lowering", options={"partitioners": partitioner, "partitions": "all"}, dynamic=True
    )
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        start.wait()
        with torch.no_grad():
            for count in torch.randint(2, 10, (20,), generator=random).tolist():
                x = torch.randn(count, 4, generator=random)
                assert_near(called(x), model(x))

    with torch.no_grad():
        for count in range(2, 10) if warm else ():
            called(torch.ones(count, 4))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert reasons() == []


def test_a_graph_is_compiled_while_another_thread_lowers() -> None:
    programs = [export(torch.nn.Linear(4, n).eval(), (torch.ones(n, 4),)) for n in range(2, 6)]
    done = threading.Event()

    def keep_lowering() -> int:
        for count in itertools.count():
            if done.is_set():
                return count
            lower(programs[count % len(programs)], "xnnpack").emit()
        raise AssertionError

    with ThreadPoolExecutor(1) as pool:
        lowering = pool.submit(keep_lowering)
        try:
            for size in range(3, 9):
                model = torch.nn.Sequential(torch.nn.Linear(4, size), torch.nn.GELU()).eval()
                called = torch.compile(
                    model, backend="exir_lowering", options={"partitioners": "xnnpack", "partitions": "all"}
                )
                with torch.no_grad():
                    for count in (2, 5):
                        assert_near(called(torch.ones(count, 4)), model(torch.ones(count, 4)))
        finally:
            done.set()
    assert lowering.result() > 0
    assert reasons() == []
    # What Dynamo had switched while the other thread began to lower is not switched again when that has ended.
    assert not _lazy_graph_module._use_lazy_graph_module_flag


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("partitioner", [None, "xnnpack", "reference"])
def test_concatenations_of_nothing(partitioner: Any, dynamic: Any) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x]) * 2

    called = torch.compile(
        doubled, backend="exir_lowering", options={"partitioners": partitioner, "partitions": "all"}, dynamic=dynamic
    )
    for count in (0, 3, 5):
        for shape in ((count, 4), (4, count)):
            assert_near(called(torch.ones(shape)), doubled(torch.ones(shape)))


def test_sizes_are_constants_in_what_is_compiled_for_them() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        rows, columns = x.shape
        first = (x.view(rows * columns) + torch.full((rows * columns,), 2.0)) * 2
        return first, y.view(y.shape[0], -1) * torch.full((y.shape[0], 1), 3.0) * rows

    called = compiled(function, partitioners="reference", backends={"reference": Static()}, dynamic=True)
    for rows, columns in ((3, 4), (6, 2), (7, 8)):
        given = torch.randn(rows, columns), torch.randn(columns, rows, 2)
        assert_near(called(*given), function(*given))
    assert reasons() == [] and set(delegated()) == {"reference"}


CROSSING = """
import os, threading, torch
from torch.export import export
from exir_lowering import Backend, PreprocessResult, lower
from exir_lowering.dynamo import backend
from exir_lowering.partitioners import SupportPartitioner, everything

lowering, compiling, done = threading.Event(), threading.Event(), []

class Compiles(Backend):
    backend_id = "compiles"
    one_by_one = True
    parallel = "thread"
    def preprocess(self, program, compile_specs):
        lowering.set()
        compiling.wait(30)
        torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(3))
        return PreprocessResult(b"x")

def lower_one():
    program = export(torch.nn.Linear(2, 2), (torch.ones(2, 2),))
    lower(program, SupportPartitioner({"compiles": everything()}), backends={"compiles": Compiles()})
    done.append("lowered")

def given(module, inputs):
    compiling.set()
    return backend(module, inputs)

def compile_one():
    lowering.wait(30)
    torch.compile(lambda x: x.sin() + 1, backend=given)(torch.ones(3))
    done.append("compiled")

threads = [threading.Thread(target=each, daemon=True) for each in (lower_one, compile_one)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
print(*sorted(done), flush=True)
os._exit(0)
"""


def test_a_parallel_backend_that_compiles_is_lowered_for_while_another_thread_compiles() -> None:
    """It needs Dynamo's lock, and the other one, that has it, needs the lock of conversions."""
    assert forked.run(CROSSING, timeout=200).stdout == "compiled lowered\n"
