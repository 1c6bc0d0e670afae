"""Modules that moved: their old names keep working through this release, with a DeprecationWarning."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MOVED = {
    "exir_lowering.collector": "exir_lowering.graphs.collector",
    "exir_lowering.delegate": "exir_lowering.plugins.delegate",
    "exir_lowering.interfaces": "exir_lowering.plugins.backend",
    "exir_lowering.interrupts": "exir_lowering.errors.interrupts",
    "exir_lowering.locks": "exir_lowering._upstream.locks",
    "exir_lowering.lowering_plan": "exir_lowering.plans",
    "exir_lowering.measures": "exir_lowering.graphs.measures",
    "exir_lowering.quotient": "exir_lowering.graphs.quotient",
    "exir_lowering.registry": "exir_lowering.plugins.registry",
    "exir_lowering.report": "exir_lowering.plans.report",
    "exir_lowering.weights": "exir_lowering.graphs.weights",
}

_INSTEAD = {
    "exir_lowering.interrupts": "exir_lowering.plugins.let_through",
    "exir_lowering.locks": "exir_lowering.plugins.conversion_lock",
}
"""What to use instead of modules that are no longer public."""


class MovedModules(MetaPathFinder, Loader):
    """Finds a module under its old name, and gives it the names of the module that replaced it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return how to load a module that moved; None for others."""
        return ModuleSpec(name, self) if name in _MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Let Python create the module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module, and warn the importer."""
        now = import_module(_MOVED[module.__name__])

        def forward(name: str) -> Any:
            return getattr(now, name)

        module.__doc__ = now.__doc__
        module.__dict__.update(__getattr__=forward, __dir__=lambda: dir(now))
        instead = _INSTEAD.get(module.__name__, now.__name__)
        text = f"{module.__name__} is deprecated, and will be removed in the next release: use {instead}."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
