"""What is said of padded positions, against runs of random programs with and without padding."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.export import Dim, ExportedProgram, export
from torch.fx import Interpreter, Node

from exir_lowering.graphs.ranges.padding import Positions

INF = float("inf")


def _unary(r: random.Random, x: torch.Tensor) -> torch.Tensor:
    dim = r.randrange(-x.dim(), x.dim()) if x.dim() else 0
    other = r.randrange(-x.dim(), x.dim()) if x.dim() else 0
    f = x if x.is_floating_point() else x.float()
    keep = r.random() < 0.5
    rest = [1] * (x.dim() - 1)
    choices: list[Any] = [
        lambda: x.relu() if x.dtype is not torch.bool else ~x, lambda: f.exp(), lambda: f.sigmoid(), lambda: -f,
        lambda: f.softmax(dim), lambda: f.log_softmax(dim), lambda: x.cumsum(dim), lambda: x.sum(dim, keepdim=keep),
        lambda: f.mean(dim, keepdim=keep), lambda: f.amax(dim, keepdim=keep), lambda: f.amin(dim, keepdim=keep),
        lambda: x.bool().any(dim, keepdim=keep), lambda: x.bool().all(dim, keepdim=keep), lambda: f.max(dim).values,
        lambda: x.flip(dim), lambda: f.sort(dim).values, lambda: x.transpose(dim, other), lambda: x.unsqueeze(dim),
        lambda: x.reshape(*x.shape[:-2], -1), lambda: x.reshape(*x.shape[:-1], 2, -1), lambda: x[..., 1:, :],
        lambda: x[..., :-1, :], lambda: x[..., ::2, :], lambda: x[..., :2], lambda: x.select(dim, 0),
        lambda: x.select(dim, -1), lambda: F.pad(f, (1, 0)), lambda: f.tril(r.choice((-1, 0, 1))),
        lambda: f.triu(r.choice((-1, 0, 1))), lambda: x.bool(), lambda: f.isnan(), lambda: f.nan_to_num(),
        lambda: 1 / f, lambda: f.abs().sqrt(), lambda: f.logsumexp(dim, keepdim=keep), lambda: x.repeat(2, *rest),
        lambda: F.layer_norm(f, f.shape[-1:]), lambda: f.argmax(dim, keepdim=keep), lambda: f * f,
        lambda: torch.arange(x.shape[-2]), lambda: torch.arange(x.shape[1]).unsqueeze(r.choice((0, 1))),
        lambda: f.prod(dim), lambda: f / x.shape[1], lambda: torch.ones_like(x), lambda: f.norm(dim=dim),
        lambda: x.diff(dim=dim), lambda: torch.full((x.shape[1], x.shape[1]), -INF).triu(1), lambda: f.clamp(-2, 2),
        lambda: F.gelu(f), lambda: f.gather(dim, torch.zeros_like(x, dtype=torch.long)), lambda: f.var(dim),
        lambda: x.expand(2, *x.shape), lambda: x.squeeze(0), lambda: x != 0, lambda: f > 0.5, lambda: x.long() >= 1,
    ]  # fmt: skip
    return r.choice(choices)()


def _binary(r: random.Random, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    f, g = (each if each.is_floating_point() else each.float() for each in (a, b))
    dim = r.randrange(-a.dim(), a.dim()) if a.dim() else 0
    choices: list[Any] = [
        lambda: a + b, lambda: f - g, lambda: f * g, lambda: f / g, lambda: torch.maximum(f, g), lambda: a <= b,
        lambda: a == b, lambda: a > b, lambda: torch.where(a.bool(), f, g), lambda: f.masked_fill(b == 0, -INF),
        lambda: f.masked_fill(b == 0, 0.0), lambda: f.masked_fill(~b.bool(), -3e38), lambda: f @ g,
        lambda: f @ g.transpose(-1, -2), lambda: f.transpose(-1, -2) @ g, lambda: torch.cat([f, g], dim),
        lambda: torch.stack([f, g], dim), lambda: a.bool() & b.bool(), lambda: a.bool() | ~b.bool(),
        lambda: a.long() % b.long(), lambda: a[..., b.long().clamp(0, 1)], lambda: a[:, b[0].long()],
        lambda: f.gather(dim, b.long().clamp(0, 1)), lambda: F.scaled_dot_product_attention(f, g, g),
        lambda: F.scaled_dot_product_attention(f, f, g, is_causal=True),
        lambda: F.scaled_dot_product_attention(f, f, f, b.bool().unsqueeze(-2)),
        lambda: F.linear(f, g), lambda: F.embedding(a.long().clamp(0, 3), g),
        lambda: torch.where(a.bool(), 0.0, -INF) + g, lambda: torch.where(b.bool(), f, -3e38).softmax(-1),
        lambda: (f @ g.transpose(-1, -2)).masked_fill(~(a.sum(-1, keepdim=True).bool()), -INF).softmax(-1),
        lambda: torch.index_select(f, dim, b.long().reshape(-1).clamp(0, 1)),
        lambda: (f @ g.transpose(-1, -2)).softmax(-1) @ g, lambda: f.masked_fill(~b.bool(), -INF).softmax(-1) @ g,
    ]  # fmt: skip
    return r.choice(choices)()


class Program(torch.nn.Module):
    """Random operators, the same ones at each run; those that are not possible are left out."""

    def __init__(self, seed: int, steps: int = 14) -> None:
        super().__init__()
        self.seed, self.steps, self.skip = seed, steps, set[int]()

    def forward(self, x: Any, m: Any, i: Any, c: Any) -> list[Any]:
        values = [x, m, i, c]
        for step in range(self.steps):
            r = random.Random(self.seed * 1000 + step)
            few = values[:4] + values[-4:]
            a, b = r.choice(few), r.choice(few)
            if step in self.skip:
                continue
            values.append(_binary(r, a, b) if r.random() < 0.6 else _unary(r, a))
        return values[4:]


def _inputs(seed: int, size: int, special: bool, batch: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(seed + size)
    batch = batch if seed % 2 else 1  # every other program has a dynamic batch too
    x, c = torch.randn(batch, size, 4), torch.randn(4)
    if special:
        for each in (x.view(-1), c):
            spots = torch.randint(0, each.numel(), (2,))
            each[spots] = torch.tensor([INF, float("nan")])[torch.randperm(2)]
    return [x, torch.randint(0, 2, (batch, size)), torch.randint(0, 4, (batch, size)), c]


def _works(program: Program, step: int, seed: int) -> bool:
    """Return whether a step works, at two sizes; if not, leave it out."""
    program.steps, steps = step + 1, program.steps
    try:
        results = [program(*_inputs(seed, size, False)) for size in (5, 9)]
        if all(each.numel() <= 20000 for each in results[1]):
            return True
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
        pass
    finally:
        program.steps = steps
    program.skip.add(step)
    return False


def make(seed: int) -> ExportedProgram | None:
    """Export a random program."""
    program = Program(seed)
    program.skip = {step for step in range(program.steps) if not _works(program, step, seed)}
    dims = {0: Dim("b", min=1, max=8), 1: Dim("s", min=1, max=64)} if seed % 2 else {1: Dim("s", min=1, max=64)}
    try:
        exported = export(
            program, tuple(_inputs(seed, 7, False)), strict=False,
            dynamic_shapes={"x": dims, "m": dims, "i": dims, "c": None},
        )  # fmt: skip
        return exported.run_decompositions({})
    except Exception:
        return None  # the program branches on its size


class _All(Interpreter):
    def __init__(self, module: Any) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.failed: Node | None = None

    def run_node(self, n: Node) -> Any:
        try:
            return super().run_node(n)
        except Exception:
            self.failed = self.failed or n
            raise


def _run(program: ExportedProgram, inputs: list[torch.Tensor]) -> _All:
    interpreter = _All(program.graph_module)
    stored = [
        {**program.state_dict, **program.constants}[str(spec.target)]
        for spec in program.graph_signature.input_specs
        if spec.target is not None
    ]
    try:
        with torch.no_grad():
            interpreter.run(*stored, *inputs)
    except Exception:
        assert interpreter.failed is not None
    return interpreter


def check(seed: int) -> int:
    """Compare a random program with and without padding, value by value; return how many were compared."""
    program = make(seed)
    if program is None:
        return 0
    x = next(node for node in program.graph.nodes if node.name == "x")
    sizes = x.meta["val"].shape[:2] if seed % 2 else x.meta["val"].shape[1:2]
    symbols = {symbol for each in sizes for symbol in each.node.expr.free_symbols}
    compared = 0
    for assume in ({}, {"x": "finite", "c": "finite"}, {"m": "finite_rows"}):
        at = Positions(program, frozenset(symbols), assume)
        at.outputs()
        for size, padded in ((1, 4), (3, 8), (7, 8), (6, 17)):
            given = _inputs(seed, size, special=not assume or "m" in assume, batch=1 + size % 3)
            if "m" in assume:
                given[1][..., 0] = 1
            larger = [each.clone() for each in given]
            for number in range(3):
                more = (given[0].shape[0] + (1 if seed % 2 else 0), padded, *given[number].shape[2:])
                larger[number] = torch.zeros(more, dtype=given[number].dtype)
                larger[number][: given[0].shape[0], :size] = given[number]
            real, run = _run(program, given), _run(program, larger)
            for node in program.graph.nodes:
                if node is real.failed:
                    break
                if node is run.failed:
                    assert node in at._mixed, (seed, node, "fails with padding only")
                    break
                if node.op == "call_function" and node not in at._mixed:
                    compared += _compare(at, node, real.env[node], run.env[node], seed)
    return compared


def _compare(at: Positions, node: Node, real: Any, run: Any, seed: int) -> int:
    if not isinstance(real, torch.Tensor):
        return 0
    where = (seed, node.format_node(), tuple(real.shape), tuple(run.shape))
    kept = tuple(slice(0, size) for size in real.shape)
    assert all(dim in at.dims(node) for dim in range(real.dim()) if real.shape[dim] != run.shape[dim]), where
    torch.testing.assert_close(
        run[kept], real, equal_nan=True, rtol=1e-3, atol=1e-4, msg=lambda text: f"{where} {text}"
    )
    known = [(at.whole(node), run)]
    for dim in at.dims(node):
        behind = [*kept[:dim], slice(real.shape[dim], None), *kept[dim + 1 :]]
        known.append((at.pad(node, dim), run[tuple(behind)]))
        if dim in at.counts.get(node, {}):
            index = torch.arange(run.shape[dim]).reshape(-1, *[1] * (run.dim() - dim - 1))
            assert bool((run == index).all()), where
    for range_, values in known:
        values = values.double() if values.dtype is not torch.bool else values.long()
        assert range_.nan or not bool(values.isnan().any()), (where, range_)
        numbers = values[~values.isnan()]
        assert bool(((numbers >= range_.low) & (numbers <= range_.high)).all()), (where, range_, numbers)
    return 1


@pytest.mark.parametrize(("first", "enough"), [(1200, 600), (1204, 250), (1208, 150)])
def test_what_is_said_of_random_programs_holds(first: int, enough: int) -> None:
    more = int(os.environ.get("EXIR_LOWERING_EXAMPLES", "0"))
    assert sum(map(check, range(first, first + 4 + more))) > enough
