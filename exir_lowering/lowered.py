"""What `lower` returns: the lowered programs, and the file that they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from executorch.exir import ExecutorchBackendConfig
from torch.export import ExportedProgram

from exir_lowering.emission import Artifact, emit
from exir_lowering.report import Report


@dataclass(frozen=True, slots=True, eq=False)
class LoweredMethods(Mapping[str, ExportedProgram]):
    """The lowered programs by method name, in the order in which they were given.

    Attributes:
        programs: The programs; each runs in eager PyTorch too (`.module()`), delegates through their original graphs.
        report: What was delegated, what was not, and why.
    """

    programs: Mapping[str, ExportedProgram]
    report: Report

    def __getitem__(self, method: str) -> ExportedProgram:
        return self.programs[method]

    def __iter__(self) -> Iterator[str]:
        return iter(self.programs)

    def __len__(self) -> int:
        return len(self.programs)

    def emit(
        self,
        config: ExecutorchBackendConfig | None = None,
        *,
        constant_methods: Mapping[str, Any] | None = None,
    ) -> Artifact:
        """Make the `.pte` file and its data files.

        Args:
            config: ExecuTorch's options of emission, per-method ones included.
            constant_methods: Values by name that become methods which return them.

        Returns:
            The artifact. The lowered programs are not changed, so they can be emitted again.

        Raises:
            InputError: The programs cannot be emitted, or a name is used twice.
        """
        return emit(self.programs, config, constant_methods=constant_methods, report=self.report)

    def __repr__(self) -> str:
        return f"LoweredMethods({', '.join(self.programs)})"
