"""This engine by name in the exporters of transformers, which are imported when they are asked for."""

from __future__ import annotations

from typing import Any

from exir_lowering.compat.executorch import patch_executorch
from exir_lowering.errors import InputError


def register_exporter(name: str = "exir-lowering") -> None:
    """Let `AutoHfExporter` of transformers find this engine by a name, as an export format.

    Its exporter is transformers' `ExecutorchExporter` inside `patch_executorch`: what it exports is run, saved and
    loaded as ExecuTorch's files are, without this package. `AutoHfExporter.from_config(config, **options)` passes the
    options of `patch_executorch` on; unlike there, `rewrites` is "safe" by default. The exporter's `lowerings` are
    those of its last graph, with their reports.

    Args:
        name: The export format.

    Raises:
        InputError: The installed transformers has no such exporters, or there is none.
    """
    try:
        from transformers.exporters import register_backend
        from transformers.exporters.exporter_executorch import ExecutorchExporter
        from transformers.exporters.runners.runner_executorch import ExecutorchModelRunner
    except ImportError as error:
        raise InputError(
            f"register_exporter({name!r}): the installed transformers has no exporters ({error}). "
            "Install version 5.24 or newer: pip install 'exir-lowering[exporters]'."
        ) from error

    class ExirLoweringExporter(ExecutorchExporter):  # type: ignore[misc]  # transformers has no types
        export_format = name  # by which it is found

        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.export_format = "executorch"  # what its files are
            self._options = {"rewrites": "safe", **options}

        def export_program(self, *args: Any, **kwargs: Any) -> Any:
            with patch_executorch(**self._options) as self.lowerings:
                return super().export_program(*args, **kwargs)

    register_backend(ExirLoweringExporter, ExecutorchModelRunner)
