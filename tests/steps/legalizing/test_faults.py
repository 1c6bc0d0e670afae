"""Each known fault of the runtime's kernels: ExecuTorch's own file has it, ours computes what eager mode does.

Where the last check of a test fails, a release has mended the kernel: its row in `faults.py` can go.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge
from torch.export import ExportedProgram, export
from torch.nn import functional as F

import exir_lowering
from exir_lowering import InputError
from exir_lowering.steps.legalizing.faults import FAULTS

HALF = (torch.float16, torch.bfloat16)
ROW = torch.linspace(-3, 5, 4096).reshape(2, 2048) % 1.7
WHOLE = torch.tensor([-9, -4, -1, 0, 5, 7, 2**53 + 1, 2**62 + 3])
ODD = torch.tensor([math.nan, -1.5, 2.5, math.inf, -0.0, 3.0, math.nan, 1.0, 0.0, -math.inf, 2.0, 5.0])
BYTES = torch.tensor([0, 3, 200, 255], dtype=torch.uint8)


class Function(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: torch.Tensor) -> Any:
        return self.function(*given)


Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


def halves(function: Callable[..., Any], *given: torch.Tensor) -> list[Case]:
    return [(function, tuple(each.to(dtype) for each in given)) for dtype in HALF]


CASES: dict[str, list[Case]] = {
    "half": [
        *halves(lambda x: x.var(-1), ROW),
        *halves(lambda x: torch.var_mean(x, -1), ROW),
        *halves(lambda x: x.cumsum(-1), ROW),
        *halves(lambda x, w: F.linear(x, w, w[:, 0]), ROW, ROW),
        *halves(lambda x, w: F.conv2d(x, w), ROW.reshape(1, 64, 8, 8), ROW[:, :576].reshape(2, 64, 3, 3)),
        *halves(lambda x: F.avg_pool2d(x, 32), 3 + ROW.reshape(1, 4, 32, 32)),
        *halves(lambda x: torch.zeros_like(x).scatter_add(1, torch.zeros(2, 2048, dtype=torch.int64), x), ROW),
        *((lambda x, m: F.batch_norm(x.reshape(8, 2, 256), m, m), (ROW.to(d), ROW[0, :2].abs() + 1)) for d in HALF),
    ],
    "half index": halves(
        lambda x: torch.zeros(2, 4, dtype=x.dtype).index_add(0, torch.zeros(1024, dtype=torch.int64), x.reshape(-1, 4)),
        ROW,
    ),
    "layer norm": [(lambda x: F.layer_norm(x.reshape(-1, 64), (64,)), (ROW + 1000,))],
    "half layer norm": halves(lambda x: F.layer_norm(x, (256,)), ROW[:, :256]),
    "group norm": [(lambda x: F.group_norm(x.reshape(2, 4, -1), 2), (ROW + 1000,))],
    "batch norm": [(lambda x: F.instance_norm(x.reshape(1, 4, -1)), (ROW + 1000,))],
    "remainder": [
        (lambda x: x % 3, (WHOLE,)),
        (lambda x, y: x % y, (WHOLE, torch.tensor([-4, 3, 5, -7, 2, -3, 10, 7]))),
        (lambda x: torch.fmod(x, 3), (WHOLE,)),
        (lambda x: x % 5, (WHOLE.to(torch.int32),)),
    ],
    "division": [
        (lambda x: torch.div(x, 3, rounding_mode="trunc"), (WHOLE,)),
        (lambda x: x // torch.zeros_like(x), (ODD,)),
    ],
    "power": [(lambda x: x**2, (WHOLE,)), (lambda x, y: x**y, (WHOLE, WHOLE[:1].abs()))],
    "whole": [(torch.ceil, (torch.tensor([2**63 - 1, 3, -7]),))],
    "shift": [(lambda x: torch.bitwise_left_shift(x, torch.tensor([64, 1, 70, 3])), (WHOLE[:4],))],
    "mask": [(lambda x, y: torch.masked_select(x, y), (ODD[:3], ODD.reshape(4, 3) > -9))],
    "sign": [(torch.sign, (ODD,))],
    "clamp": [(lambda x: x.clamp(-2, 5), (BYTES,))],
    "copy": [(lambda x: x.to("cpu", torch.float64, non_blocking=True, copy=True), (ROW,))],
    "pool backward": [
        (
            lambda g, x: torch.ops.aten.max_pool2d_with_indices_backward(
                g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, F.max_pool2d(x, 2, return_indices=True)[1]
            ),
            (ROW[:1, :256].reshape(1, 1, 16, 16), ROW.reshape(1, 4, 32, 32)[:, :1]),
        )
    ],
    "transform": [(lambda x: torch.view_as_real(torch.fft.rfft(x, dim=0)), (ROW[:, :64].reshape(8, 16),))],
    "copy to complex": [(lambda x: torch.view_as_real(x.to(torch.complex64)), (WHOLE[:4],))],
    "complex to another type": [
        (lambda x: torch.view_as_real(torch.fft.rfft(x).to(torch.complex128)), (ROW[:, :8],)),
    ],
    "complex shapes": [
        (lambda x, f=f: torch.view_as_real(f(torch.fft.rfft(x), torch.fft.rfft(x[:1]))), (ROW[:, :8],))
        for f in (torch.add, torch.sub, torch.div)
    ]
    + [(lambda x: torch.view_as_real(torch.fft.rfft(x) * 0.5), (ROW[:, :8],))],
    "complex": [
        (lambda x: torch.view_as_real(torch.full_like(torch.complex(x, x), 1.0)), (ROW[0, :2],)),
        (lambda x: torch.view_as_real(-torch.fft.rfft(x)), (ROW[:, :8],)),
        (lambda x: torch.view_as_real(torch.fft.rfft(x).flip(0)), (ROW[:, :8],)),
    ],
    "max pool": [(lambda x: F.max_pool2d(x.reshape(1, 1, 3, 4), 2, 1), (ODD,))],
    "empty": [(lambda x: x[:0].reshape(4, 0, 3).amax(2), (ODD,))],
    "empty rows": [(lambda x: x[:0].reshape(4, 0).log_softmax(-1), (ODD,))],
    "no dimension": [(lambda x: x[3].sum(0), (ODD,))],
}


# The cure of the one would make a size that depends on data, and the others have none.
REFUSED = {"mask", "complex", "complex to another type"}
ENDS = {"empty", "empty rows", "no dimension"}  # ExecuTorch's own files end the process


def run_by_executorch(program: ExportedProgram, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor] | None:
    """Return what a file of ExecuTorch's own makes, None if it does not run."""
    try:
        edge = to_edge(program, compile_config=EdgeCompileConfig(_check_ir_validity=False))
        return exir_lowering.load(edge.to_executorch().buffer).run("forward", *given)
    except (InputError, RuntimeError):
        return None


def are_right(got: list[torch.Tensor], function: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> bool:
    expected = torch.utils._pytree.tree_leaves(function(*given))
    for result, eager in zip(got, expected, strict=True):
        if result.dtype is not eager.dtype or result.shape != eager.shape:
            return False
        if not eager.is_floating_point():
            if not torch.equal(result, eager):
                return False
            continue
        exact = torch.utils._pytree.tree_leaves(function(*(each.double() for each in given)))
        (true,) = [each for each, other in zip(exact, expected, strict=True) if other is eager]
        finite = eager.isfinite()
        odd = torch.equal(result[~finite].nan_to_num(), eager[~finite].nan_to_num())
        if not odd or not result[finite].isfinite().all():
            return False
        if not finite.any():
            continue
        allowed = 4 * max(float((eager[finite] - true[finite]).abs().max()), torch.finfo(eager.dtype).eps)
        if float((result[finite] - true[finite]).abs().max()) > allowed:
            return False
    return True


def test_every_fault_has_a_reproduction() -> None:
    assert {fault.name for fault in FAULTS} == CASES.keys()


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, cases in CASES.items() for number in range(len(cases))]
)
def test_a_fault_is_there_and_not_in_our_files(name: str, number: int) -> None:
    function, given = CASES[name][number]
    program = export(Function(function), given)
    if name in REFUSED:
        with pytest.raises(InputError, match="do not run there"):
            exir_lowering.lower(program)
    else:
        got = exir_lowering.load(exir_lowering.lower(program).emit().buffer).run("forward", *given)
        assert are_right(got, function, given)
    if name not in ENDS:
        theirs = run_by_executorch(program, given)
        assert theirs is None or not are_right(theirs, function, given)
