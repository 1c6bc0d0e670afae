"""Random pieces of models with attention, norms, masks and state, many of them almost what rewrites look for."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import random_pieces
import torch
from both_forms import Calls, variants
from random_state import STATE
from torch import nn
from torch.export import Dim, ExportedProgram, export

DTYPES = (torch.float32,) * 12 + (torch.float16, torch.bfloat16, torch.float64)
SIZES = ((1, 4, 2, 4), (2, 4, 2, 4), (2, 4, 2, 4), (2, 3, 4, 2), (1, 1, 2, 4), (1, 5, 1, 4))
"""Few, as each new size makes conversions slower."""


class Attention(nn.Module):
    """Takes random steps; what it needs besides its inputs it makes once, from its seed.

    Attributes:
        batch, length, heads, width: The sizes: values are [batch, length, heads * width].
        dtype: The type of the values.
    """

    def __init__(self, seed: int, pieces: int, state: bool) -> None:
        super().__init__()
        r = random.Random(seed)
        torch.manual_seed(seed)
        self.seed, self.pieces, self.state = seed, pieces, state
        self.batch, self.length, self.heads, self.width = r.choice(SIZES)
        self.dtype = r.choice(DTYPES)
        self.made = nn.ParameterDict()
        depth, dtype = self.heads * self.width, self.dtype
        self.register_buffer("keys", torch.zeros(self.batch, 8, depth, dtype=dtype))
        self.register_buffer("values", torch.zeros(self.batch, 8, depth, dtype=dtype))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(8))
        self.eval()

    def forward(self, x: Any, mask: Any, bias: Any, position: Any) -> Any:
        r = random.Random(f"{self.seed} steps")
        results: list[Any] = []
        chosen: list[Callable[..., Any]] = [r.choice(random_pieces.ALL) for _ in range(self.pieces)]
        if self.state:
            chosen.insert(r.randrange(len(chosen) + 1), r.choice(STATE))
        for number, piece in enumerate(chosen):
            made = piece(random.Random(f"{self.seed} {number}"), self, x, mask, bias, position)
            made = list(made) if isinstance(made, (list, tuple)) else [made]
            results += made
            last = made[0]
            if isinstance(last, torch.Tensor) and last.shape == x.shape and last.dtype is x.dtype and r.random() < 0.7:
                x = last
        extra = r.choice([[], [], [], [x], [results[0], results[0]], [mask], [results[0].view(results[0].shape)]])
        return tuple(results + extra)

    def weight(self, name: str, *shape: int) -> torch.Tensor:
        """Return a parameter, which the first call makes."""
        if name not in self.made:
            self.made[name] = nn.Parameter(torch.randn(shape).to(self.dtype) * 0.5)
        return self.made[name]


def make(seed: int, state: bool = False) -> tuple[str, ExportedProgram, Calls]:
    """Make the program of a seed, with the inputs of several calls."""
    r = random.Random(seed)
    module = Attention(seed, r.choice([1, 1, 2, 2, 3, 4]), state)
    call = _inputs(module, module.batch, module.length)
    with torch.no_grad():
        kept = {name: tensor.clone() for name, tensor in module.named_buffers()}
        module(*(value.clone() for value in call))
        for name, tensor in module.named_buffers():
            tensor.copy_(kept[name])
    shapes, others = None, []
    if not state and r.random() < 0.2:
        shapes, others = _dynamic(r, module)
    program = export(module, call, dynamic_shapes=shapes, strict=False)
    calls = [*variants(call, r, 4), *(other for other in others if _fits(program, other))]
    name = f"{module.pieces} pieces {module.dtype}{' dynamic' if shapes else ''}"
    return name, program, calls


def _fits(program: ExportedProgram, call: tuple[torch.Tensor, ...]) -> bool:
    """Return whether inputs have the sizes that torch did not make dynamic after all."""
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    given = [values[str(name)].shape for name in program.graph_signature.user_inputs]
    return all(
        not str(size).isdecimal() or int(str(size)) == other  # symbolic ones may be a number
        for shape, value in zip(given, call, strict=True)
        for size, other in zip(shape, value.shape, strict=True)
    )


def _dynamic(r: random.Random, module: Attention) -> tuple[Any, list[Any]]:
    """Make the batch, the length or both sizes that are known only at runtime."""
    both = r.random() < 0.5
    batch = Dim.AUTO if both and module.batch > 1 else None
    length = Dim.AUTO if module.length > 1 else None
    if batch is None and length is None:
        return None, []
    x, mask = {0: batch, 1: length}, {0: length, 1: length}
    shapes = (x, mask, mask, None)
    new = _inputs(module, module.batch + (batch is not None), module.length + (length is not None))
    return shapes, list(variants(new, r, 2))


def _inputs(module: Attention, batch: int, length: int) -> tuple[torch.Tensor, ...]:
    x = torch.randn(batch, length, module.heads * module.width).to(module.dtype)
    mask = torch.rand(length, length) < 0.7
    bias = torch.randn(length, length).to(module.dtype)
    return x, mask, bias, torch.tensor([random.Random(module.seed).randrange(8)])
