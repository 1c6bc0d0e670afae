"""Random models: conditions, loops, many operators, casts, writes in place, with state and tensors made inside."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from executorch.runtime import Runtime
from functorch.experimental.control_flow import map as torch_map
from many_operators import ROWS
from random_programs import NotExportable
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim, ExportedProgram, export

import exir_lowering
from exir_lowering import LoweringOptions

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


class Transposed(torch.nn.Module):
    """A layer over channels that come last."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


_LAYERS: Sequence[Callable[[], torch.nn.Module]] = (
    lambda: torch.nn.Linear(4, 4),
    lambda: torch.nn.Linear(4, 4, bias=False),
    lambda: torch.nn.LayerNorm(4),
    lambda: torch.nn.RMSNorm(4),
    lambda: torch.nn.Dropout(0.5),
    lambda: torch.nn.GRU(4, 4, batch_first=True),
    lambda: torch.nn.LSTM(4, 2, batch_first=True, bidirectional=True),
    lambda: torch.nn.PReLU(),
    lambda: torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=True),
    lambda: Transposed(torch.nn.Conv1d(4, 4, 3, padding=1, groups=2)),
    lambda: Transposed(torch.nn.BatchNorm1d(4)),
)


class RandomFlow(torch.nn.Module):
    """The model of a seed; it takes a tensor of shape (n, 4), where n may differ from call to call if `dynamic`.

    Half of its functions of one value are drawn from `functions`; its numbers are of one type of floats. With
    `steps` it has layers, casts and writes in place too, and fewer conditions and loops.
    """

    def __init__(
        self,
        seed: int,
        dynamic: bool,
        functions: Sequence[Callable[[Any], Any]] = (),
        dtype: Any = torch.float32,
        steps: bool = False,
    ) -> None:
        super().__init__()
        self._r, self._dynamic, self._functions, self._steps = random.Random(seed), dynamic, functions, steps
        torch.manual_seed(seed)
        self.weight = torch.nn.Parameter((torch.randn(4) * 0.5).to(dtype))
        self.register_buffer("state", torch.zeros(4, dtype=dtype))
        self.layers = torch.nn.ModuleList(make().to(dtype) for make in _LAYERS if steps)
        self.block = self._block(1, self._r.choice([0, 0, 0, 0, 0, 1] if steps else [1, 2, 2]), most=8 if steps else 6)
        self.results = [self._r.random() for _ in range(self._r.randint(1, 4))]
        self.reads, self.writes = self._r.random() < 0.6, self._r.random() < (0.15 if steps else 0.6)

    def forward(self, x: torch.Tensor) -> Any:
        values = self.block(self, [x + self.state if self.reads else x])
        if self.writes:
            self.state.copy_(torch.tanh(self.state * 0.5 + values[-1].sum(0)))
        # Where one is returned twice, or the input, torch wants copies.
        return tuple(values[int(place * len(values))] * 1 for place in self.results)

    def _block(self, count: int, depth: int, most: int = 3) -> Callable[..., list[Any]]:
        """Make a function that takes some values, and returns them with those that it computes."""
        makers = [self._unary, self._binary, self._made, self._weighted, *[self._unary] * 4 * bool(self._functions)]
        if self._steps:  # constants with a content that is known leave a step of the conversion to ExecuTorch
            makers += [self._layer, self._cast, self._written]
            if self._r.random() < 0.7:
                makers.remove(self._made)
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

    def _layer(self, count: int, depth: int) -> Block:
        a, which = self._one_of(count), self._r.randrange(len(_LAYERS))

        def call(m: RandomFlow, v: list[Any]) -> Any:
            made = m.layers[which](v[a].reshape(1, -1, 4))
            return (made[0] if isinstance(made, tuple) else made).reshape(v[a].shape)

        return call

    def _cast(self, count: int, depth: int) -> Block:
        a, kind = self._one_of(count), self._r.choice([torch.float64, torch.float32, torch.float16])
        return lambda m, v: v[a] * 0.5 + (v[a] * 3).to(kind).to(v[a].dtype)

    def _written(self, count: int, depth: int) -> Block:
        """Write in place, in part or through a view, into a copy."""
        a, b = self._one_of(count), self._one_of(count)
        write = self._r.choice(
            [
                lambda u, w: u.add_(w),
                lambda u, w: u[..., :2].mul_(2),
                lambda u, w: u.view(-1).sub_(1),
                lambda u, w: u.t().copy_(w.t()) if u.dim() == 2 else u.clamp_(-1, 1),
                lambda u, w: u.select(-1, 1).copy_(w.select(-1, 0)),
            ]
        )

        def call(m: RandomFlow, v: list[Any]) -> Any:
            written = v[a].clone()
            write(written, v[b])
            return written * 1

        return call

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


CALLS = ((4, 1.0, 0.3), (8, 2.0, 1.0), (2, 1.0, -1.0), (3, 1.0, 0.0), (7, 0.3, 0.0), (4, 3.0, -2.0))
"""Of each call how many rows it has where these may differ, and the deviation and mean of its numbers."""

TYPES = (torch.float32, torch.float16, torch.bfloat16)


def run_random(seed: int, many: bool = False) -> str:
    """Lower the model of a seed and run its file in our way and in ExecuTorch's own; return what is wrong, or "".

    Args:
        seed: The seed.
        many: Whether it draws from many operators and from half precision, in which it may be as wrong as eager
            PyTorch is, four times over.
    """
    dynamic, dtype = seed % 3 == 0, TYPES[seed // 3 % 3 if many else 0]
    given = {"functions": ROWS, "dtype": dtype} if many else {}
    model, random = RandomFlow(seed, dynamic, **given).eval(), torch.Generator().manual_seed(seed)
    exact = copy.deepcopy(model).double()
    calls = [
        (torch.randn(rows if dynamic else 4, 4, generator=random) * by + mean).to(dtype) for rows, by, mean in CALLS
    ]
    shapes = ({0: Dim("n", min=2, max=9)},) if dynamic else None
    try:
        program = export(copy.deepcopy(model), (calls[0].clone(),), dynamic_shapes=shapes)
    except Exception as error:  # torch raises what it likes
        raise NotExportable(str(error)) from error
    options = LoweringOptions(memory_planner=("greedy", "naive")[seed % 2])  # type: ignore[arg-type]
    file = exir_lowering.lower(program, "xnnpack" if seed % 2 else None, options=options).emit().buffer
    ours, theirs = exir_lowering.load(file), Runtime.get().load_program(file)
    stock = theirs.load_method("forward")
    for number, call in enumerate(calls):
        with torch.no_grad():
            expected = [value.clone() for value in model(call.clone())]
            true = [value.clone() for value in exact(call.double())] if many else expected
        allowed = [_allowed(*pair) for pair in zip(expected, true, strict=True)]
        if max(allowed) > 0.1:  # rounding decides, in eager PyTorch too: a condition, or a difference of large numbers
            return ""
        for results in (ours.run("forward", call), stock.execute([call])):
            for place, (got, value, most) in enumerate(zip(results, true, allowed, strict=True)):
                if got.shape != value.shape or got.dtype != dtype or not _near(got, value, most):
                    return f"seed {seed}, call {number}, result {place}: got {got}, expected {value} within {most:.2g}"
    return ""


def _allowed(expected: torch.Tensor, true: torch.Tensor) -> float:
    """Return four times eager PyTorch's own largest error, and what rounding may add."""
    error = (expected.double() - true.double()).nan_to_num(posinf=0, neginf=0).abs().max().item()
    scale = max(1.0, true.double().nan_to_num(posinf=0, neginf=0).abs().max().item())
    return 4 * error + max(2e-4, torch.finfo(expected.dtype).eps) * scale


def _near(got: torch.Tensor, value: torch.Tensor, most: float) -> bool:
    return torch.allclose(got.double(), value.double(), atol=most, rtol=0, equal_nan=True)


def export_random(seed: int, calls: int = 3) -> tuple[str, ExportedProgram, list[tuple[torch.Tensor]]]:
    """Return a name, the program of a seed, which draws from all operators, and inputs of consecutive calls."""
    dynamic, generator = seed % 4 == 0, torch.Generator().manual_seed(seed)
    model = RandomFlow(seed, dynamic, functions=ROWS, dtype=TYPES[seed // 4 % 2], steps=True)
    given = [
        torch.randn(rows if dynamic else 4, 4, generator=generator) * by + mean for rows, by, mean in CALLS[:calls]
    ]
    inputs = [(one.to(model.weight.dtype),) for one in given]
    shapes = ({0: Dim("n", min=2, max=9)},) if dynamic else None
    program = export(model.train(seed % 5 == 1), (inputs[0][0].clone(),), dynamic_shapes=shapes, strict=False)
    return f"{len(program.graph.nodes)} nodes", program, inputs
