"""Random models of conditions and loops: in a row, in each other, with state and with tensors that they make inside."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.experimental.control_flow import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

Block = Callable[["RandomFlow", list[Any]], Any]
"""Computes a value, of the shape of the first, from values of one shape."""

_ONE: Sequence[Callable[[Any], Any]] = (
    torch.tanh,
    lambda v: v * 0.5 + 1,
    lambda v: torch.sin(v * 3),
    lambda v: v - v.mean(-1, keepdim=True),
    lambda v: v.flip(0),
    lambda v: torch.sigmoid(v).view(-1).view(v.shape),
)


class RandomFlow(torch.nn.Module):
    """The model of a seed; it takes a tensor of shape (n, 4), where n may differ from call to call if `dynamic`.

    Half of its functions of one value are drawn from `functions`; its numbers are of one type of floats.
    """

    def __init__(
        self, seed: int, dynamic: bool, functions: Sequence[Callable[[Any], Any]] = (), dtype: Any = torch.float32
    ) -> None:
        super().__init__()
        self._r, self._dynamic, self._functions = random.Random(seed), dynamic, functions
        torch.manual_seed(seed)
        self.weight = torch.nn.Parameter((torch.randn(4) * 0.5).to(dtype))
        self.register_buffer("state", torch.zeros(4, dtype=dtype))
        self.block = self._block(1, self._r.choice([1, 2, 2]), most=6)
        self.results = [self._r.random() for _ in range(self._r.randint(1, 4))]
        self.reads, self.writes = self._r.random() < 0.6, self._r.random() < 0.6

    def forward(self, x: torch.Tensor) -> Any:
        values = self.block(self, [x + self.state if self.reads else x])
        if self.writes:
            self.state.copy_(torch.tanh(self.state * 0.5 + values[-1].sum(0)))
        # Where one is returned twice, or the input, torch wants copies.
        return tuple(values[int(place * len(values))] * 1 for place in self.results)

    def _block(self, count: int, depth: int, most: int = 3) -> Callable[..., list[Any]]:
        """Make a function that takes some values, and returns them with those that it computes."""
        makers = (self._unary, self._binary, self._made, self._weighted, *[self._unary] * 4 * bool(self._functions))
        nested = (self._cond, self._cond, self._cond, self._map, self._scan, self._while)
        steps = []
        for _ in range(self._r.randint(2, most)):
            maker = self._r.choice(nested if depth and self._r.random() < 0.6 else makers)
            steps.append(maker(count + len(steps), depth))

        def block(m: RandomFlow, values: list[Any]) -> list[Any]:
            values = list(values)
            for step in steps:
                values.append(step(m, values))
            return values

        return block

    def _one_of(self, count: int) -> int:
        return count - 1 - min(int(self._r.expovariate(0.6)), count - 1)

    def _unary(self, count: int, depth: int) -> Block:
        a, op = self._one_of(count), self._r.choice(self._functions or _ONE)
        # torch wants branches whose results have the same strides.
        return lambda m, v: op(v[a]).contiguous() if self._functions else op(v[a])

    def _binary(self, count: int, depth: int) -> Block:
        a, b = self._one_of(count), self._one_of(count)
        return self._r.choice([lambda m, v: v[a] * 0.5 + v[b], lambda m, v: v[a] * torch.sigmoid(v[b])])

    def _weighted(self, count: int, depth: int) -> Block:
        a = self._one_of(count)
        return lambda m, v: v[a] * m.weight

    def _made(self, count: int, depth: int) -> Block:
        a, number = self._one_of(count), self._r.choice([0.5, -1.0, 2.0])
        return self._r.choice(
            [
                lambda m, v: v[a] * torch.tensor(number),
                lambda m, v: v[a] + torch.tensor([number, 1.0, -0.5, 0.25]).to(v[a].dtype),
                lambda m, v: v[a] - torch.full((4,), number).to(v[a].dtype),
                lambda m, v: v[a] * 0.1 + torch.arange(4),
            ]
        )

    def _predicate(self, count: int) -> Callable[[list[Any]], Any]:
        a, bound = self._one_of(count), self._r.choice([-0.5, 0.0, 0.5, 1.0])
        few, many = sorted(self._r.sample(range(2, 8), 2))
        if self._dynamic and self._r.random() < 0.5:
            return self._r.choice(
                [
                    lambda v: v[0].shape[0] > few,
                    lambda v: (v[0].shape[0] > few) & (v[0].shape[0] < many),
                    lambda v: (v[0].shape[0] < few) | (v[0].shape[0] == many),
                    lambda v: v[0].shape[0] != many,
                ]
            )
        return self._r.choice([lambda v: v[a].sum() > bound, lambda v: v[a].max() > bound])

    def _cond(self, count: int, depth: int) -> Block:
        predicate, operands = self._predicate(count), [self._one_of(count) for _ in range(self._r.randint(1, 2))]
        operands = list(dict.fromkeys(operands))
        branches = [self._block(len(operands), depth - 1) for _ in range(2)]
        several = self._r.random() < 0.4

        def call(m: RandomFlow, v: list[Any]) -> Any:
            def branch(block: Any) -> Any:
                def run(*given: Any) -> Any:
                    made = block(m, list(given))
                    return (made[-1] + 0.5, made[-2] * 0.5) if several else made[-1]

                return run

            # What is given twice, as another value or as a view of one, is refused by torch.
            found = torch.cond(predicate(v), *map(branch, branches), tuple(v[one] for one in operands))
            return found[0] - found[1] if several else found

        return call

    def _map(self, count: int, depth: int) -> Block:
        a, block = self._one_of(count), self._block(1, 0)
        return lambda m, v: torch_map(lambda row: block(m, [row])[-1], v[a])

    def _scan(self, count: int, depth: int) -> Block:
        a, block = self._one_of(count), self._block(2, 0)

        def step(m: RandomFlow, carry: Any, row: Any) -> Any:
            made = block(m, [carry, row])
            return torch.tanh(made[-1]), made[-2] + 1

        def call(m: RandomFlow, v: list[Any]) -> Any:
            last, rows = scan(lambda carry, row: step(m, carry, row), m.weight * 1, v[a])
            return rows + last

        return call

    def _while(self, count: int, depth: int) -> Block:
        a, block, times = self._one_of(count), self._block(1, 0), self._r.randint(0, 3)

        def call(m: RandomFlow, v: list[Any]) -> Any:
            start = torch.zeros((), dtype=torch.int64)
            return while_loop(
                lambda i, u: i < times, lambda i, u: (i + 1, torch.tanh(block(m, [u])[-1])), (start, v[a] * 1)
            )[1]

        return call
