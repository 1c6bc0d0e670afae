"""XNNPACK's backend: ExecuTorch's class, which gets partitions that it lowers right."""

from __future__ import annotations

from torch.export import ExportedProgram

from exir_lowering.backends.xnnpack.shared_values import separate
from exir_lowering.plugins import ExecutorchBackend


class XnnpackBackend(ExecutorchBackend):
    """Lowers with ExecuTorch's `XnnpackBackend`."""

    def prepare(self, program: ExportedProgram) -> None:
        """Separate what ExecuTorch's preprocess prepares for one reader only; see `ExecutorchBackend`."""
        separate(program)
