"""What partitioners ask of the conversion to Edge dialect, as data, so that the cache can keep its result."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch
from executorch.exir.backend.partitioner import Partitioner

DECLARATION = "describe_requests"
"""The method with which a partitioner declares that what it asks depends on its class and on some data only.

It takes nothing, and returns the data: a sequence of what is compared by content (numbers, text, operators, lists,
dicts and dataclasses of these) and of other partitioners; or None if that cannot be said. A class that overrides one of
`ASKED` redeclares it.
"""

ASKED = ("ops_to_not_decompose", "transform_for_pre_decomposition")
"""The methods of a partitioner that the conversion calls."""

_XNNPACK = "executorch.backends.xnnpack.partition"
_DESCRIBED = {
    f"{_XNNPACK}.xnnpack_partitioner.Xnnpack{kind}Partitioner"
    for kind in ("", "DynamicallyQuantized", "FloatingPoint", "Quantized")
    if metadata.version("executorch").startswith("1.5.")  # on which `_describe_xnnpack` was checked
}
_CONSTRAINTS = "exir_lowering.backends.xnnpack.constraints"
_LINEAR = [torch.nn.functional.linear, torch.nn.Linear]


def describe_requests(partitioner: Any) -> Sequence[Any] | None:
    """Return what the requests of a partitioner depend on beside its class and the program; None if that is unknown."""
    kind = type(partitioner)
    if not any(name in vars(partitioner) for name in (*ASKED, DECLARATION)):
        if all(getattr(kind, name, None) is getattr(Partitioner, name) for name in ASKED):
            return ()  # ExecuTorch's own methods, which ask nothing
        declared = _class_with(kind, DECLARATION)
        if declared is not None and all(issubclass(declared, _class_with(kind, name) or kind) for name in ASKED):
            found: Sequence[Any] | None = partitioner.describe_requests()
            return found
    return _describe_xnnpack(partitioner) if f"{kind.__module__}.{kind.__qualname__}" in _DESCRIBED else None


def _class_with(kind: type, name: str) -> type | None:
    """Return the class that defines what a class has under a name."""
    return next((base for base in kind.__mro__ if name in vars(base)), None)


def _describe_xnnpack(partitioner: Any) -> Sequence[Any] | None:
    """Describe XNNPACK's partitioner: its configurations with their settings, which decide what stays whole."""
    if not vars(partitioner).keys() <= {"target_partitioner_configs", "delegation_spec", "per_op_mode", "_spec"}:
        return None
    described = []
    for config in partitioner.target_partitioner_configs.values():
        settings = dict(vars(config))
        settings.pop("src_partitions", None)  # what it found last, which it finds again each time
        check = settings.pop("check_constraints", None)  # what it takes: it matters for what it asks to keep whole
        if check is not None and config.get_original_aten() is not None:
            inner = getattr(check, "args", (None,))[0]
            ours = getattr(getattr(check, "func", None), "__module__", "") == _CONSTRAINTS
            if not ours or getattr(inner, "__func__", None) is not type(config).check_constraints:
                return None
            settings["check_constraints"] = _CONSTRAINTS
        modules = settings.pop("linear_modules", None)
        if not type(config).__module__.startswith(f"{_XNNPACK}.config.") or modules not in (None, _LINEAR):
            return None
        described.append((type(config), settings))
    return described
