"""One engine's extra peak memory, in a process of its own: `memory.py ours|upstream MEGABYTES METHODS`."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
from executorch.exir import to_edge
from executorch.exir.backend.backend_api import MethodProgramsPartitionerSpec, to_backend
from torch.export import ExportedProgram, export

sys.path.insert(0, str(Path(__file__).parent))

from chains import EachBlock

import exir_lowering


class _Model(torch.nn.Module):
    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(megabytes * 250_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin((x + self.weight) * x)


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit(f"{field} is not in /proc/self/status: this benchmark needs Linux")


def main(engine: str, megabytes: int, count: int) -> None:
    """Print the megabytes by which the peak rose above what was in use before lowering."""
    model = _Model(megabytes).eval()
    programs: dict[str, ExportedProgram] = {
        f"method_{i}": to_edge(export(model, (torch.ones(1),))).exported_program() for i in range(count)
    }
    warm = {"warm": to_edge(export(_Model(1).eval(), (torch.ones(1),))).exported_program()}
    for run in (warm, programs):
        gc.collect()
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is in use
        if engine == "ours":
            kept = exir_lowering.to_backend(run, {name: EachBlock() for name in run})
        else:
            kept = to_backend(MethodProgramsPartitionerSpec(run, {name: EachBlock() for name in run}))
        peak = _status("VmHWM")
    del kept
    print(max(0.0, peak - before))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
