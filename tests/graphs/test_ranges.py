"""Ranges hold for whatever is passed to a program, and are narrow enough for the scores of attention."""

from __future__ import annotations

import math
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folders import ROOT
from random_programs import Interpreter, random_programs
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.fx import Graph, Node

from exir_lowering import LoweringOptions, lower
from exir_lowering.graphs import operator_name, source_line
from exir_lowering.graphs.ranges import TOP, Range, ValueRanges, bound_together
from exir_lowering.graphs.ranges.nodes import compute_for

sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))
from lowering_models import export_model

MORE = int(os.environ.get("EXIR_LOWERING_EXAMPLES", "0"))
SEED = int(os.environ.get("EXIR_LOWERING_SEED", "0"))

Built = tuple[nn.Module, tuple[Any, ...]]


def edge(module: nn.Module, inputs: tuple[Any, ...], **options: Any) -> ExportedProgram:
    return lower(export(module.eval(), inputs, **options), options=LoweringOptions(rewrites="none")).edge_programs[
        "forward"
    ]


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any], **state: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in state.items():
            self.register_buffer(name, tensor)

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs, **dict(self.named_buffers()))


# -- checking what is claimed against what is computed -------------------------------------------------------


class Recorder(Interpreter):
    """Keeps what the nodes of a program have computed."""

    seen: list[tuple[Node, Any]]

    def _run(self, module: Any, arguments: Sequence[Any]) -> Any:
        if module is self.program.graph_module:
            self.seen = list(zip(module.graph.find_nodes(op="placeholder"), map(_copy, arguments), strict=True))
        return super()._run(module, arguments)

    def _node(self, node: Node, args: Any, kwargs: Any) -> Any:
        result = super()._node(node, args, kwargs)
        if node.graph is self.program.graph_module.graph:
            self.seen.append((node, _copy(result)))
        return result


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def check(program: ExportedProgram, calls: Sequence[tuple[Any, ...]], **assume: str) -> ValueRanges:
    """Run a program, and compare every value with what is claimed of it."""
    ranges = ValueRanges(program, assume)
    recorder = Recorder(program)
    for inputs in calls:
        recorder(*inputs)
        for node, value in recorder.seen:
            if isinstance(value, torch.Tensor) and not value.is_complex():
                _check_range(ranges, node, value)
                _check_content(ranges, node, value)
                if value.is_floating_point() and value.dim():
                    _check_rows(ranges, node, value)
    return ranges


def _check_range(ranges: ValueRanges, node: Node, value: torch.Tensor) -> None:
    claimed = ranges.of(node)
    numbers = value.double()
    known = numbers[~numbers.isnan()]
    what = f"{node.format_node()}: {claimed}"
    assert known.numel() == 0 or (claimed.low <= known.min() and known.max() <= claimed.high), (
        what,
        float(known.min()),
        float(known.max()),
    )


def _check_content(ranges: ValueRanges, node: Node, value: torch.Tensor) -> None:
    content, uniform = ranges.constant(node), ranges.uniform(node)
    if content is not None:
        assert torch.equal(content.nan_to_num(), value.nan_to_num()), node
    if uniform is not None:
        expected = torch.full_like(value, uniform, dtype=torch.float64)
        assert torch.allclose(value.double(), expected, rtol=0, atol=0, equal_nan=True), (node, uniform)


def _check_rows(ranges: ValueRanges, node: Node, value: torch.Tensor) -> None:
    for dim in range(value.dim()):
        masked = (value == -math.inf).all(dim)
        if value.size(dim) and bool(masked.any()):
            doubt = ranges.rows_doubt(node, dim)
            assert doubt is not None, f"{node.format_node()} has a row of -inf along {dim}"
            assert doubt.reason and doubt.advice


LARGEST = torch.finfo(torch.float32).max
SPECIAL = (math.nan, math.inf, -math.inf, LARGEST, -LARGEST, 1e-42, -1e-42, 0.0, -0.0, 1e19, -3e25, 1.0, -1e-20, 7.0)


def hostile(rng: random.Random, like: torch.Tensor) -> torch.Tensor:
    """Make a tensor of numbers that arithmetic has trouble with."""
    if like.dtype is torch.bool:
        return torch.rand(like.shape) < rng.choice([0.0, 0.3, 0.9, 1.0])
    if not like.is_floating_point():
        return like.clone()
    kind = rng.randrange(6)
    if kind == 0:
        return torch.full_like(like, rng.choice(SPECIAL))
    scale = rng.choice([1.0, 1e-30, 1e10, 1e18, 1e30, 3e38])
    made = (torch.rand_like(like) * 2 - 1) * scale
    if kind == 1:
        return made.abs()
    if kind == 2:
        made = torch.full_like(like, scale) + made * 1e-6
    for _ in range(rng.randint(0, 3 if kind > 2 else 0)):
        mask = torch.rand(like.shape) < rng.choice([0.05, 0.3, 0.8])
        made = torch.where(mask, rng.choice(SPECIAL), made)
    return made.to(like.dtype)


def hostile_calls(seed: int, inputs: tuple[Any, ...], count: int = 12) -> list[tuple[Any, ...]]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    made = [tuple(hostile(rng, x) if isinstance(x, torch.Tensor) else x for x in inputs) for _ in range(count)]
    return [tuple(_copy(x) for x in inputs), *made]


# -- small programs ------------------------------------------------------------------------------------------

X = torch.randn(2, 3, 8)
UNARY: dict[str, Callable[[Any], Any]] = {
    "exp": torch.exp,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "neg": torch.neg,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "cos": torch.cos,
    "pow2": lambda x: x**2,
    "pow3": lambda x: x**3,
    "pow_half": lambda x: x**0.5,
    "square": lambda x: x * x,
    "twice": lambda x: x + x,
    "clamp": lambda x: x.clamp(-2, 5),
    "clamp_min": lambda x: x.clamp(min=0.5),
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "mean_all": lambda x: x.mean(),
    "half": lambda x: x.half() * 3,
    "bfloat16": lambda x: (x.bfloat16() + 1).float(),
    "int": lambda x: x.clamp(-9, 9).int(),
    "bool": lambda x: x.bool(),
    "cat": lambda x: torch.cat([x, x.sigmoid()]),
    "where": lambda x: torch.where(x > 0, x.tanh(), -x.sigmoid()),
    "nested": lambda x: 1 / (1 + (-x).exp()),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "pad": lambda x: F.pad(x, (1, 2), value=-math.inf),
    "masked": lambda x: x.masked_fill(x > 0, -math.inf),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 3),
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "rms_square": lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5),
    "rms_clamped": lambda x: x / x.pow(2).sum(-1, keepdim=True).sqrt().clamp(min=1e-12),
    "standardised": lambda x: (d := x - x.mean(-1, keepdim=True)) / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5),
    "not_its_own_norm": lambda x: x * torch.rsqrt(x.flip(-1)[..., :4].pow(2).mean(-1, keepdim=True) + 1e-6),
    "other_rows": lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6),
    "no_epsilon": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
    "half_rms": lambda x: (h := x.half()) * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3),
    "bmm": lambda x: x @ x.transpose(1, 2),
    "sub": lambda x: x.sigmoid() - x.relu(),
    "division": lambda x: x.sigmoid() / (x.relu() + 2),
    "counted": lambda x: (x.sigmoid().sum() > 0) & (torch.arange(8) >= 0) & (torch.arange(-3, 5) >= 0),
    "integers": lambda x: (x > 0).int() * 2000000000 * 2 + torch.arange(8, dtype=torch.int32),
    "index": lambda x: x[:, torch.tensor([2, 0])],
    "rolled": lambda x: x.roll(3, 1),
    "pooled": lambda x: F.max_pool2d(x.reshape(1, 2, 3, 8), 2, padding=1),
    "pooled with gaps": lambda x: F.max_pool2d(x.reshape(1, 2, 3, 8), 2, padding=1, dilation=4),
    "enlarged": lambda x: F.interpolate(x.reshape(1, 2, 3, 8), scale_factor=2),
    "gather": lambda x: x.gather(-1, torch.tensor([[7, 0], [2, 2]]).expand(*x.shape[:-2], 2, 2)),
    "slices": lambda x: x[:, 1:, ::2].permute(2, 0, 1).reshape(2, -1),
    "full": lambda x: x + torch.full((8,), 0.1) * torch.ones(3, 8),
}


@pytest.mark.parametrize("part", range(5))
def test_ranges_hold_for_operators(part: int) -> None:
    functions = list(UNARY.values())[part::5]
    # Operators also get what has gone through a norm or a sigmoid: bounded inputs.
    module = Lambda(lambda x: [f(y) for f in functions for y in (x, F.layer_norm(x, (8,)), x.sigmoid())])
    check(edge(module, (X,)), hostile_calls(part, (X,), MORE or 16))


def test_what_is_divided_by_its_own_norm_is_bounded() -> None:
    names = ("normalize", "rms", "rms_square", "rms_clamped")
    program = edge(Lambda(lambda x: [UNARY[name](x) for name in names]), (X,))
    ranges = ValueRanges(program)
    assert all(ranges.of(value).magnitude < 3 for value in program.graph.output_node().args[0])


FINITE: dict[str, Callable[[Any], Any]] = {
    "inf * 0": lambda x: x.exp() * (-x).relu(),
    "inf - inf": lambda x: x.exp() - x.abs().exp(),
    "inf / inf": lambda x: (x.exp() + 1) / (x.abs().exp() + 1),
    "inf of 0": lambda x: x.relu().log() + x.relu().reciprocal(),
    "inf in sums": lambda x: (x.exp() - 1e38).sum(-1) + (x.exp() @ x.relu().transpose(1, 2)).mean(),
    "lowest numbers": lambda x: (x.tanh() * 1e38 + torch.full((8,), LOWEST)).softmax(-1),
    "scaled numbers": lambda x: ((x.tanh() - 3e37) * 100 + torch.full((8,), LOWEST) * 1.5).softmax(-1),
    "half": lambda x: x.half() * x.half() - x.half().exp() + (x > 0) * 100000,
    "square of half": lambda x: (x.half() * 8 - 70000).exp() * x.half().relu(),
}


@pytest.mark.parametrize("name", FINITE)
def test_ranges_hold_for_finite_inputs(name: str) -> None:
    calls = [(torch.full_like(X, value),) for value in (1e6, -1e6, 0.0, 100.0, -100.0, 1e-40)]
    check(edge(Lambda(FINITE[name]), (X,)), [*calls, (X,), (X * 1e5,), ((X > 0) * 1e6,)], inputs_0="finite")


def test_ranges_hold_for_layers_with_weights() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU6(), nn.ConvTranspose2d(6, 4, 3, groups=2), nn.GELU(),
        nn.GroupNorm(2, 4), nn.Flatten(1), nn.Linear(4 * 10 * 10, 8), nn.LayerNorm(8), nn.Linear(8, 4, bias=False),
    )  # fmt: skip
    inputs = (torch.randn(2, 3, 8, 8),)
    ranges = check(edge(layers, inputs), hostile_calls(1, inputs))
    assert ranges.of(ranges._program.graph.output_node().args[0][0]).magnitude < 1e4


# -- random programs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SEED, SEED + (MORE or 2)))
def test_ranges_hold_in_random_programs_with_state_and_nested_graphs(seed: int) -> None:
    for program in random_programs(seed * 4 + 2, 2):
        for name, method in program.methods.items():
            check(method, [*program.inputs[name], *hostile_calls(seed, program.inputs[name][-1], 6)])


class Attention(nn.Module):
    """Random pieces of attention: where queries come from, what the mask is made of, how it gets to the scores."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        self.length, self.heads, self.width = rng.choice([1, 4, 5]), rng.choice([1, 2]), 4
        self.norm = rng.choice(["layer", "rms", "none", "l2", "tanh", "clamp", "softmax", "group"])
        self.kind = rng.choice(list(MASKS))
        self.way = [rng.choice(list(WAYS)) for _ in range(rng.randint(0, 2))]
        self.apply_mask = rng.choice(["sdpa", "add", "where", "masked_fill", "add_twice", "scaled"])
        size = self.heads * self.width
        self.project = nn.Linear(size, 3 * size)
        self.affine = nn.Parameter(torch.randn(size))
        if rng.random() < 0.1:
            with torch.no_grad():
                self.project.weight[0, 0] = math.inf
        self.register_buffer("cache", torch.zeros(1, self.heads, self.length, self.width))

    def inputs(self) -> tuple[Any, ...]:
        n = self.length
        return (
            torch.randn(1, n, self.heads * self.width),
            torch.rand(1, 1, n, n) < 0.5,
            torch.randn(1, 1, n, n),
            torch.ones(1, n, dtype=torch.long),
            torch.arange(n),
        )

    def normalised(self, x: torch.Tensor) -> torch.Tensor:
        made = {
            "layer": lambda: F.layer_norm(x, x.shape[-1:], self.affine),
            "rms": lambda: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.affine,
            "none": lambda: x,
            "l2": lambda: F.normalize(x, dim=-1),
            "tanh": lambda: x.tanh() * 3,
            "clamp": lambda: x.clamp(-5, 5),
            "softmax": lambda: x.softmax(-1),
            "group": lambda: F.group_norm(x.transpose(1, 2), 1).transpose(1, 2),
        }
        return made[self.norm]()

    def forward(self, x: Any, allowed: Any, added: Any, tokens: Any, positions: Any) -> Any:
        n = self.length
        parts = self.project(self.normalised(x)).view(1, n, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        q, k, v = parts[0], parts[1], parts[2]
        self.cache.copy_(self.cache * 0.5 + k if self.norm == "tanh" else k)
        mask = MASKS[self.kind](n, allowed, added, tokens, positions)
        for way in self.way:
            mask = WAYS[way](mask)
        if self.apply_mask == "sdpa":
            return F.scaled_dot_product_attention(q, self.cache, v, attn_mask=mask)
        scores = q @ self.cache.transpose(2, 3)
        number = torch.where(mask, 0.0, -math.inf) if mask.dtype is torch.bool else mask
        if self.apply_mask == "where":
            scores = torch.where(number == 0, scores, -math.inf)
        elif self.apply_mask == "masked_fill":
            scores = scores.masked_fill(number < 0, -math.inf)
        elif self.apply_mask == "scaled":
            scores = (number + scores) * 0.25 / torch.tensor(3.0)
        else:
            scores = scores + number + (number.amax(-1, keepdim=True) if self.apply_mask == "add_twice" else 0)
        return scores.softmax(-1) @ v


LOWEST = torch.finfo(torch.float32).min
MASKS: dict[str, Callable[..., Any]] = {
    "allowed": lambda n, allowed, added, tokens, positions: allowed,
    "added": lambda n, allowed, added, tokens, positions: added,
    "tokens": lambda n, allowed, added, tokens, positions: tokens[:, None, None].bool() & torch.ones(n, 1).bool(),
    "causal": lambda n, *_: torch.arange(n)[None] <= torch.arange(n)[:, None],
    "strictly_causal": lambda n, *_: torch.arange(n)[None] < torch.arange(n)[:, None],
    "tril": lambda n, *_: torch.ones(n, n).tril().bool(),
    "triu": lambda n, *_: torch.full((n, n), -math.inf).triu(1),
    "triu_all": lambda n, *_: torch.full((n, n), -math.inf).triu(0),
    "lowest": lambda n, allowed, *_: torch.where(allowed, 0.0, LOWEST),
    "lowest_added": lambda n, allowed, added, *_: torch.where(allowed, 0.0, LOWEST) + added.sigmoid(),
    "positions": lambda n, allowed, added, tokens, positions: torch.arange(n)[None] <= positions[:, None],
    "both": lambda n, allowed, *_: allowed & (torch.arange(n)[None] <= torch.arange(n)[:, None]),
    "either": lambda n, allowed, *_: allowed | (torch.arange(n)[None] <= torch.arange(n)[:, None]),
    "inverted": lambda n, *_: ~(torch.arange(n)[None] > torch.arange(n)[:, None]),
    "picked": lambda n, allowed, *_: allowed[0, 0][torch.arange(n)[:, None], torch.arange(n).flip(0)[None]],
    "none": lambda n, *_: torch.zeros(n, n),
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "same": lambda m: m,
    "transposed": lambda m: m.transpose(-1, -2),
    "expanded": lambda m: m.expand(1, 1, *m.shape[-2:]),
    "viewed": lambda m: m.reshape(1, -1, m.shape[-1]),
    "first": lambda m: m[..., :1, :].clone(),
    "row": lambda m: m[..., 0, :],
    "column": lambda m: m[..., :, :1].clone(),
    "joined": lambda m: torch.cat([m[..., 1:], m[..., :1]], -1),
    "number": lambda m: torch.where(m, 0.0, -math.inf) if m.dtype is torch.bool else m,
    "negative": lambda m: ~m if m.dtype is torch.bool else m * 2,
}


@pytest.mark.parametrize("seed", range(SEED, SEED + (MORE or 16)))
def test_ranges_hold_in_random_attention(seed: int) -> None:
    module = Attention(seed)
    inputs = module.inputs()
    try:
        program = edge(module, inputs)
    except Exception:
        pytest.skip("torch cannot export it")
    calls = hostile_calls(seed, inputs)
    shifted = [
        (*each[:3], torch.randint(0, 2, each[3].shape), each[4] + 100 * (i % 5 - 2)) for i, each in enumerate(calls)
    ]
    check(program, shifted)
    allowed = inputs[1].clone()
    allowed[..., 0] = True
    added = hostile(module.rng, inputs[2])
    added[..., 0] = added[..., 0].nan_to_num(LOWEST, LOWEST, LOWEST)
    tokens = inputs[3].clone()
    tokens[:, 1:] = 0
    promised = {"allowed": "finite_rows", "added": "finite_rows", "tokens": "finite_rows"}
    names = set(program.graph_signature.user_inputs)
    calls = [(each[0], allowed, added, tokens, each[4]) for each in calls]
    check(program, calls, **{name: text for name, text in promised.items() if name in names})
    finite = [((x.nan_to_num().clamp(-1e6, 1e6)), *each) for x, *each in calls]
    check(program, finite, x="finite")


# -- what has to be proven -----------------------------------------------------------------------------------


def softmaxes(program: ExportedProgram) -> list[Node]:
    return [n for n in program.graph.nodes if n.op == "call_function" and "_softmax." in operator_name(n)]


def scores_of(node: Node) -> list[Node]:
    """Return the products of queries and keys that reach a softmax by additions and views."""
    found, stack = [], [node.args[0]]
    while stack:
        last = stack.pop()
        if operator_name(last) == "aten.bmm.default":
            found.append(last)
        elif operator_name(last) in ("aten.add.Tensor", "aten.view_copy.default", "aten.mul.Tensor", "aten.div.Tensor"):
            stack += [each for each in last.all_input_nodes if each.op == "call_function"]
    return found


PROVEN = ("clip", "vit_tiny", "whisper_encoder", "swin", "gpt2", "gemma", "t5")
MASKED = ("bert_mini", "bert_dynamic", "llama4_prefill", "llama4_decode")


@pytest.mark.parametrize("name", [*PROVEN, *MASKED])
def test_the_scores_of_attention_are_bounded(name: str) -> None:
    program = lower(export_model(name)[0], options=LoweringOptions(rewrites="none")).edge_programs["forward"]
    ranges = ValueRanges(program)
    found = softmaxes(program)
    assert found and all(scores_of(node) for node in found)
    for node in found:
        assert all(ranges.bounded(score) is None for score in scores_of(node))
        doubt = ranges.rows_doubt(node.args[0], node.args[1])
        assert name in MASKED or doubt is None, doubt
        assert name not in MASKED or (doubt is not None and "model" in doubt.reason)
    if "llama4" in name:
        assert len(ranges.bounded_state) == 8


def test_a_mask_that_is_an_input_needs_a_promise() -> None:
    program = lower(export_model("bert_mini")[0], options=LoweringOptions(rewrites="none")).edge_programs["forward"]
    (name,) = {ValueRanges(program).rows_doubt(n.args[0], -1).node.name for n in softmaxes(program)}
    doubt = ValueRanges(program).rows_doubt(softmaxes(program)[0].args[0], -1)
    assert f"{name} is an input of the model" in doubt.reason
    assert f'assume={{"{name}": "finite_rows"}}' in doubt.advice
    ranges = ValueRanges(program, {name: "finite_rows"})
    assert all(ranges.rows_doubt(node.args[0], -1) is None for node in softmaxes(program))


def attention(mask: Callable[..., torch.Tensor], *inputs: torch.Tensor, **assume: str) -> Any:
    """Return the doubt about the rows of an attention with a mask, and the program."""
    q = torch.randn(1, 2, 4, 4)
    module = Lambda(lambda q, *rest: F.scaled_dot_product_attention(q.tanh(), q.tanh(), q, attn_mask=mask(*rest)))
    program = edge(module, (q, *inputs))
    (node,) = softmaxes(program)
    return ValueRanges(program, assume).rows_doubt(node.args[0], node.args[1]), program


N = torch.arange(4)
FINE: dict[str, Callable[[], torch.Tensor]] = {
    "tril": lambda: torch.ones(4, 4).tril().bool(),
    "triu": lambda: torch.full((4, 4), -math.inf).triu(1),
    "compared": lambda: torch.arange(4)[None] <= torch.arange(4)[:, None],
    "lowest": lambda: torch.full((4, 4), LOWEST),
    "sliced": lambda: torch.ones(9, 9).tril().bool()[None, None, 3:7, :4],
    "summed": lambda: torch.full((4, 4), -math.inf).triu(1) + torch.full((4, 4), -math.inf).triu(2),
}


@pytest.mark.parametrize("name", FINE)
def test_masks_by_construction_are_proven(name: str) -> None:
    assert attention(lambda: FINE[name]())[0] is None


def test_a_constant_mask_with_a_masked_row_is_refused() -> None:
    doubt, _ = attention(lambda: torch.ones(4, 4).tril(-1).bool())
    assert "entirely" in doubt.reason
    doubt, _ = attention(lambda: torch.full((4, 4), -math.inf).triu(0))
    assert "-inf" in doubt.reason and "0" in doubt.advice


def test_masks_that_are_inputs() -> None:
    floats, truths, positions = torch.zeros(4, 4), torch.ones(4, 4).bool(), torch.arange(4)
    for mask in (floats, truths):
        doubt, program = attention(lambda mask: mask, mask)
        (_, name) = program.graph_signature.user_inputs
        assert doubt.node.name == name and "input of the model" in doubt.reason
        assert attention(lambda mask: mask, mask, **{name: "finite_rows"})[0] is None
        # A promise about rows says nothing about columns.
        assert attention(lambda mask: mask.t(), mask, **{name: "finite_rows"})[0] is not None
    flat = torch.zeros(2, 8)  # whose rows are longer than those of the mask
    assert attention(lambda mask: mask.reshape(4, 4), flat, **{name: "finite_rows"})[0] is not None
    doubt, _ = attention(lambda at: torch.arange(4)[None] <= at[:, None], positions)
    assert "le.Tensor" in doubt.reason and "test_ranges.py" in doubt.reason


def test_the_source_line_of_a_culprit_is_named() -> None:
    program = edge(Lambda(lambda x: x.tanh().exp() + 1), (X,))
    last = program.graph.output_node().args[0][0]
    doubt = ValueRanges(program).bounded(last)
    assert "aten.exp.default" in doubt.reason and "test_ranges.py" in doubt.reason and source_line(doubt.node)
    program = edge(Lambda(lambda x: (x + 1).relu()), (X,))
    doubt = ValueRanges(program).bounded(program.graph.output_node().args[0][0])
    (name,) = program.graph_signature.user_inputs
    assert doubt.node.name == name and f'assume={{"{name}": "finite"}}' in doubt.advice
    assert ValueRanges(program, {name: "finite"}).bounded(program.graph.output_node().args[0][0]) is None


# -- buffers, constants, edited graphs -----------------------------------------------------------------------


class Kept(nn.Module):
    """Writes into buffers."""

    def __init__(self, write: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("kept", torch.zeros(2, 3, 8))
        self.register_buffer("second", torch.zeros(2, 3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = self.write(self, x)
        self.kept.copy_(new)
        return self.kept * 2


@pytest.mark.parametrize(
    ("write", "bounded"),
    [
        (lambda self, x: x.tanh(), True),
        (lambda self, x: F.layer_norm(x, (8,)), True),
        (lambda self, x: torch.where(x > 0, self.kept, x.sigmoid()), True),
        (lambda self, x: self.kept.clamp(-1, 1) + x.tanh(), True),
        (lambda self, x: x, False),
        (lambda self, x: self.kept + 1, False),
        (lambda self, x: self.kept * 2, False),
    ],
)
def test_a_buffer_is_bounded_if_every_run_keeps_it_so(write: Callable[[Any, Any], Any], bounded: bool) -> None:
    program = edge(Kept(write), (X,))
    ranges = check(program, hostile_calls(3, (X,), 30))
    assert ranges.bounded_state == ({"kept"} if bounded else frozenset())
    assert (ranges.bounded(program.graph.output_node().args[0][1]) is None) is bounded
    assert not ValueRanges(program, volatile=("kept",)).bounded_state


@pytest.mark.parametrize(
    ("writes", "bounded"),
    [
        ((lambda self, x: x.tanh(), lambda self, x: x.sigmoid()), True),
        ((lambda self, x: torch.where(x > 0, self.kept, x.sin()), lambda self, x: self.kept.clamp(-1, 1)), True),
        ((lambda self, x: x.tanh(), lambda self, x: x), False),
        ((lambda self, x: self.kept.neg(), lambda self, x: self.kept + 1), False),
        ((lambda self, x: x.tanh(), lambda self, x: self.kept), True),
    ],
)
def test_what_programs_share_is_bounded_if_each_keeps_it_so(writes: Any, bounded: bool) -> None:
    programs = [edge(Kept(write), (X,)) for write in writes]
    every = [ValueRanges(program, volatile=("kept",)) for program in programs]
    bound_together([[(ranges, "kept") for ranges in every]])
    for ranges, program in zip(every, programs, strict=True):
        assert ranges.bounded_state == ({"kept"} if bounded else frozenset())
        doubt = ranges.bounded(next(n for n in program.graph.find_nodes(op="placeholder") if n.name == "b_kept"))
        assert (doubt is None) is bounded
        assert doubt is None or "a method that may share it" in doubt.reason


def test_a_buffer_that_takes_from_an_unbounded_one_is_unbounded() -> None:
    class Two(Kept):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept.copy_(self.second.clone())
            self.second.copy_(x)
            return self.kept + 1

    ranges = check(edge(Two(lambda self, x: x), (X,)), hostile_calls(4, (X,)))
    assert not ranges.bounded_state


def test_a_buffer_that_holds_infinity_from_the_start_is_unbounded() -> None:
    module = Kept(lambda self, x: torch.where(x > 0, self.kept, x.tanh()))
    module.kept[0, 0, 0] = math.inf
    assert not check(edge(module, (X,)), hostile_calls(5, (X,))).bounded_state


def test_constants_are_the_programs_own_tensors() -> None:
    module = nn.Linear(8, 4)
    program = edge(module, (X,))
    ranges = ValueRanges(program)
    weight = next(n for n in program.graph.nodes if n.name == "p_weight")
    assert ranges.constant(weight) is program.state_dict["weight"]
    assert ranges.constant(program.graph.output_node().args[0][0]) is None


def test_what_consists_of_constants_is_known() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mask = torch.arange(8)[None] <= torch.arange(3)[:, None]
        return (
            x + torch.where(mask, 1.0, 2.0),
            torch.full((2, 2), -math.inf).half().expand(3, 2, 2).clone(),
            x + torch.rand(8),
        )

    program = edge(Lambda(function), (X,))
    ranges = ValueRanges(program)
    nodes = {operator_name(n): n for n in program.graph.nodes if n.op == "call_function"}
    assert ranges.constant(nodes["aten.where.self"]).shape == (3, 8)
    assert ranges.uniform(nodes["aten.where.self"]) is None
    assert ranges.uniform(program.graph.output_node().args[0][1]) == -math.inf
    random_ones = [n for n in program.graph.nodes if n.op == "call_function" and "rand" in operator_name(n)]
    assert all(ranges.constant(n) is None for n in random_ones)


def test_dynamic_sizes() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.sigmoid().sum(1) + x.sigmoid().mean(1)) @ w.tanh()

    shapes = ({1: Dim("n", min=1, max=64)}, None)
    program = edge(Lambda(function), (X, torch.randn(8, 8)), dynamic_shapes=(shapes,))
    calls = [(torch.randn(2, n, 8), torch.randn(8, 8)) for n in (1, 5, 64)]
    ranges = check(program, [*calls, *hostile_calls(6, calls[1])])
    assert ranges.of(program.graph.output_node().args[0][0]).magnitude < 1e5


def test_empty_tensors() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.softmax(-1), x.mean(-1), x.sum(-1), torch.cat([x, x], -1), F.layer_norm(x.transpose(1, 2), (3,))

    check(edge(Lambda(function), (torch.randn(2, 3, 0),)), [(torch.randn(2, 3, 0),)])


def test_strange_nodes_are_unknown() -> None:
    program = edge(Lambda(lambda x: x.tanh() + 1), (X,))
    graph = program.graph
    tanh, *_, total = (n for n in graph.nodes if n.op == "call_function")
    with graph.inserting_before(total):
        unknown = graph.call_function(lambda *values: values[0], (tanh, None))
        strange = graph.call_function(tanh.target, ())
        mismatched = graph.call_function(total.target, ("text", [tanh]))
        got = graph.get_attr("missing")
    ranges = ValueRanges(program)
    for node in (unknown, strange, mismatched, got, graph.output_node()):
        assert not ranges.of(node).finite
        assert ranges.constant(node) is None and ranges.uniform(node) is None
        assert ranges.rows_doubt(node, -1) is not None and ranges.bounded(node) is not None
    assert ranges.of(unknown) == TOP
    assert ranges.of(tanh).magnitude == pytest.approx(1.0, rel=1e-3)


def test_a_value_with_many_inputs_is_computed_once() -> None:
    graph = Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(1000)]
    joined = graph.call_function(torch.ops.aten.cat.default, (inputs,))
    computed, found = Counter[Node](), dict[Node, int]()

    def compute(node: Node) -> int:
        computed[node] += 1
        return 1 + sum(found[each] for each in node.all_input_nodes)

    assert compute_for(joined, found, lambda node: node.all_input_nodes, compute) == 1001
    assert set(computed.values()) == {1} and set(computed) == {joined, *inputs}


def test_a_graph_may_grow_while_it_is_analysed() -> None:
    program = edge(Lambda(lambda x: x.tanh() + 1), (X,))
    ranges = ValueRanges(program)
    tanh, *_, total = (n for n in program.graph.nodes if n.op == "call_function")
    assert ranges.of(total).finite
    node = total
    with program.graph.inserting_after(total):
        for _ in range(20000):  # far more than Python's stack has room for
            node = program.graph.call_function(tanh.target, (node,))
            node.meta["val"] = tanh.meta["val"]
    assert ranges.of(node).magnitude <= 1.01
    assert Range(-1.0, 1.0).finite


def test_integers_have_bits_not_truth() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = (~mask.clamp(min=1)).bool()  # ~1 is -2: true
            return torch.where(hidden, float("-inf"), torch.tanh(x))

    program = edge(Model(), (torch.randn(3, 4), torch.ones(3, 4, dtype=torch.int32)))
    (result,) = program.graph.output_node().args[0]
    assert ValueRanges(program).rows_doubt(result, -1) is not None
