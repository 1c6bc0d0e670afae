"""When torch.compile compiles, what it keeps and frees, threads, and delegates and options that are wrong."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_support import Recording, assert_near, clean, compiled, delegated
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.testing import CompileCounter

from exir_lowering import (
    BackendContractError,
    BackendFailure,
    CompileSpec,
    DelegateContext,
    InputError,
    LoweringOptions,
    UnknownPluginError,
)
from exir_lowering.backends.reference import ReferenceDelegate
from exir_lowering.dynamo import backend, reports
from exir_lowering.partitioners import SupportPartitioner, ops

__all__ = ["clean"]


class Handle:
    """What a delegate compiled; unlike a tuple, it can be referred to weakly."""

    def __init__(self, content: Any, method: str) -> None:
        self.content, self.method = content, method


class Counting(ReferenceDelegate):
    """The reference delegate, which knows its handles."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: list[weakref.ref[Handle]] = []
        self.destroyed = 0
        self.executed = 0

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> Handle:
        handle = Handle(super().compile(processed, compile_specs, context), context.method)
        self.handles.append(weakref.ref(handle))
        return handle

    def execute(self, handle: Handle, inputs: list[Any]) -> Sequence[Any]:
        self.executed += 1
        return super().execute(handle.content, inputs)

    def destroy(self, handle: Handle) -> None:
        self.destroyed += 1


class Changed(Counting):
    """A delegate that does something else while it executes one graph, or all."""

    def __init__(self, change: Callable[[list[Any], list[Any]], Sequence[Any]], method: str | None = None) -> None:
        super().__init__()
        self.change, self.method = change, method

    def execute(self, handle: Handle, inputs: list[Any]) -> Sequence[Any]:
        results = list(super().execute(handle, list(inputs)))
        return self.change(inputs, results) if self.method in (None, handle.method) else results


def _forget() -> None:
    torch._dynamo.reset()
    for _ in range(2):  # what the first one ends may hold something that was in a cycle
        gc.collect()


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def _count(function: Any, calls: Callable[[Callable[..., Any]], Any], **settings: Any) -> tuple[int, int]:
    """Return how often Dynamo compiles a function for our backend, and for eager PyTorch."""
    ours = 0

    def counting(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        nonlocal ours
        ours += 1
        return backend(module, inputs, options={"partitioners": "reference", "fallback": None})

    calls(torch.compile(function, backend=counting, **settings))
    torch._dynamo.reset()
    eager = CompileCounter()
    calls(torch.compile(function, backend=eager, **settings))
    return ours, eager.frame_count


def test_one_compilation_for_equal_inputs() -> None:
    model = _model()

    def calls(function: Callable[..., Any]) -> None:
        for _ in range(4):
            function(torch.randn(3, 4)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()

    assert _count(model, calls) == (1, 1)


def test_it_compiles_again_where_eager_traces_again() -> None:
    def function(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        y = x.sin() * factor
        torch._dynamo.graph_break()
        return y.cos() if y.dim() == 2 else y

    def calls(compiled_function: Callable[..., Any]) -> None:
        for shape in [(3,), (4,), (3,), (2, 2), (3,)]:
            assert_near(compiled_function(torch.ones(shape)), function(torch.ones(shape)))
        compiled_function(torch.ones(3, requires_grad=True)).sum().backward()
        with torch.no_grad():
            compiled_function(torch.ones(3))

    for dynamic in (None, False):
        ours, eager = _count(function, calls, dynamic=dynamic)
        assert ours == eager > 1
        torch._dynamo.reset()


def test_nothing_is_left_after_a_reset() -> None:
    programs: list[weakref.ref[Any]] = []
    model, delegate = _model(), Counting()
    recording = Recording(lambda program: programs.append(weakref.ref(program)))
    called = compiled(
        model, partitioners="reference", backends={"reference": recording}, delegates={"reference": delegate}
    )
    x = torch.randn(3, 4)
    called(x).sum().backward()
    with torch.no_grad():
        called(x)
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    kept = [weakref.ref(model), *parameters, *delegate.handles, *programs]
    assert len(delegate.handles) == len(programs) == 3  # forward, backward, and without gradients
    assert all(reference() is not None for reference in delegate.handles)
    del model, called
    _forget()
    assert [reference() for reference in kept] == [None] * len(kept)
    assert delegate.destroyed == 3


def test_a_reset_begins_anew_though_the_function_is_kept() -> None:
    model, x, delegate = _model(), torch.randn(3, 4), Counting()
    options = {"partitioners": "reference", "fallback": None, "delegates": {"reference": delegate}}

    def mine(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return backend(module, inputs, options=options)

    for each in (backend, mine):
        called = torch.compile(model, backend=each, options=options if each is backend else None)
        with torch.no_grad():
            called(x)
            (first,) = delegate.handles
            gc.disable()  # what Python finds by itself would come at any time
            try:
                torch._dynamo.reset()
            finally:
                gc.enable()
            assert reports() == () and delegate.destroyed == 1 and first() is None
            assert_near(called(x), model(x))  # an equal payload
        assert len(delegate.handles) == 2
        torch._dynamo.reset()
        delegate.handles.clear()
        delegate.destroyed = 0


def test_a_reset_leaves_what_is_still_called() -> None:
    delegate, x = Counting(), torch.randn(3, requires_grad=True)
    called = compiled(lambda value: value.sin().cos(), partitioners="reference", delegates={"reference": delegate})
    result = called(x)
    torch._dynamo.reset()
    (gradient,) = torch.autograd.grad(result.sum(), x)  # by a backward graph from before
    assert_near(gradient, -x.sin().sin() * x.cos())
    del result
    _forget()
    assert delegate.destroyed == len(delegate.handles) == 2


def test_weights_that_are_packed_are_freed_with_the_function() -> None:
    model = _model()
    called = compiled(model, partitioners="xnnpack")
    with torch.no_grad():
        called(torch.randn(3, 4))
    assert delegated() == ["XnnpackBackend"]
    kept = [weakref.ref(model), *(weakref.ref(parameter) for parameter in model.parameters())]
    del model, called
    _forget()
    assert [reference() for reference in kept] == [None] * len(kept)


def _repeated(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = (x.sin() * 2).cos()
    return x


def test_equal_partitions_are_lowered_and_compiled_once() -> None:
    recording, delegate = Recording(), Counting()
    settings = {
        "partitioners": SupportPartitioner({"reference": ops("aten.sin", "aten.mul")}),
        "backends": {"reference": recording},
        "delegates": {"reference": delegate},
    }
    x = torch.linspace(-1, 1, 5)
    first = compiled(_repeated, **settings)
    assert_near(first(x), _repeated(x))
    assert delegated() == ["reference"] * 4
    assert recording.calls == [{"forward": 1}]
    assert len(delegate.handles) == 1 and delegate.executed == 4

    second = compiled(lambda y: _repeated(y) + y, **settings)  # another function, with these partitions in it
    assert_near(second(x), _repeated(x) + x)
    assert recording.calls == [{"forward": 1}] and len(delegate.handles) == 1
    assert_near(second(torch.ones(7)), _repeated(torch.ones(7)) + 1)  # another shape: another partition, equal bytes
    assert recording.calls == [{"forward": 1}] * 2 and len(delegate.handles) == 1

    del first, second
    _forget()
    assert delegate.destroyed == 1
    compiled(_repeated, **settings)(x)
    assert recording.calls == [{"forward": 1}] * 3 and len(delegate.handles) == 2


def test_cache_on_disk_has_partitions_after_everything_is_freed(tmp_path: Path) -> None:
    model, x = _model(), torch.randn(3, 4)
    settings = {"partitioners": "xnnpack", "lowering": LoweringOptions(cache=tmp_path)}
    hits = []
    for _ in range(2):
        _forget()
        with torch.no_grad():
            assert_near(compiled(model, **settings)(x), model(x))
        hits.append([use.hit for report in reports() for _, one in report.reports for use in one.cache])
    assert hits == [[False], [True]]


def _in_threads(*functions: Callable[[], None]) -> None:
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(functions))

    def run(function: Callable[[], None]) -> None:
        try:
            barrier.wait()
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("partitioner", ["reference", "xnnpack"])
def test_threads_call_one_compiled_function(partitioner: str) -> None:
    model = _model()
    called = compiled(model, partitioners=partitioner)
    called(torch.randn(3, 4))

    def call(seed: int) -> Callable[[], None]:
        def run() -> None:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(50):
                x = torch.randn(3, 4, generator=generator, requires_grad=True)
                [got] = torch.autograd.grad(called(x).sin().sum(), [x])
                [want] = torch.autograd.grad(model(x).sin().sum(), [x])
                assert_near(got, want)
                with torch.no_grad():
                    assert_near(called(x), model(x))

        return run

    _in_threads(call(1), call(2))


def test_threads_compile_at_once() -> None:
    def compile_one(width: int) -> Callable[[], None]:
        def run() -> None:
            for depth in range(1, 4):
                model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(depth)])
                x = torch.randn(2, width)
                called = compiled(model, partitioners="reference")
                called(x).sum().backward()
                assert_near(called(x), model(x))

        return run

    _in_threads(compile_one(3), compile_one(5))


def _two_lines(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x * weight
    return y.sin()  # the line that fails


def _fail(inputs: list[Any], results: list[Any]) -> Sequence[Any]:
    raise ZeroDivisionError("the accelerator is on fire")


def _call_changed(delegate: Changed, *, gradient: bool = False) -> torch.Tensor:
    """Call a compiled function of an input and a parameter; return the result, or the gradient."""
    taking = SupportPartitioner({"reference": ops("aten.sin", "aten.cos")})
    called = compiled(_two_lines, partitioners=taking, delegates={"reference": delegate})
    x, weight = torch.linspace(0, 1, 6), torch.nn.Parameter(torch.linspace(1, 2, 6))
    result = called(x, weight)
    if gradient:
        result.sum().backward()
    return result


@pytest.mark.parametrize("method", ["forward", "backward"])
def test_what_a_delegate_raises_arrives_with_the_line_of_the_model(method: str) -> None:
    with pytest.raises(BackendFailure) as caught:
        _call_changed(Changed(_fail, method), gradient=True)
    text = str(caught.value)
    assert f"the {method} graph" in text and "'reference'" in text
    assert "the accelerator is on fire" in text
    assert "test_compilation.py" in text and "return y.sin()  # the line that fails" in text
    assert "y = x * weight" not in text
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_function_works_again_after_a_failure() -> None:
    failing = True
    delegate = Changed(lambda inputs, results: _fail(inputs, results) if failing else results)
    called = compiled(torch.sin, partitioners="reference", delegates={"reference": delegate})
    with pytest.raises(BackendFailure):
        called(torch.ones(3))
    failing = False
    assert_near(called(torch.ones(3)), torch.ones(3).sin())
    assert len(delegate.handles) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda inputs, results: [results[0].double()],
            r"float64.*expected a tensor of float32.*to\(torch.float32\)",
        ),
        (lambda inputs, results: [results[0][None]], "has 2 dimensions, not 1"),
        (lambda inputs, results: [results[0][:3]], "dimension 0 is 3, not 6"),
        (lambda inputs, results: [*results, *results], "returned 2 outputs, expected 1"),
        (lambda inputs, results: [], "returned 0 outputs, expected 1"),
        (lambda inputs, results: results[0], "returned a tensor .*expected a list or tuple"),
        (lambda inputs, results: [results[0].tolist()], "Return a tensor there"),
        (lambda inputs, results: [inputs[0].mul_(2)], "wrote into its input 0"),
    ],
)
@pytest.mark.parametrize("method", ["forward", "backward"])
def test_a_delegate_that_breaks_its_contract(change: Any, message: str, method: str) -> None:
    with pytest.raises(BackendContractError, match=message) as caught:
        _call_changed(Changed(change, method), gradient=True)
    assert f"the {method} graph" in str(caught.value)


def test_a_delegate_that_returns_its_input() -> None:
    delegate = Changed(lambda inputs, results: [inputs[0] if result.equal(inputs[0]) else result for result in results])
    called = compiled(lambda x: (x * 1, x + 0, x * 2), partitioners="reference", delegates={"reference": delegate})
    x = torch.ones(3)
    one, other, third = called(x)
    one.add_(10)
    third.add_(20)
    assert [value.tolist() for value in (x, one, other, third)] == [[1] * 3, [11] * 3, [1] * 3, [22] * 3]


def test_a_delegate_that_uses_its_memory_again() -> None:
    memory: dict[tuple[Any, ...], torch.Tensor] = {}

    def into_memory(inputs: list[Any], results: list[Any]) -> list[Any]:
        keys = [(number, result.shape) for number, result in enumerate(results)]
        return [
            memory.setdefault(key, torch.empty_like(result)).copy_(result)
            for key, result in zip(keys, results, strict=True)
        ]

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    called = compiled(model, partitioners="reference", delegates={"reference": Changed(into_memory)})
    inputs = [torch.randn(4, 4) for _ in range(3)]
    with torch.no_grad():
        assert_near([called(x) for x in inputs], [model(x) for x in inputs])
    gradients = []
    for function in (model, called):
        losses = [function(x).square().sum() for x in inputs]  # all forwards before the first backward
        gradients.append([torch.autograd.grad(loss, list(model.parameters())) for loss in losses])
    assert_near(gradients[1], gradients[0])


WRONG = [
    ({"partitioner": "reference"}, "'partitioner'.*Did you mean 'partitioners'"),
    ({"partitioners": "refrence"}, "refrence"),
    ({"partitioners": 3}, "partitioners"),
    ({"partitioners": {"bakward": "reference"}}, r"options\['partitioners'\].*'bakward'"),
    ({"backends": "reference"}, r"options\['backends'\]"),
    ({"backends": []}, r"options\['backends'\]"),
    ({"backends": ["xnnpak", "eager"]}, "no 'xnnpak' here; did you mean 'xnnpack'"),
    ({"backends": {"reference": 3}, "partitioners": "reference"}, r"options\['backends'\]={'reference': 3}"),
    ({"delegates": {"reference": 3}, "partitioners": "reference"}, r"options\['delegates'\]={'reference': 3}"),
    ({"training": "foward"}, r"options\['training'\]='foward'"),
    ({"training": True}, r"options\['training'\]=True"),
    ({"decompositions": 3}, r"options\['decompositions'\]=3"),
    ({"fallback": "induktor"}, r"options\['fallback'\]='induktor'"),
    ({"fallback": "exir_lowering"}, r"options\['fallback'\]='exir_lowering'"),
    ({"lowering": {}}, r"options\['lowering'\]={}"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[str(options) for options, _ in WRONG])
def test_a_wrong_option_is_named(options: Any, message: str) -> None:
    """Dynamo wraps what a backend raises, and has no place to check options before it compiles."""
    with pytest.raises(BackendCompilerFailed, match=message) as caught:
        torch.compile(torch.sin, backend=backend, options=options)(torch.ones(3))
    assert isinstance(caught.value.inner_exception, (InputError, UnknownPluginError))
