"""XNNPACK's backend: ExecuTorch's class, which gets partitions that it lowers right."""

from __future__ import annotations

from importlib import metadata

from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering.backends.xnnpack.constraints import refuse_certainly
from exir_lowering.backends.xnnpack.shared_values import separate
from exir_lowering.plugins import PROVENANCE, ExecutorchBackend

# ConvertToLinearPass looks for linear layers by the source of a node, and in which module it is.
_READ = frozenset({"torch_fn", "source_fn_stack", "nn_module_stack"})


class XnnpackBackend(ExecutorchBackend):
    """Lowers with ExecuTorch's `XnnpackBackend`."""

    unread = PROVENANCE - _READ if metadata.version("executorch").startswith("1.5.") else frozenset()

    def prepare(self, program: ExportedProgram) -> None:
        """Separate what ExecuTorch's preprocess prepares for one reader only; see `ExecutorchBackend`."""
        separate(program)

    def refuse(self, node: Node) -> str | None:
        """Return why ExecuTorch's preprocess fails on what its partitioner took; see `ExecutorchBackend`."""
        return refuse_certainly(node)
