"""The backend that prints graphs and plans, and explain, which returns them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import graph_break_reasons

from exir_lowering import Backend, Delegate, InputError, UnknownPluginError
from exir_lowering.dynamo import Explanation, explain, reports
from exir_lowering.dynamo.debugging import to_table
from exir_lowering.partitioners import SupportPartitioner, ops


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Untouched(Backend):
    """Must not be called."""

    backend_id = "Untouched"

    def preprocess(self, program: Any, compile_specs: Any) -> Any:
        raise AssertionError("a backend was called")


class UntouchedDelegate(Delegate):
    """Is available, and must not be called."""

    delegate_id = "Untouched"

    def compile(self, processed: Any, compile_specs: Any, context: Any) -> Any:
        raise AssertionError("a delegate was called")

    def execute(self, handle: Any, inputs: Any) -> Any:
        raise AssertionError("a delegate was called")


OPTIONS = {
    "partitioners": SupportPartitioner({"Untouched": ops("aten.cos.default", "aten.mul.Tensor", "aten.relu.default")}),
    "backends": {"Untouched": Untouched},
    "delegates": {"Untouched": UntouchedDelegate},
}


def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a = torch.cos(x)
    b = torch.sin(y)
    return a + b


def toy_example(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x = a / (torch.abs(a) + 1)
    if b.sum() < 0:
        b = b * -1
    return x * b


def printed(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[str, Any]:
    """Return what the debugging backend prints for a call, and the result."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        result = torch.compile(function, backend="exir_lowering_debug", options={**OPTIONS, **options})(*inputs)
    return out.getvalue(), result


def rows(text: str) -> list[list[str]]:
    """Return the operators of the printed graphs: opcode and name."""
    opcodes = ("placeholder", "call_function", "call_method", "output", "get_attr")
    return [line.split()[:2] for line in text.splitlines() if line.startswith(opcodes)]


# The debugging backend


def test_a_graph_is_printed_with_its_plan_and_run_by_pytorch() -> None:
    x, y = torch.randn(10), torch.randn(10)
    text, result = printed(fn, x, y)
    assert torch.equal(result, fn(x, y))
    assert text.startswith("exir_lowering_debug called with FX graph:\nopcode ")
    assert [opcode for opcode, _ in rows(text)] == ["placeholder"] * 2 + ["call_function"] * 3 + ["output"]
    assert "exir_lowering would run it." in text and "1 x Untouched" in text
    assert "aten.sin.default" in text and __file__ in text and "b = torch.sin(y)" in text
    assert reports() == ()


def test_a_module_is_printed() -> None:
    class MockModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.relu(torch.cos(x))

    module, x = MockModule(), torch.randn(10)
    text, result = printed(module, x)
    assert torch.equal(result, module(x))
    assert len(rows(text)) == 4 and "ops 100.0%" in text


def test_each_graph_of_a_function_with_a_graph_break_is_printed() -> None:
    torch.manual_seed(0)
    out = io.StringIO()
    compiled = torch.compile(toy_example, backend="exir_lowering_debug", options=OPTIONS)
    with contextlib.redirect_stdout(out):
        for _ in range(100):
            a, b = torch.randn(10), torch.randn(10)
            torch.testing.assert_close(compiled(a, b), toy_example(a, b))
    text = out.getvalue()
    assert text.count("exir_lowering_debug called with FX graph:") == 3
    assert len(rows(text)) == 8 + 5 + 4


def test_the_table_is_that_of_print_tabular(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def collect(module: torch.fx.GraphModule, inputs: Any) -> Any:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            module.graph.print_tabular()
        found.append((out.getvalue(), to_table(module.graph)))
        return module.forward

    torch.compile(toy_example, backend=collect)(torch.randn(10), torch.ones(10))
    torch.compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), backend=collect)(torch.randn(2, 3))
    assert len(found) == 3
    for expected, got in found:
        assert got == expected.rstrip("\n")
    monkeypatch.setitem(sys.modules, "tabulate", None)
    assert "1 x Untouched" in printed(fn, torch.randn(3), torch.randn(3))[0]


def test_backward_graphs_are_printed_before_they_are_needed() -> None:
    text, _ = printed(fn, torch.randn(10, requires_grad=True), torch.randn(10))
    assert "forward graph:" in text and "\nbackward: " in text and " in 1 x Untouched, " in text


def test_options_are_checked_as_for_the_other_backend() -> None:
    with pytest.raises(Exception, match=r"unknown option 'partitioner'.*Did you mean 'partitioners'"):
        printed(fn, torch.randn(3), torch.randn(3), partitioner="reference")
    with pytest.warns(UserWarning, match="'exir_lowering_debug' has no modes"):
        torch.compile(fn, backend="exir_lowering_debug", mode="max-autotune")(torch.randn(3), torch.randn(3))


# explain


def test_explain_returns_graphs_plans_and_graph_breaks() -> None:
    explained = explain(toy_example, torch.randn(10), -torch.ones(10), options=OPTIONS)
    first, second = explained.graphs
    assert [graph.backend for graph in explained.graphs] == ["exir_lowering"] * 2
    assert len(rows(first.graph)) == 8 and len(rows(second.graph)) == 5
    (graph_break,) = explained.graph_breaks
    assert first.graph_break == graph_break and second.graph_break is None
    assert graph_break.source.endswith("in toy_example: if b.sum() < 0:") and __file__ in graph_break.source
    (planned,) = second.plans
    assert (planned.attempt, planned.kind) == ("exir_lowering", "inference")
    (method,) = planned.plan.methods
    assert method.memory is None  # PyTorch allocates what it runs
    assert [partition.operators for partition in method.partitions] == [{"aten.mul.Tensor": 2}]
    sources = {node.operator: node.source for node in first.plans[0].plan.methods[0].host}
    assert "x = a / (torch.abs(a) + 1)" in sources["aten.abs.default"]
    assert "graphs: 2, graph breaks: 1" in str(explained) and "if b.sum() < 0:" in str(explained)


def test_explained_are_values() -> None:
    explained = explain(toy_example, torch.randn(10, requires_grad=True), torch.ones(10), options=OPTIONS)
    copied: Explanation = pickle.loads(pickle.dumps(explained))
    assert copied == explained and str(copied) == str(explained)
    with pytest.raises(dataclasses.FrozenInstanceError):
        explained.graphs = ()  # type: ignore[misc]


@pytest.mark.parametrize("training", ["both", "forward", "backward", "none"])
def test_explain_has_the_graphs_that_would_be_lowered(training: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    (graph,) = explain(model, torch.randn(2, 4), options={**OPTIONS, "training": training}).graphs
    methods = [(one.kind, [method.name for method in one.plan.methods]) for one in graph.plans]
    assert (
        methods
        == {
            "both": [("forward", ["forward", "backward"])],
            "forward": [("forward", ["forward"])],
            "backward": [("backward", ["backward"])],
            "none": [],
        }[training]
    )
    with torch.no_grad():
        (graph,) = explain(model, torch.randn(2, 4), options={**OPTIONS, "training": training}).graphs
    assert [one.kind for one in graph.plans] == ["inference"]


class Absent(UntouchedDelegate):
    """Nothing here executes it."""

    delegate_id = "Absent"

    def is_available(self) -> bool:
        return False


def test_explain_has_the_fallbacks_that_would_happen() -> None:
    takes = {"Absent": ops("aten.cos.default"), "Untouched": ops("aten.tanh.default")}
    options = {
        "partitioners": SupportPartitioner(takes),
        "backends": [type("Absent", (Untouched,), {"backend_id": "Absent"}), Untouched, "aot_eager"],
        "delegates": {"Absent": Absent, "Untouched": UntouchedDelegate},
    }
    explained = explain(fn, torch.randn(3), torch.randn(3), options=options)
    assert explained.graphs[0].backend == "aot_eager"
    absent, untouched = explained.fallbacks
    assert (absent.attempt, absent.instead) == ("Absent", "Untouched") and "cannot execute here" in absent.reason
    assert (untouched.attempt, untouched.instead) == ("Untouched", "aot_eager")
    assert untouched.reason == "it took no operator"
    plan = explained.graphs[0].plans[-1].plan
    assert "aten.cos.default" in {node.operator for node in plan.methods[0].host}


def test_explain_says_what_pytorch_would_run_and_where_it_is() -> None:
    def data_dependent(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x[x > 0])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        explained = explain(data_dependent, torch.ones(3), options={**OPTIONS, "fallback": "aot_eager"})
    (fallback,) = explained.fallbacks
    assert fallback.reason == "it has sizes that depend on data" and "torch.cos(x[x > 0])" in fallback.source
    assert explained.graphs[0].backend == "aot_eager" and explained.graphs[0].plans == ()


def test_a_wrong_option_is_an_error_before_the_function_is_called() -> None:
    def never(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("called")

    with pytest.raises(InputError, match="unknown option 'partitioner'"):
        explain(never, torch.ones(1), options={"partitioner": "reference"})
    with pytest.raises(UnknownPluginError, match="referense"):
        explain(never, torch.ones(1), options={"partitioners": "referense"})


def test_the_function_is_called_once_and_its_error_passes() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor, *, bad: bool = False) -> torch.Tensor:
            if bad:
                torch._dynamo.graph_break()
                raise KeyError("of the model")
            return torch.relu(self.norm(x)) + torch.rand(4)

    model, twin, x = Counted(), Counted(), torch.randn(8, 4)
    torch.manual_seed(1)
    explain(model, x, options=OPTIONS)
    after = torch.rand(())
    torch.manual_seed(1)
    twin(x)
    assert torch.equal(after, torch.rand(()))
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(KeyError, match="of the model"):
        explain(model, x, options=OPTIONS, bad=True)


def test_what_was_compiled_stays_and_nothing_is_added() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.cos(x) * 2
        torch._dynamo.graph_break()
        return y * 3

    counter = CompileCounter()
    compiled = torch.compile(f, backend=counter)
    compiled(torch.ones(3))
    assert counter.frame_count == 2
    assert len(_debug_get_cache_entry_list(f.__code__)) == 1
    explained = explain(compiled, torch.ones(5), options=OPTIONS)
    assert len(explained.graphs) == 2
    compiled(torch.ones(3))
    assert counter.frame_count == 2
    assert [entry.backend for entry in _debug_get_cache_entry_list(f.__code__)].count(None) == 1  # an empty one


def test_the_sizes_of_an_explained_call_do_not_make_later_graphs_dynamic() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x) * 2

    explain(f, torch.ones(5), options=OPTIONS)
    inputs_of: list[list[Any]] = []

    def note(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        inputs_of.append(inputs)
        return module.forward

    torch.compile(f, backend=note)(torch.ones(3))
    ((given,),) = inputs_of  # with a dynamic size, that would be an input too
    assert given.shape == (3,)


def test_nothing_of_an_explained_function_is_kept() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.linear(x))
            torch._dynamo.graph_break()
            return x * 2

    model = Model()
    explained = explain(model, torch.randn(2, 4), options=OPTIONS)
    assert len(explained.graphs) == 2 and _debug_get_cache_entry_list(Model.forward.__code__) == []
    assert graph_break_reasons == []
    kept = [weakref.ref(model), weakref.ref(model.linear.weight)]
    del model
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
