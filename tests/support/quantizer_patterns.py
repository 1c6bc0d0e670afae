"""Lets a process export the patterns that torchao and ExecuTorch's quantizer look for once.

Each `prepare_pt2e` exports six patterns of convolutions before batch norms, each `convert_pt2e` others: a second.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

_NAME = "_get_aten_graph_module_for_pattern"
_MODULES = (
    "torchao.quantization.pt2e.utils",
    "torchao.quantization.pt2e.qat_utils",
    "executorch.backends.xnnpack.quantizer.xnnpack_quantizer_utils",
)
_exported: dict[Any, Any] = {}


def remember() -> None:
    """Remember the patterns that are exported from now on, where the modules that do so are imported."""
    found = [sys.modules[name] for name in _MODULES if name in sys.modules]
    if not found or getattr(found[0], _NAME).__module__ == __name__:
        return
    export = getattr(found[0], _NAME)

    def exported(pattern: Any, inputs: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        function = getattr(pattern, "fn", pattern)
        cells = tuple(cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
        key = (function.__code__, cells, tuple(map(_describe, inputs)), args, tuple(kwargs.items()))
        if key not in _exported:
            _exported[key] = export(pattern, inputs, *args, **kwargs)
        return copy.deepcopy(_exported[key])  # it is changed

    for module in found:
        setattr(module, _NAME, exported)


def _describe(value: Any) -> Any:
    return (value.shape, value.dtype, value.device) if hasattr(value, "shape") else value
