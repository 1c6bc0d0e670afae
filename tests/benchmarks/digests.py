"""What the digests in emitted files cost, on the sentence-embedding model of the demo: emission, load, bytes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from exir_lowering import load, lower
from exir_lowering.cli import embeddings
from exir_lowering.pte import digests

REPEAT = 7
LENGTH = embeddings.LENGTHS["short"]
INPUTS = (torch.ones(1, LENGTH, dtype=torch.long), torch.ones(1, LENGTH, dtype=torch.long))


def least(work: Callable[..., object], *args: Any, **options: Any) -> float:
    """Return the least of the times of several calls, in milliseconds."""
    times = []
    for _ in range(REPEAT):
        start = time.perf_counter()
        work(*args, **options)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def hashing(work: Callable[[], object]) -> float:
    """Return how long the digests take in a call, in milliseconds; the least of several calls."""
    write, spent = digests.RangeDigests.write, []

    def timed(self: digests.RangeDigests, data: Any) -> int:
        start = time.perf_counter()
        size = write(self, data)
        spent[-1] += (time.perf_counter() - start) * 1e3
        return size

    digests.RangeDigests.write = timed  # type: ignore[method-assign]
    try:
        for _ in range(REPEAT):
            spent.append(0.0)
            work()
    finally:
        digests.RangeDigests.write = write  # type: ignore[method-assign]
    return min(spent)


def measure(program: Any, external: str | None, folder: Path) -> None:
    """Print the figures of a program with its weights inside or outside."""
    artifact = program.emit(external_weights=external)
    sizes = {"pte": len(artifact.buffer), **{name: len(data) for name, data in artifact.data_files.items()}}
    print(f"external_weights={external!r}: {sizes}")
    total = least(program.emit, external_weights=external)
    print(f"  emit {total:.0f} ms, of which digests {hashing(lambda: program.emit(external_weights=external)):.0f} ms")
    path = artifact.save(folder / "model.pte")
    print(f"  save, with fsync: {least(artifact.save, path):.0f} ms")
    data = [folder / name for name in artifact.data_files]
    for verify in (False, True, "full"):
        print(f"  load(verify={verify!r}): {least(load, path, data=data, verify=verify):.0f} ms")
    first = least(lambda: load(path, data=data, verify=False).run("forward", *INPUTS))
    print(f"  load(verify=False) and the first run, in which XNNPACK packs the weights: {first:.0f} ms")


def main() -> None:
    """Print the figures."""
    model, _ = embeddings.load_model()
    program = lower(torch.export.export(model, INPUTS), "xnnpack")
    with tempfile.TemporaryDirectory() as folder:
        for external in (None, "weights"):
            measure(program, external, Path(folder))
    piece = bytes(64 * 2**20)
    print(f"XXH3: {64e3 / least(lambda: digests.RangeDigests([len(piece)]).write(piece)):.0f} MiB/s")


if __name__ == "__main__":
    main()
