"""Look for random models of conditions, loops and many operators whose files compute something else than the models.

python tests/support/hunt_control_flow.py FIRST COUNT [--many]
"""

from __future__ import annotations

import argparse
import contextlib
import copy

import torch
from executorch.runtime import Runtime
from many_operators import ROWS
from random_control_flow import RandomFlow
from random_programs import NotExportable
from torch.export import Dim, export

import exir_lowering
from exir_lowering import LoweringError, LoweringOptions

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


def main() -> int:
    """Look at models; return 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--many", action="store_true", help="draw from many operators and from half precision")
    given = parser.parse_args()
    found: list[str] = []
    for seed in range(given.first, given.first + given.count):
        with contextlib.suppress(NotExportable, LoweringError):
            found += [wrong] if (wrong := run_random(seed, given.many)) else []
    print("\n".join(found) or f"{given.count} models, nothing wrong (some may be refused, by torch or by lower)")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
