"""`refit` beside lowering the model again with the new weights: `python tests/benchmarks/refit.py`.

Each model has a process of its own. "first" is its first lowering, imports not included, as of somebody who has new
weights; the others are those of a process that has lowered the model before, which what torch and this package remember
helps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lowering_models import export_model
from torch.export import ExportedProgram

from exir_lowering import LoweringOptions, graphs, lower, refit

NAMES = ("mobilenet_v2", "minilm", "resnet_int8", "llama4_decode")
REPEAT = 5


def least(work: Callable[[], object], repeat: int = REPEAT) -> float:
    """Return the least of the times of several calls, in milliseconds."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times)


def with_weights(program: ExportedProgram, seed: int) -> ExportedProgram:
    """Return a program whose weights are all different."""
    torch.manual_seed(seed)
    copied, tied = graphs.copy_program(program), {}
    for name, old in copied.state_dict.items():
        if old.is_floating_point() and float(old.abs().max()) < 1e4:
            new = tied.setdefault((old.data_ptr(), old.shape), (torch.rand_like(old) * 0.2 + 0.1).detach())
            copied.state_dict[name] = torch.nn.Parameter(new) if isinstance(old, torch.nn.Parameter) else new
    return copied


def measure(name: str) -> dict[str, float]:
    """Return the times of one model, and whether the bytes are equal."""
    given, _ = export_model(name)
    options = LoweringOptions(refit=True)
    old, new = (with_weights(given, seed) for seed in (1, 2))
    first = least(lambda: lower(old, "xnnpack").emit(), 1)
    with tempfile.TemporaryDirectory() as folder:
        path = lower(old, "xnnpack", options=options).emit().save(Path(folder, "model.pte"))
        equal = bytes(refit(path, new.state_dict).buffer) == lower(new, "xnnpack", options=options).emit().buffer
        again = least(lambda: lower(new, "xnnpack", options=options).emit(), 3)
        plain = least(lambda: lower(new, "xnnpack").emit(), 3)
        times = {"refit": least(lambda: refit(path, new.state_dict)), "first": first, "again": again, "plain": plain}
        return {"bytes": path.stat().st_size, "equal": equal, **times}


def main() -> None:
    """Print a table, and the figures as JSON; of one model, its figures."""
    if sys.argv[1:]:
        print(json.dumps(measure(sys.argv[1])))
        return
    found = {}
    print("model, MB, refit ms, first lower + emit, lower(refit=True) + emit again, lower + emit again, equal")
    for name in NAMES:
        made = subprocess.run([sys.executable, __file__, name], check=True, capture_output=True, text=True).stdout
        one = found[name] = json.loads(made.splitlines()[-1])
        ratios = ", ".join(f"{one[key]:.0f} ms ({one[key] / one['refit']:.1f}x)" for key in ("first", "again", "plain"))
        print(f"{name}, {one['bytes'] / 1e6:.1f}, {one['refit']:.1f}, {ratios}, {one['equal']}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
