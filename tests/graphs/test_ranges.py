"""Ranges hold for whatever is passed to a program, and are narrow enough for the scores of attention."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from random_programs import Interpreter, random_programs
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.fx import Node

from exir_lowering import LoweringOptions, lower
from exir_lowering.errors import InputError
from exir_lowering.graphs import operator_name, source_line
from exir_lowering.graphs.ranges import TOP, Range, ValueRanges

MORE = int(os.environ.get("EXIR_LOWERING_EXAMPLES", "0"))
SEED = int(os.environ.get("EXIR_LOWERING_SEED", "0"))

Built = tuple[nn.Module, tuple[Any, ...]]


def edge(module: nn.Module, inputs: tuple[Any, ...], **options: Any) -> ExportedProgram:
    return lower(export(module.eval(), inputs, **options), options=LoweringOptions()).edge_programs["forward"]


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any], **state: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in state.items():
            self.register_buffer(name, tensor)

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs, **dict(self.named_buffers()))


# -- checking what is claimed against what is computed ------------------------------------------------------------------


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
    assert claimed.nan or known.numel() == numbers.numel(), what
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
        assert bool((value.double() == uniform).all()), (node, uniform)


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


# -- small programs -----------------------------------------------------------------------------------------------------

X = torch.randn(2, 3, 8)
UNARY: dict[str, Callable[[Any], Any]] = {
    "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal,
    "abs": torch.abs, "neg": torch.neg, "relu": torch.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "sigmoid": torch.sigmoid, "erf": torch.erf,
    "sin": torch.sin, "cos": torch.cos, "floor": torch.floor, "hardswish": F.hardswish, "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid, "leaky": F.leaky_relu, "elu": F.elu, "pow2": lambda x: x**2, "pow3": lambda x: x**3,
    "pow_half": lambda x: x**0.5, "pow_minus": lambda x: x**-1, "square": lambda x: x * x, "twice": lambda x: x + x,
    "clamp": lambda x: x.clamp(-2, 5), "clamp_min": lambda x: x.clamp(min=0.5), "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1), "sum": lambda x: x.sum(-1), "mean": lambda x: x.mean(-1),
    "mean_all": lambda x: x.mean(), "amax": lambda x: x.amax(-1), "max": lambda x: x.max(-1), "any": lambda x: (x > 0).any(-1),
    "half": lambda x: x.half() * 3, "bfloat16": lambda x: (x.bfloat16() + 1).float(), "int": lambda x: x.clamp(-9, 9).int(),
    "bool": lambda x: x.bool(), "cumsum": lambda x: x.cumsum(-1), "var": lambda x: x.var(-1), "topk": lambda x: x.topk(2)[0],
    "fmod": lambda x: torch.fmod(x, 3.0), "remainder": lambda x: torch.remainder(x, -3.0), "cat": lambda x: torch.cat([x, x.sigmoid()]),
    "where": lambda x: torch.where(x > 0, x.tanh(), -x.sigmoid()), "nested": lambda x: 1 / (1 + (-x).exp()),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True), "normalize": lambda x: F.normalize(x, dim=-1),
    "pad": lambda x: F.pad(x, (1, 2), value=-math.inf), "masked": lambda x: x.masked_fill(x > 0, -math.inf),
    "layer_norm": lambda x: F.layer_norm(x, (8,)), "group_norm": lambda x: F.group_norm(x, 3),
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "rms_square": lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5),
    "rms_clamped": lambda x: x / x.pow(2).sum(-1, keepdim=True).sqrt().clamp(min=1e-12),
    "standardised": lambda x: (d := x - x.mean(-1, keepdim=True)) / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5),
    "not_its_own_norm": lambda x: x * torch.rsqrt(x.flip(-1)[..., :4].pow(2).mean(-1, keepdim=True) + 1e-6),
    "other_rows": lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6),
    "no_epsilon": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
    "half_rms": lambda x: (h := x.half()) * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3),
    "pool": lambda x: F.avg_pool2d(x[None], 2, padding=1), "max_pool": lambda x: F.max_pool2d(x[None], 2, padding=1),
    "upsample": lambda x: F.interpolate(x[None], scale_factor=2.0, mode="bilinear"),
    "nearest": lambda x: F.interpolate(x[None], scale_factor=2.0, mode="nearest"),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x[None], 1), "bmm": lambda x: x @ x.transpose(1, 2),
    "minimum": lambda x: torch.minimum(x.relu(), torch.maximum(x, x.sigmoid())), "sub": lambda x: x.sigmoid() - x.relu(),
    "division": lambda x: x.sigmoid() / (x.relu() + 2), "zero_division": lambda x: x / x.relu(),
    "integers": lambda x: (x > 0).int() * 2000000000 * 2 + torch.arange(8, dtype=torch.int32),
    "index": lambda x: x[:, torch.tensor([2, 0])], "slices": lambda x: x[:, 1:, ::2].permute(2, 0, 1).reshape(2, -1),
    "full": lambda x: x + torch.full((8,), 0.1) * torch.ones(3, 8), "logic": lambda x: ~((x > 0) & (x < 2)) | x.bool(),
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_ranges_hold_for_an_operator(name: str) -> None:
    function = UNARY[name]
    # The second result goes through the operator after a norm and a sigmoid, which give it bounded inputs.
    module = Lambda(lambda x: (function(x), function(F.layer_norm(x, (8,))), function(x.sigmoid())))
    check(edge(module, (X,)), hostile_calls(len(name), (X,), 20))


def test_ranges_hold_for_layers_with_weights() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU6(), nn.ConvTranspose2d(6, 4, 3, groups=2), nn.GELU(),
        nn.GroupNorm(2, 4), nn.Flatten(1), nn.Linear(4 * 10 * 10, 8), nn.LayerNorm(8), nn.Linear(8, 4, bias=False),
    )  # fmt: skip
    inputs = (torch.randn(2, 3, 8, 8),)
    ranges = check(edge(layers, inputs), hostile_calls(1, inputs))
    assert ranges.of(ranges._program.graph.output_node().args[0][0]).magnitude < 1e4


# -- random programs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SEED, SEED + (MORE or 6)))
def test_ranges_hold_in_random_programs_with_state_and_nested_graphs(seed: int) -> None:
    for program in random_programs(seed * 4, 4):
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
    "clamped": lambda n, allowed, added, tokens, p: torch.arange(n)[None] <= p.clamp(0, 100)[:, None],
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


@pytest.mark.parametrize("seed", range(SEED, SEED + (MORE or 60)))
def test_ranges_hold_in_random_attention(seed: int) -> None:
    module = Attention(seed)
    inputs = module.inputs()
    try:
        program = edge(module, inputs)
    except Exception:
        pytest.skip("torch cannot export it")
    calls = hostile_calls(seed, inputs)
    shifted = [(*each[:3], torch.randint(0, 2, each[3].shape), each[4] + 100 * (i % 5 - 2)) for i, each in enumerate(calls)]
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
