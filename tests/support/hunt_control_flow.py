"""Look for random models of conditions and loops whose files compute something else than the models.

python tests/support/hunt_control_flow.py FIRST COUNT
"""

from __future__ import annotations

import copy
import sys

import torch
from executorch.runtime import Runtime
from random_control_flow import RandomFlow
from torch.export import Dim, export

import exir_lowering
from exir_lowering import LoweringOptions

CALLS = ((4, 1.0, 0.3), (8, 2.0, 1.0), (2, 1.0, -1.0), (3, 1.0, 0.0), (7, 0.3, 0.0), (4, 3.0, -2.0))
"""Of each call how many rows it has where these may differ, and the deviation and mean of its numbers."""


def run_random(seed: int) -> str:
    """Lower the model of a seed and run its file in our way and in ExecuTorch's own; return what is wrong, or ""."""
    dynamic = seed % 3 == 0
    model, random = RandomFlow(seed, dynamic).eval(), torch.Generator().manual_seed(seed)
    calls = [torch.randn(rows if dynamic else 4, 4, generator=random) * by + mean for rows, by, mean in CALLS]
    shapes = ({0: Dim("n", min=2, max=9)},) if dynamic else None
    program = export(copy.deepcopy(model), (calls[0].clone(),), dynamic_shapes=shapes)
    options = LoweringOptions(memory_planner=("greedy", "naive")[seed % 2])  # type: ignore[arg-type]
    file = exir_lowering.lower(program, "xnnpack" if seed % 2 else None, options=options).emit().buffer
    ours, theirs = exir_lowering.load(file), Runtime.get().load_program(file)
    stock = theirs.load_method("forward")
    for number, call in enumerate(calls):
        with torch.no_grad():
            expected = [value.clone() for value in model(call.clone())]
        for results in (ours.run("forward", call), stock.execute([call])):
            for place, (got, value) in enumerate(zip(results, expected, strict=True)):
                if got.shape != value.shape or not torch.allclose(got, value, atol=2e-4, rtol=2e-4, equal_nan=True):
                    return f"seed {seed}, call {number}, result {place}: got {got}, expected {value}"
    return ""


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    found = [wrong for seed in range(first, first + count) if (wrong := run_random(seed))]
    print("\n".join(found) or f"{count} models, nothing wrong")
    raise SystemExit(bool(found))
