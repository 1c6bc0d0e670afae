"""The names under which torch.compile knows this package's backends."""

from __future__ import annotations

import importlib

from exir_lowering._upstream.dynamo import register_backend, registered_backends

NAMES = {
    "exir_lowering": ("exir_lowering.dynamo.compiler", "backend"),
    "exir_lowering_debug": ("exir_lowering.dynamo.debugging", "debug_backend"),
}
"""As in the entry points of the group torch_dynamo_backends: the module and the function of each name."""


def register() -> None:
    """Register the backends with torch, unless it finds them as entry points, which it loads when they are asked for.

    A source tree on PYTHONPATH that is not installed has no entry points.
    """
    known = registered_backends()
    for name, (module, function) in NAMES.items():
        if name not in known:
            register_backend(getattr(importlib.import_module(module), function), name=name)
