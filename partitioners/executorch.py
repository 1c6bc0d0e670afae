"""ExecuTorch's own partitioners under one word each."""

from __future__ import annotations

from executorch.exir.backend.partitioner import Partitioner


def xnnpack() -> Partitioner:
    """Return ExecuTorch's XNNPACK partitioner with its default configuration."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    partitioner: Partitioner = XnnpackPartitioner()
    return partitioner
