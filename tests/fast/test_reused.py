"""What is reused while backends and the emitter run: the same bytes, only for the thread that asks, nothing is left."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack import _passes
from executorch.exir import pass_base, tensor
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.pass_base import ExportPass
from skipped_passes import describe_value
from torch._export import utils
from torch._subclasses import fake_impls
from torch.export import Dim, ExportedProgram, ExportGraphSignature, export, exported_program
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import GraphModule, Interpreter, symbolic_trace
from torch.fx.traceback import NodeSource
from torch.utils import _pytree as pytree

from exir_lowering import LoweringOptions, lower
from exir_lowering._upstream import locks
from exir_lowering._upstream.tracing import DECOMPOSITIONS, ConversionState
from exir_lowering.fast import accelerated, current

PLAIN = LoweringOptions(fast=False)
REPLACED: list[tuple[Any, str]] = [
    (GraphModule, "recompile"),
    (NodeSource, "__init__"),
    (_passes.XNNPACKPassManager, "transform"),
    (GraphModule, "print_readable"),
    (pass_base._ExportPassBase, "call"),
    (ExportGraphSignature, "inputs_to_parameters"),
    (InputSpec, "__setattr__"),
    (pass_base._ExportPassBase, "_fx"),
    (tensor, "dim_order_from_stride"),
    (exported_program, "_collect_all_valid_cia_ops"),
    (torch._ops, "Callable"),
]
BEFORE = [getattr(owner, name) for owner, name in REPLACED]


def is_restored() -> bool:
    return [getattr(owner, name) for owner, name in REPLACED] == BEFORE and current() is None


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv, self.norm = torch.nn.Linear(8, 16), torch.nn.Conv1d(4, 6, 3), torch.nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        joined = torch.cat([y, y + 1, y * 2, y - 1, y * 3, y + 2, y * y], 1)
        return torch.softmax(torch.relu(self.linear(x)), -1), self.norm(self.conv(y)).relu(), joined


def small(dynamic: bool = False) -> ExportedProgram:
    torch.manual_seed(0)
    shapes = ({0: Dim("batch", min=2, max=32)},) * 2 if dynamic else None
    return export(Small().eval(), (torch.randn(4, 8), torch.randn(4, 4, 9)), dynamic_shapes=shapes)


def file(options: LoweringOptions | None = None) -> bytes:
    return lower(small(), "xnnpack", options=options).emit().buffer


# -- only here, only now -----------------------------------------------------------------------------------------------


def test_everything_is_restored() -> None:
    with accelerated():
        assert all(one is not getattr(*place) for one, place in zip(BEFORE, REPLACED, strict=True))
        with accelerated():
            outer = current()
        assert current() is outer is not None
        with accelerated(False):
            assert current() is None
    assert is_restored()
    with pytest.raises(KeyError), accelerated():
        raise KeyError
    assert is_restored()


def test_another_thread_is_not_accelerated() -> None:
    with accelerated(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(current).result() is None
        module = pool.submit(lambda: symbolic_trace(torch.nn.ReLU())).result()
        assert "_code" in vars(module)


def test_two_threads_with_different_settings() -> None:
    given, expected = small(), file()
    start, made = threading.Barrier(4), []

    def run(fast: bool) -> None:
        start.wait()
        for _ in range(2):
            lowered = lower(given, "xnnpack", options=LoweringOptions(fast=fast))
            made.append(lowered.emit().buffer)

    threads = [threading.Thread(target=run, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [expected] * 8
    assert is_restored()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_of_a_thread_that_accelerates() -> None:
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with accelerated():
            inside.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if is_restored() else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert is_restored()


@pytest.mark.parametrize("others", [0, 1])
def test_an_interrupt_after_any_call_of_entering_and_leaving_changes_nothing(others: int) -> None:
    """Python looks for signals after each call. Where the context is in use further out, it stays as it is there."""
    outside = [accelerated() for _ in range(others)]
    for context in outside:
        context.__enter__()
    expected = [getattr(owner, name) for owner, name in REPLACED]
    ended = False
    for number in itertools.count():
        calls = itertools.count()

        def interrupt(frame: FrameType, event: str, _: object, at: int = number, calls: Iterator[int] = calls) -> None:
            ours = frame.f_code.co_filename == locks.__file__
            # What comes at the very start of __exit__, or as a generator goes on there, cannot be caught in Python.
            looks = event == "c_return" or (event == "call" and frame.f_code.co_name not in ("__exit__", "during"))
            if ours and looks and next(calls) == at:
                sys.setprofile(None)
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            with accelerated():
                pass
            ended = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert [getattr(owner, name) for owner, name in REPLACED] == expected, number
        if ended:
            break
    assert number > (20 if others else 100)
    for context in outside:
        context.__exit__(None, None, None)
    assert is_restored()


# -- modules that wait to be compiled ----------------------------------------------------------------------------------


class Doubled(torch.nn.Module):
    def forward(self, x):  # torch cannot pickle annotations that are strings
        return x.relu() * 2


def _late() -> GraphModule:
    with accelerated():
        module = symbolic_trace(Doubled())
        assert "_code" not in vars(module)
    return module


def test_a_module_works_after_the_context() -> None:
    x = torch.ones(1, 3, 4, 4)
    expected = Doubled()(x)
    assert torch.equal(_late()(x), expected)
    assert torch.equal(_late().forward(x), expected)
    assert torch.equal(copy.deepcopy(_late())(x), expected)
    assert torch.equal(copy.copy(_late())(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(_late()))(x), expected)
    code = symbolic_trace(Doubled()).code
    assert _late().code == code and code in str(_late())
    module = _late()
    module.recompile()
    assert module.code == code and torch.equal(module(x), expected)
    with accelerated():
        assert _late().recompile().src == code
        assert torch.equal(pickle.loads(pickle.dumps(_late()))(x), expected)
        assert torch.equal(copy.deepcopy(_late())(x), expected)
        assert "* 2" in module.code
        list(module.graph.nodes)[-2].args = (module.graph.find_nodes(op="call_method")[0], 3)
        module.recompile()
        assert "* 3" in module.code and torch.equal(module(x), x * 3)


def test_a_forward_that_was_replaced_stays() -> None:
    module = _late()
    type(module).forward = lambda self, x: x + 1
    assert module.code
    assert torch.equal(module(torch.zeros(2)), torch.ones(2))


def test_a_module_is_collected_without_being_compiled() -> None:
    with accelerated():
        module = symbolic_trace(Doubled())
        kind = type(module)
        del module
    gc.collect()
    with pytest.raises(AttributeError):
        kind._code  # noqa: B018


# -- results that are reused -------------------------------------------------------------------------------------------


def _edge() -> ExportedProgram:
    return lower(small(), None)["forward"]


def test_results_are_known_and_each_node_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _edge().graph_module
    computed: list[Any] = []
    compute = Interpreter.call_function
    monkeypatch.setattr(Interpreter, "call_function", lambda self, *given: computed.append(0) or compute(self, *given))
    with accelerated():
        first = ExportPass()(module).graph_module
        before = len(computed)
        second = ExportPass()(first).graph_module
    values = [
        pytree.tree_leaves([node.meta["val"] for node in each.graph.nodes if isinstance(node.target, EdgeOpOverload)])
        for each in (first, second)
    ]
    # What is computed from constants, whose elements tracing knows, is computed each time.
    assert before - (len(computed) - before) >= 8
    assert [describe_value(value) for value in values[0]] == [describe_value(value) for value in values[1]]
    assert len({id(value) for each in values for value in each}) == 2 * len(values[0])


def test_a_value_that_a_pass_left_behind_is_corrected() -> None:
    """A pass changes a node and not what is noted of its value, and leaves it to tracing to correct that."""
    module = _edge().graph_module
    with accelerated():
        module = ExportPass()(module).graph_module
        (joined,) = (node for node in module.graph.nodes if "cat" in str(node.target))
        assert joined.meta["val"].shape[1] == 28
        joined.args = (joined.args[0][:2], *joined.args[1:])
        module = ExportPass()(module).graph_module
    (joined,) = (node for node in module.graph.nodes if "cat" in str(node.target))
    assert joined.meta["val"].shape[1] == 8


def test_a_table_follows_its_signature() -> None:
    signature = _edge().graph_signature
    with accelerated():
        table = signature.inputs_to_parameters
        assert signature.inputs_to_parameters is table
        (name, *_) = table
        signature.replace_all_uses(name, "renamed")
        assert "renamed" in signature.inputs_to_parameters and name not in signature.inputs_to_parameters
        added = InputSpec(InputKind.PARAMETER, TensorArgument(name="another"), "another.weight")
        signature.input_specs.insert(0, added)
        assert signature.inputs_to_parameters["another"] == "another.weight"
        added.target = "other.weight"
        assert signature.inputs_to_parameters["another"] == "other.weight"
        added.kind = InputKind.BUFFER
        assert "another" not in signature.inputs_to_parameters and "another" in signature.inputs_to_buffers
        expected = dict(signature.inputs_to_buffers)
    assert signature.inputs_to_buffers is not signature.inputs_to_buffers == expected


# -- composite operators -----------------------------------------------------------------------------------------------


def test_an_operator_that_is_registered_later_is_found() -> None:
    with accelerated():
        before = set(utils._collect_all_valid_cia_ops())
        library = torch.library.Library("exir_lowering_late", "DEF")
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
        found = set(utils._collect_all_valid_cia_ops()) - before
        library.define("in_python(Tensor x) -> Tensor")
        operator = torch.ops.exir_lowering_late.in_python.default
        library.impl("in_python", lambda x: x, "CPU")
        assert operator not in utils._collect_all_valid_cia_ops()
        operator.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(lambda x: x)
        assert operator in utils._collect_all_valid_cia_ops()
        assert {str(each) for each in found} == {"exir_lowering_late.twice.default"}
        utils._collect_all_valid_cia_ops().clear()
        assert operator in utils._collect_all_valid_cia_ops()
    assert set(utils._collect_all_valid_cia_ops()) - before == {*found, operator}


def _kernels(operators: dict[Any, Any]) -> list[Any]:
    """Return what operators have while a conversion decides which of them it decomposes."""
    with exported_program._override_composite_implicit_decomp(operators):
        return [(op, {key: _describe_kernel(one) for key, one in op.py_kernels.items()}) for op in operators] + [
            (op, _describe_kernel(fake_impls.op_implementations_dict.get(op))) for op in operators
        ]


def _describe_kernel(kernel: Any) -> Any:
    if isinstance(kernel, functools.partial):
        return _describe_kernel(kernel.func), {name: _describe_kernel(one) for name, one in kernel.keywords.items()}
    cells = [cell.cell_contents for cell in getattr(kernel, "__closure__", None) or ()]
    return (kernel.__code__, cells) if cells else getattr(kernel, "__code__", kernel)


def _chosen(table: Any) -> dict[Any, Any]:
    return exported_program._split_decomp_table_to_cia_and_python_decomp(dict(table))[0]


def test_kernels_that_are_put_again_are_those_that_torch_puts() -> None:
    decomposed = torch.ops.aten.linear.default
    tables = [{}, exported_program.default_decompositions(), {decomposed: lambda *args: args[0]}]
    before = {op: dict(op.py_kernels) for op in _chosen({})}
    rules = dict(fake_impls.op_implementations_dict)
    for _ in range(2):
        for chosen in map(_chosen, tables):
            with DECOMPOSITIONS:
                expected = _kernels(chosen)
                with accelerated():
                    assert _kernels(chosen) == expected
            assert {op: dict(op.py_kernels) for op in before} == before
    assert fake_impls.op_implementations_dict == rules


def test_kernels_of_an_operator_that_has_others_by_now_are_made_anew() -> None:
    operator, composite = torch.ops.aten.linear.default, torch._C.DispatchKey.CompositeImplicitAutograd
    with DECOMPOSITIONS, accelerated():
        _kernels(_chosen({}))
        operator.py_impl(composite)(lambda *args: torch.ops.aten.linear.default(*args) + 1)
        try:
            again = _kernels(_chosen({}))
            nested = []
            with exported_program._override_composite_implicit_decomp({operator: print}):
                nested = _kernels(_chosen({}))
        finally:
            del operator.py_kernels[composite]
            operator._dispatch_cache.clear()
        first = _kernels(_chosen({}))
    assert again != first
    assert nested != first
    with DECOMPOSITIONS:
        assert first == _kernels(_chosen({}))


def test_an_operator_that_is_defined_again_under_its_name_is_found() -> None:
    found = []
    for _ in range(2):
        with accelerated(), torch.library._scoped_library("exir_lowering_again", "DEF") as library:
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
            found.append(torch.ops.exir_lowering_again.twice.default)
            assert found[-1] in utils._collect_all_valid_cia_ops()
    assert found[0] is not found[1]


def test_a_nested_conversion_that_fails_leaves_the_kernels_of_the_outer_one() -> None:
    operator = torch.ops.aten.linear.default
    with DECOMPOSITIONS, exported_program._override_composite_implicit_decomp({operator: print}):
        outer, state = dict(operator.py_kernels), ConversionState()
        inner = exported_program._override_composite_implicit_decomp({operator: repr})
        inner.__enter__()  # and its thread is gone
        assert operator.py_kernels != outer
        state.restore()
        assert operator.py_kernels == outer
        inner.__exit__(None, None, None)
        assert operator.py_kernels == outer
    assert not operator.py_kernels
