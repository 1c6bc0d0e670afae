"""Two pure functions of ExecuTorch that define a class, or evaluate annotations, at each call."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, get_type_hints

# The order of a tensor's dimensions; the other modules import it by name.
from executorch.exir import tensor, tensor_layout

# Writes dataclasses as JSON for flatc; looks at the annotations of the class of each object.
from executorch.exir._serialize import _dataclass
from executorch.exir.emit import _emitter
from executorch.exir.passes import replace_view_copy_with_view_pass

from exir_lowering._upstream.acceleration.memory import current


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what remembers orders of dimensions and the annotations of classes."""
    order_of = tensor.dim_order_from_stride
    remembered = lru_cache(maxsize=4096)(order_of)

    def dim_order_from_stride(stride: Any) -> Any:
        known = current() is not None and type(stride) is tuple and all(type(step) is int for step in stride)
        return remembered(stride) if known else order_of(stride)

    def hints(kind: Any, *args: Any, **kwargs: Any) -> Any:
        work = current()
        if work is None or args or kwargs or not isinstance(kind, type):
            return get_type_hints(kind, *args, **kwargs)
        if kind not in work.hints:
            work.hints[kind] = get_type_hints(kind)
        return work.hints[kind]

    users = (tensor, tensor_layout, _emitter, replace_view_copy_with_view_pass)
    return [
        *((module, "dim_order_from_stride", dim_order_from_stride) for module in users),
        (_dataclass, "get_type_hints", hints),
    ]
