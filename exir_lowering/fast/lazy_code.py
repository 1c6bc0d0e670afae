"""Compile graph modules when their code is needed, not each time that a pass has changed their graph.

torch gives each graph module a separate class, for its `forward`. Until it is compiled, what compiling would set is
replaced there by attributes that compile it when they are read. They belong to the module, so it can be used, printed,
pickled and copied after the context in which it was made.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

# Compiled code is for one codegen; a pytree's has the structure of inputs and outputs, which the module repeats.
from torch.fx import GraphModule
from torch.fx.experimental import _config as fx_config
from torch.fx.graph import _PyTreeCodeGen

from exir_lowering._upstream.locks import during
from exir_lowering.fast import current, working

_compile = GraphModule.recompile

_MADE = ("_code", "_lineno_map", "_prologue_start")  # the attributes that compiling gives a module
# The attributes for which a module has to be compiled. Pickling reads `__dict__` before it compiles.
_NEEDING = ("forward", "__reduce__", "__reduce_package__", *_MADE)


class _Late:
    """An attribute of a graph module's class: compiles the module when it is read."""

    def __init__(self, module: weakref.ref[GraphModule], name: str) -> None:
        self._module, self._name = module, name

    def __get__(self, module: GraphModule | None, owner: type) -> Any:
        pending = self._module()
        if pending is None:
            raise AttributeError(f"{self._name}: the module of this class is gone")
        _compile_now(pending)
        return getattr(owner if module is None else module, self._name)


class _LateCode:
    """What `recompile` returns: the code, which is only made when it is looked at."""

    def __init__(self, module: GraphModule) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        root, record = "self", fx_config.enrich_profiler_metadata
        return getattr(self._module.graph.python_code(root_module=root, record_func=record), name)


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what makes graph modules wait to be compiled."""
    compiling = GraphModule.recompile

    def recompile(self: GraphModule) -> Any:
        # Classes that derive from GraphModule may rely on its code; profiles refer to the code at hand.
        kind = type(self)
        plain = kind.__bases__ == (GraphModule,) and kind.__qualname__.endswith("GraphModuleImpl")
        if current() is None or not plain or fx_config.enrich_profiler_metadata:
            return compiling(self)
        codegen = self.graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):
            self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        for name in _MADE:
            self.__dict__.pop(name, None)
        if not isinstance(vars(kind).get("forward"), _Late):
            itself = weakref.ref(self)
            for name in _NEEDING:
                setattr(kind, name, _Late(itself, name))
        self._recompile_submodules()
        return _LateCode(self)

    return [(GraphModule, "recompile", recompile)]


def _compile_now(module: GraphModule) -> None:
    """Compile a module; what somebody else put in the place of a late attribute stays."""
    kind = type(module)
    late = [name for name, value in list(vars(kind).items()) if isinstance(value, _Late)]
    replaced = vars(kind).get("forward") if late and "forward" not in late else None
    for name in late:
        delattr(kind, name)
    with during(working, None, nullcontext()):  # for the modules in it too
        _compile(module)
    if replaced is not None:
        kind.forward = replaced
