"""What exporters patch in ExecuTorch and torch before they lower: without those patches files are right, or refused.

Each row is a program by which ExecuTorch's own lowering, as far as it is at fault, fails; several it does right by now.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.runtime import Runtime
from torch import Tensor
from torch.export import Dim, export
from torch.nn import functional as F

from exir_lowering import InputError, LoweringOptions, load, lower
from exir_lowering.compat import patch_executorch


class Program(torch.nn.Module):
    """A function of a module with a parameter, buffers and layers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._function = function
        self.table = torch.nn.Parameter(torch.randn(1, 64))
        self.linear, self.conv, self.act = torch.nn.Linear(4, 4), torch.nn.Conv1d(4, 6, 3), torch.nn.PReLU(3)
        self.register_buffer("state", torch.zeros(4))
        self.register_buffer("count", torch.ones(4))

    def forward(self, *args: Any) -> Any:
        return self._function(self, *args)


@dataclass(frozen=True)
class Row:
    """A program, how its inputs are made, and the sizes that they have in the calls."""

    function: Callable[..., Any]
    make: Callable[..., tuple[Any, ...]]
    sizes: tuple[tuple[int, ...], ...] = ((), ())
    dynamic: Any = None
    not_core: list[Any] = field(default_factory=list)  # what ExecuTorch's own conversion has to be told to let through


def _windows(m: Any, x: Tensor) -> Tensor:
    _, h, w, c = x.shape
    parts = x.view(1, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 2, 2, c) * 2
    images = parts.shape[0] // (h * w // 4)
    return parts.view(images, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(images, h, w, c)


def _slice(m: Any, x: Tensor, given: Tensor) -> Any:
    size = given.max().item()
    torch._check(size >= 0)
    torch._check(size <= 8)
    part = x[:, :size]
    return (part.transpose(1, 2) + 1).contiguous(), (part * 2).transpose(0, 1).contiguous() - 1


def _count(m: Any, ids: None, x: Tensor) -> Any:
    m.state.add_(x.sum(0))
    return m.linear(x) * 2.5 + torch.tensor([1.0, 2, 3, 4]) + m.state, x.int() * 3 + torch.tensor([7, 8, 9, 10])


def _counted(m: Any, x: Tensor) -> Tensor:
    m.count.mul_(2)
    return m.linear(x) * m.count


def _deep(m: Any, x: Tensor) -> Tensor:
    size = x.shape[0]
    for _ in range(8):
        size = size // 2 + (size + 1) // 3 + 2
    return torch.cat([x, x.new_zeros(size, 4)]) + 1


def _clones(m: Any, x: Tensor) -> Any:
    y = m.linear(x).permute(1, 0)
    return y, y.contiguous(), F.dropout(y, 0.1, False), y.clone() + 1


def _pad(m: Any, x: Tensor) -> Any:
    return F.pad(m.linear(x), (0, 2), value=-math.inf), F.pad(x * 2, (0, 1), value=math.nan)


def _attend(m: Any, q: Tensor, k: Tensor) -> Tensor:
    found = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    return found.transpose(1, 2).reshape(1, q.shape[2], -1)


def _repeat(m: Any, q: Tensor, k: Tensor) -> Tensor:
    size = k.shape[2]
    return q @ k[:, :, None].expand(1, 2, 2, size, 8).reshape(1, 4, size, 8).transpose(2, 3)


def _rows(n: int = 3) -> tuple[Tensor]:
    return (torch.randn(n, 4),)


def _heads(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(1, 4, n, 8), torch.randn(1, 2, n, 8)


def _sized(function: Callable[[Tensor], Any], sizes: tuple[tuple[int, ...], ...] = ((13,), (8,))) -> Row:
    return Row(lambda m, x: function(x), _rows, sizes, {0: Dim.AUTO})


_n, _h, _w = Dim("n", min=2, max=32), Dim("h", min=2, max=8), Dim("w", min=2, max=8)
_IMAGE = {"make": lambda h=6, w=6: (torch.randn(1, 2, h, w),)}

ROWS: dict[str, Row] = {
    # upper bounds of dynamic dimensions
    "windows": Row(_windows, lambda h, w: (torch.randn(1, h, w, 2),), ((8, 8), (16, 4)), {1: 2 * _h, 2: 2 * _w}),
    "ratio": _sized(lambda x: torch.cat([x.new_ones(x.shape[0] // (x.shape[0] // 2), 4), x * 2])),
    "no bound": _sized(lambda x: (x * 2).reshape(x.shape[0] * 4 // 2, 2)),
    # empty tensors in a concatenation
    "empty": Row(lambda m, x: torch.cat([x[:, :0], x[:, 4:]]).sum(1) + x.sum(), _rows, ((8,), (5,)), {0: _n}),
    # complex numbers
    "complex": Row(
        lambda m, x: (torch.fft.rfft(x).abs(), torch.fft.irfft(torch.fft.rfft(x * 2) * torch.fft.rfft(x))),
        _rows,
    ),
    # orders of dimensions
    "unknown strides": Row(_slice, lambda n=3: (torch.randn(2, 8, 4), torch.tensor([n, 1])), ((3,), (8,))),
    "expanded input": Row(lambda m, x: x * 2 + 1, lambda: (torch.randn(1, 4).expand(3, 4),)),
    "transposed": Row(lambda m, x: x.transpose(0, 1).clone() + 1, _rows),
    # what is written back, and lifted constants, with an input that is None
    "none": Row(_count, lambda n=3: (None, torch.randn(n, 4))),
    # a view with dynamic sizes of a table without
    "table": Row(
        lambda m, x: (m.table.reshape(1, x.shape[0], x.shape[1], -1) * 2).sum(-1) + x,
        _rows,
        ((4,), (2,)),
        {0: Dim.AUTO},
    ),
    # guards that are long
    "long guards": Row(_deep, _rows, ((16,), (9,)), {0: Dim("n", min=4, max=64)}),
    # functions of sizes
    "max": _sized(lambda x: (x[: torch.sym_min(x.shape[0], 6)] * 2, x.new_ones(torch.sym_max(x.shape[0], 9), 2))),
    "ite": _sized(lambda x: x.new_ones(torch.sym_ite(x.shape[0] > 10, x.shape[0], x.shape[0] + 3), 2)),
    "sum": _sized(lambda x: x.new_ones(torch.sym_sum([x.shape[0], x.shape[0], 3]), 2)),
    "power": _sized(lambda x: x.new_ones(x.shape[0] ** 2, 2)),
    "padding": _sized(lambda x: (F.pad(x, (0, 0, 0, -x.shape[0] % 5)), x * ((x.shape[0] - 10) % 7))),
    "floor": _sized(lambda x: x.new_ones(math.floor(x.shape[0] / 3), 2)),
    "float": _sized(lambda x: x * torch.sym_float(x.shape[0]) / 3),
    # state that does not start at 0
    "first state": Row(_counted, _rows),
    # XNNPACK
    "softmax": Row(
        lambda m, x: torch.softmax(x - x.max(3, keepdim=True).values, -1), lambda: (torch.randn(2, 4, 8, 9),)
    ),
    "clones": Row(_clones, _rows),
    "prelu": Row(lambda m, x: m.act(m.linear(x)), lambda: (torch.randn(2, 3, 4),)),
    "seven dimensions": Row(
        lambda m, x: (x.view(2, 1, 2, 1, 3, 1, 4) * x.view(1, 2, 1, 2, 3, 4, 1).exp()).sum((1, 6)) + 1,
        lambda: (torch.randn(2, 2, 3, 4),),
    ),
    "not finite": Row(_pad, _rows),
    "squeeze": Row(
        lambda m, x: m.conv(x).relu() + (x[:, :1] * 2).unsqueeze(-1).squeeze(-1)[:, :, 2:],
        lambda b, t: (torch.randn(b, 4, t),),
        ((2, 16), (3, 21)),
        {0: Dim("b", min=1, max=4), 2: Dim("t", min=8, max=64)},
    ),
    "maximum": Row(lambda m, x: x.max(-1, keepdim=True).values, **_IMAGE),
    "vector": Row(
        lambda m, x: (F.linear(x, m.linear.bias) + 1, F.linear(x[None], m.linear.bias, torch.tensor(0.5)) * 2),
        _rows,
        ((5,), (8,)),
        {0: _n},
    ),
    # torch's
    "pool": Row(
        lambda m, x: F.adaptive_avg_pool2d(x, (2, 4)), sizes=((6, 6), (8, 7)), dynamic={2: _h, 3: _w}, **_IMAGE
    ),
    "running maximum": Row(
        lambda m, x: (*torch.cummax(x, 1), torch.cummin(x.long(), 1).values),
        lambda n: (torch.randn(3, n),),
        ((6,), (9,)),
        {1: _n},
        [torch.ops.aten.cummax.default, torch.ops.aten.cummin.default],
    ),
    "coins": Row(
        lambda m, x: (torch.bernoulli((x > 0).float()), torch.bernoulli(x, 1.0)),
        _rows,
        not_core=[torch.ops.aten.bernoulli.default, torch.ops.aten.bernoulli.p],
    ),
    "grouped heads": Row(_attend, _heads, ((5,), (7,)), {2: _n}),
    "expand": Row(_repeat, _heads, ((5,), (7,)), {2: _n}),
}


def _file(row: Row, program: Any, engine: str, partitioners: list[Any]) -> bytes:
    if engine == "lower":
        return lower(program, partitioners or None).emit().buffer
    config = EdgeCompileConfig(_core_aten_ops_exception_list=list(row.not_core))
    with patch_executorch():
        edge = to_edge_transform_and_lower(program, partitioner=partitioners, compile_config=config)
        return bytes(edge.to_executorch().buffer)


@pytest.mark.parametrize("partitioners", [[], [XnnpackPartitioner()]], ids=["host", "xnnpack"])
@pytest.mark.parametrize("engine", ["lower", "patched"])
@pytest.mark.parametrize("name", ROWS)
def test_files_are_right_without_patches(name: str, engine: str, partitioners: list[Any]) -> None:
    row = ROWS[name]
    if (row.not_core or name == "first state") and engine == "patched" and not partitioners:
        pytest.skip("without a partitioner, ExecuTorch does not call this engine")
    model = Program(row.function).eval()
    example = row.make(*row.sizes[0])
    dynamic = None if row.dynamic is None else (tuple(row.dynamic for _ in example),)
    file = _file(row, export(model, example, dynamic_shapes=dynamic, strict=False), engine, partitioners)
    if engine == "lower":
        loaded = load(file)
        results: Callable[..., Any] = lambda *inputs: loaded.run("forward", *inputs)  # noqa: E731
    else:
        method = Runtime.get().load_program(file).load_method("forward")
        results = lambda *inputs: method.execute(list(inputs))  # noqa: E731
    for sizes in row.sizes * 2:
        inputs = row.make(*sizes)
        expected = torch.utils._pytree.tree_leaves(model(*inputs))
        given = [value.contiguous() if isinstance(value, Tensor) else value for value in inputs]
        torch.testing.assert_close([*results(*given)], expected, equal_nan=True)


def test_bounds_are_exact() -> None:
    """What takes a dimension's maximum for each of two that depend on it takes thousands of times the memory."""
    row = ROWS["windows"]
    sizes = {1: 2 * Dim("h", min=2, max=64), 2: 2 * Dim("w", min=2, max=64)}
    lowered = lower(export(Program(_windows).eval(), row.make(8, 8), dynamic_shapes=((sizes,),)))
    memory = lowered.emit().report.methods[0].memory
    assert memory is not None
    assert memory.bytes < 16 * 128 * 128 * 2 * 4


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("pow", lambda x: x * x.shape[0] ** 0.5),
        ("and", lambda x: x * (x.shape[0] & 3)),
        ("mod", lambda x: x * (x.shape[0] / 4 % 3)),
        ("sym_max", lambda x: x * torch.sym_max(x.shape[0], 2.5)),
    ],
)
def test_functions_without_an_instruction_are_refused_with_their_line(name: str, function: Any) -> None:
    row = _sized(function)
    program = export(Program(row.function).eval(), _rows(5), dynamic_shapes=(({0: _n},),))
    with pytest.raises(InputError, match=rf"{name}.*test_exporter_defects.py.*a file has no instruction for"):
        lower(program, options=LoweringOptions())
