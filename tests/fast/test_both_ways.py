"""The fast conversion makes what ExecuTorch's conversion makes: of operators, layers and random programs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import both_ways
import operator_programs
import pytest
import torch
from random_flow import export_random
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram, export
from torch.library import EffectType
from torch.nn.attention import SDPBackend, sdpa_kernel

from exir_lowering import load, lower
from exir_lowering._upstream.operators import is_overload
from exir_lowering._upstream.value_keys import MEMORY
from exir_lowering.fast.rewriter import _Planner


class Of(nn.Module):
    """Calls a function, with a weight and two buffers at hand."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("kept", torch.ones(4, 4))
        self.constant = torch.ones(4)  # neither a parameter nor a buffer: export knows its content

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def write_into_input(m: Of, x: torch.Tensor) -> Any:
    return x.add_(1), x.sum()


def write_through_slice(m: Of, x: torch.Tensor) -> Any:
    y = torch.block_diag(x, x)
    y[0:1].mul_(2)
    return y + 1


def write_through_reshape(m: Of, x: torch.Tensor) -> Any:
    y = torch.linspace(0, 1, 4) * x
    y.reshape(-1).div_(3)
    return y + 1


def write_through_slice_of_plain(m: Of, x: torch.Tensor) -> Any:
    y = x + 1
    y[0:1].mul_(2)
    return y + 1


def write_into_buffer(m: Of, x: torch.Tensor) -> Any:
    m.kept[0].zero_()
    return x + m.kept


def write_twice(m: Of, x: torch.Tensor) -> Any:
    y = x.clone()
    z = y.t()
    z.add_(y)
    y.relu_()
    return y, z


def view_what_was_written(m: Of, x: torch.Tensor) -> Any:
    y = torch.mm(x, x)
    y += x
    return y.view(2, 8) + 1, y.t().relu()


def written_and_asserted(m: Of, x: torch.Tensor) -> Any:
    y = torch.matmul(x[None], x)
    y.view(4, 4).div_(2)
    return y.to(torch.float32).transpose(0, 1), y.to(torch.float16)


def asserted_only(m: Of, x: torch.Tensor) -> Any:
    torch.nn.functional.pad(x, (1, 1)).to(torch.float16)
    return torch.selu(x)


def asserted_and_written_into_what_nothing_reads(m: Of, x: torch.Tensor) -> Any:
    y = torch.nn.functional.linear(x, m.kept).to(torch.float32).clone()
    y.copy_(x**2)
    return x + 1


def known_constant_without_gradients(m: Of, x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = x.double().to(torch.float32) + torch.tensor([1.0, 2.0, 3.0, 4.0])
    return y * x


def unused_random_operator(m: Of, x: torch.Tensor) -> Any:
    torch.alpha_dropout(torch.nn.functional.pad(x, (1, 1)), 0.5, True)
    return torch.selu(x)


def unused_attention(m: Of, x: torch.Tensor) -> Any:
    q = x[None, None]
    nn.functional.scaled_dot_product_attention(q, q, q)
    return x + 1


def decompositions_of_their_own_dtype(m: Of, x: torch.Tensor) -> Any:
    return torch.addcmul(x, x, x, value=0.5), torch.frac(x), torch.nn.functional.glu(x)


def same_operand_twice(m: Of, x: torch.Tensor) -> Any:
    return torch.matmul(x, x), torch.where(x > 0, x, x), x - x


def numbers(m: Of, x: torch.Tensor) -> Any:
    return x + 1, x * 1.0, x + True, 1 - x, x**2, x**-0.0, 2**x, torch.full((2,), 1), torch.full((2,), 1.0)


def outputs_that_are_inputs(m: Of, x: torch.Tensor) -> Any:
    return {"x": x, "again": [x, m.weight, m.kept], "same": (x.contiguous(), x.to(torch.float32)), "none": None, "n": 3}


def promoted(m: Of, x: torch.Tensor) -> Any:
    return x + torch.arange(4), x * torch.ones(4, dtype=torch.float64), x.half() + x, x + torch.tensor(2)


def kept_by_an_assert_only(m: Of, x: torch.Tensor) -> Any:
    torch.rand_like(x).to(torch.float64)  # neither is read, but export asserts what `to` was given
    nn.functional.dropout(x, 0.5, True).sin().to(torch.float64)
    return x + 1, x.to(torch.float64).to(torch.float32)


def complex_numbers(m: Of, x: torch.Tensor) -> Any:
    z = torch.view_as_complex(x.reshape(4, 2, 2))
    return torch.view_as_real(z.conj() * z), z.conj().imag + 1, torch.view_as_real(torch.matmul(z.mH, z))


def negated_later(m: Of, x: torch.Tensor) -> Any:
    return torch._neg_view(x) + 1


def traced_as_more_than_they_are(m: Of, x: torch.Tensor) -> Any:
    return x[1:].view(torch.int32) + 1, torch.ops.aten.lift(x) + 1


def view_what_an_operator_writes(m: Of, x: torch.Tensor) -> Any:
    h, c = torch.lstm_cell(x, (x, x), m.kept.repeat(4, 1), m.kept.repeat(4, 1))
    return h.unsqueeze(0), c.unsqueeze(0)


def attribute_of_known_content(m: Of, x: torch.Tensor) -> Any:
    return torch.matmul(x, m.constant.unsqueeze(1)), m.constant.pow(2)


FUNCTIONS = [
    write_into_input,
    write_through_slice,
    write_through_reshape,
    write_through_slice_of_plain,
    write_into_buffer,
    write_twice,
    view_what_was_written,
    written_and_asserted,
    asserted_only,
    asserted_and_written_into_what_nothing_reads,
    known_constant_without_gradients,
    unused_random_operator,
    unused_attention,
    decompositions_of_their_own_dtype,
    same_operand_twice,
    numbers,
    outputs_that_are_inputs,
    promoted,
    kept_by_an_assert_only,
    complex_numbers,
    negated_later,
    traced_as_more_than_they_are,
    view_what_an_operator_writes,
    attribute_of_known_content,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("way", ["xnnpack unchecked", "none unchecked"])
def test_programs_in_which_they_differed_once(function: Callable[..., Any], way: str) -> None:
    program = export(Of(function), (torch.randn(4, 4),), strict=False)
    program.graph_module.meta["own"] = 1
    assert both_ways.compare(program, way).differences == []


@pytest.mark.parametrize("way", ["xnnpack unchecked", "none unchecked"])
@pytest.mark.parametrize(
    ("function", "left"), [(known_constant_without_gradients, True), (attribute_of_known_content, False)]
)
def test_what_becomes_of_known_content(function: Callable[..., Any], left: bool, way: str) -> None:
    """torch keeps that of constants that it has made buffers."""
    program = export(Of(function), (torch.randn(4, 4),), strict=False)
    outcome = both_ways.compare(program, way)
    assert outcome.differences == [] and ("content is known" in str(outcome.left)) is left


def numbers_of_default_dtype(m: Of, i: torch.Tensor) -> Any:
    return i / i, i.sqrt(), i * 1.5, torch.full((4,), 1.5) + i, torch.linspace(0, 1, 4)


def test_another_default_dtype_is_another_case() -> None:
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            program = export(Of(numbers_of_default_dtype), (torch.arange(4),), strict=False)
        finally:
            torch.set_default_dtype(torch.float32)
        outcome = both_ways.compare(program, "xnnpack unchecked")
        assert (outcome.differences, outcome.left) == ([], ())


def attention(m: Of, x: torch.Tensor) -> Any:
    q = x[None, None]
    return nn.functional.scaled_dot_product_attention(q, q, q)


def test_the_preferred_attention_makes_another_case() -> None:
    program = export(Of(attention), (torch.randn(4, 4),), strict=False)
    assert both_ways.compare(program, "none unchecked").differences == []
    with sdpa_kernel([SDPBackend.MATH]):
        assert both_ways.compare(program, "none unchecked").differences == []
    assert both_ways.compare(program, "none unchecked").differences == []


def test_operators_of_users_may_be_defined_anew() -> None:
    definition = torch.library.Library("distinct_test", "FRAGMENT")
    definition.define("smooth(Tensor x) -> Tensor")
    for function in (torch.sin, torch.cos):
        kernel = torch.library.Library("distinct_test", "FRAGMENT")
        kernel.impl("smooth", lambda x, function=function: function(x), "CompositeImplicitAutograd")
        try:
            program = export(Of(lambda m, x: torch.ops.distinct_test.smooth(x)), (torch.randn(4, 4),), strict=False)
            outcome = both_ways.compare(program, "none unchecked")
        finally:
            kernel._destroy()
        assert (outcome.differences, outcome.left) == ([], ())


def test_a_constant_that_a_decomposition_makes() -> None:
    """torch 2.14 adds it to the program's constants; before, it gets lost, and both ways raise the same."""
    library = torch.library.Library("distinct_test", "FRAGMENT")
    library.define("shifted(Tensor x) -> Tensor")
    library.impl("shifted", lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), "CompositeImplicitAutograd")
    program = export(Of(lambda m, x: torch.ops.distinct_test.shifted(x) * m.kept), (torch.randn(4, 4),), strict=False)
    outcome = both_ways.compare(program, "none unchecked")
    assert outcome.differences == []
    if outcome.error is None:
        (got,) = load(lower(program).emit().buffer).run("forward", torch.ones(4, 4))
        assert torch.equal(got, torch.tensor([2.0, 3.0, 4.0, 5.0]).expand(4, 4))


CANONICAL = "canonicalize_output_graph_node_order"


@pytest.mark.skipif(not hasattr(torch._dynamo.config, CANONICAL), reason="torch 2.14 has this order")
def test_the_order_that_torch_can_give_to_nodes() -> None:
    program = export(Of(lambda m, x: (x.tanh() + 1) * (x.cos() - m.kept)), (torch.randn(4, 4),), strict=False)
    plain = both_ways.convert(program, "none", True)
    with torch._dynamo.config.patch({CANONICAL: True}):
        outcome = both_ways.compare(program, "none")
    assert outcome.differences == [] and "order of its own" in str(outcome.left) and plain[1] == ()


def test_operators_with_effects_keep_their_tokens() -> None:
    library = torch.library.Library("distinct_test", "FRAGMENT")
    library.define("logged(Tensor x) -> Tensor")
    library.impl("logged", torch.clone, "CPU")
    torch.library.register_fake("distinct_test::logged", torch.empty_like, lib=library)
    torch.library._register_effectful_op(torch.ops.distinct_test.logged.default, EffectType.ORDERED)
    program = export(Of(lambda m, x: torch.ops.distinct_test.logged(x) + 1), (torch.randn(4, 4),), strict=False)
    assert both_ways.compare(program, "none unchecked").differences == []


def test_sizes_alone_are_a_case() -> None:
    rows = {0: Dim("rows", min=2, max=64)}
    function = Of(lambda m, x: x.sum(1) + torch.arange(x.shape[0]))
    program = export(function, (torch.randn(4, 4),), dynamic_shapes=((rows,),), strict=False)
    outcome = both_ways.compare(program, "none unchecked")
    assert (outcome.differences, outcome.left) == ([], ())


def test_what_is_remembered_keeps_no_program_alive() -> None:
    MEMORY.clear()
    both_ways.convert(export(Of(numbers), (torch.randn(4, 4),), strict=False), "none unchecked", True)
    with_memory = _count_fake_modes()
    MEMORY.clear()
    assert _count_fake_modes() == with_memory


def _count_fake_modes() -> int:
    gc.collect()
    return sum(type(one) is FakeTensorMode for one in gc.get_objects())


def _of_operators(first: int) -> ExportedProgram:
    """Return a program of the calls of some seeds that can be exported."""
    calls = []
    for seed in range(first, first + 10):
        call = operator_programs.call(seed)
        if call is not None and call.module.variant in ("inputs", "strided", "stored", "twice"):
            with contextlib.suppress(Exception):  # some samples cannot be exported
                operator_programs.export_calls([call])
                calls.append(call)
    return operator_programs.export_calls(calls)


@pytest.mark.parametrize(
    ("first", "way"), [(200, "xnnpack unchecked"), (400, "none unchecked"), (540, "keeping some without dim order")]
)
def test_operators(first: int, way: str) -> None:
    program = _of_operators(first)
    assert both_ways.compare(program, way).differences == []


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 700, 100))
def test_calls_that_are_taken_to_be_plain_are(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch's operators are not tried: here torch and ExecuTorch convert each of them alone."""
    holds, seen, wrong = _Planner._holds, set[Hashable](), []

    def checking(self: Any, node: torch.fx.Node, plain: Any, values: Sequence[Any]) -> bool:
        held = holds(self, node, plain, values)
        if not held or not is_overload(node.target) or isinstance(node.meta.get("val"), torch.SymInt):
            return held
        call = self._keys.call(node, node.target, values, node.meta.get("val"))
        if not call.local and (key := (self._stage.key, call.key)) not in seen:
            seen.add(key)
            (template,) = self._stage.convert([call])
            wrong.extend([] if template.only_replaces(call, plain.target) else [node.format_node()])
        return held

    monkeypatch.setattr(_Planner, "_holds", checking)
    for seed in range(first, first + 100):
        with contextlib.suppress(Exception):  # some samples cannot be made, exported or converted
            call = operator_programs.call(seed)
            if call is not None and call.module.variant in ("inputs", "strided", "stored", "twice"):
                both_ways.convert(operator_programs.export_calls([call]), "none unchecked", True)
    assert len(seen) > 50 and wrong == []


@pytest.mark.parametrize("seed", [1, 4, 5, 11])
def test_random_programs(seed: int) -> None:
    _, program, _ = export_random(seed)
    assert both_ways.compare(program, "xnnpack unchecked").differences == []
