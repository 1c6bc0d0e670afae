"""What tracing does to each node, what it and decomposing change in the process, and how that is restored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

# Tracing that is interrupted, or that a forked child never continues, leaves its switches as they are. They are
# looked up by name: they are global variables, and some come and go with versions of torch.
from torch import compiler as torch_compiler
from torch._export import utils as export_utils
from torch._subclasses import fake_impls  # rules of fake tensors for operators; conversions add to them
from torch.export import _trace, exported_program
from torch.fx import _lazy_graph_module, _symbolic_trace, traceback
from torch.fx.experimental import proxy_tensor

from exir_lowering._upstream import pins
from exir_lowering._upstream.compiler import tracer as et_tracer
from exir_lowering._upstream.locks import replacing

_SWITCHES: Sequence[tuple[Any, str]] = (
    (traceback, "current_meta"),
    (traceback, "current_replay_node"),
    (traceback, "should_preserve_node_meta"),
    (traceback, "_should_preserve_node_meta"),
    (_symbolic_trace, "CURRENT_PATCHER"),
    (_symbolic_trace, "_is_fx_tracing_flag"),
    (getattr(_symbolic_trace, "_is_fx_tracing_tls", None), "flag"),  # the same since torch 2.14
    (proxy_tensor, "_CURRENT_MAKE_FX_TRACER"),
    (_lazy_graph_module, "_use_lazy_graph_module_flag"),
    (_lazy_graph_module, "_force_skip_lazy_graph_module_flag"),
    (_trace, "_EXPORT_FLAGS"),
    (_trace, "_EXPORT_MODULE_HIERARCHY"),
    (export_utils, "_DISABLE_ATEN_TO_ASSERTION_PASS"),
    (torch_compiler, "_is_compiling_flag"),
    (torch_compiler, "_is_exporting_flag"),
    (torch_compiler, "_is_non_strict_tracing_flag"),
    (et_tracer, "TRACER"),
    (torch.nn.Module, "__call__"),
    (torch.nn.Module, "__getattr__"),
)  # the global variables that tracing switches while it runs, and the methods that it patches


class ConversionState:
    """A snapshot of what conversions change in the process while they run."""

    def __init__(self) -> None:
        self._switches = [(owner, name, getattr(owner, name)) for owner, name in _SWITCHES if hasattr(owner, name)]
        self._meta = dict(traceback.current_meta)
        self._depth = len(_decomposing)

    def restore(self) -> None:
        """Restore everything: tracing does so itself, unless it was interrupted just before, or its thread is gone."""
        before = {name: value for _, name, value in self._switches}["CURRENT_PATCHER"]
        patcher = _symbolic_trace.CURRENT_PATCHER
        if patcher is not None and patcher is not before:
            for patch in reversed(patcher.patches_made):
                patch.revert()
        for owner, name, value in self._switches:
            if getattr(owner, name) is not value:
                setattr(owner, name, value)
        if traceback.current_meta != self._meta:
            traceback.current_meta.clear()
            traceback.current_meta.update(self._meta)
        for kernels in reversed(_decomposing[self._depth :]):
            kernels.restore()
        del _decomposing[self._depth :]  # of a thread that a forked child does not have


class _Kernels:
    """The Python kernels of operators before a conversion decides which of them it decomposes."""

    def __init__(self, operators: Iterable[Any]) -> None:
        self.tables = [(operator, dict(operator.py_kernels)) for operator in operators]
        self.rules = dict(fake_impls.op_implementations_dict)

    def restore(self) -> None:
        for operator, table in self.tables:
            if operator.py_kernels != table:
                operator.py_kernels.clear()
                operator.py_kernels.update(table)
                operator._dispatch_cache.clear()
        for operator, _ in self.tables:
            set_rule(operator, self.rules.get(operator))


def set_rule(operator: Any, rule: Any) -> None:
    """Set an operator's rule for fake tensors, None for none."""
    known = fake_impls.op_implementations_dict.get(operator)
    if known is not rule:
        if known is not None:
            fake_impls._deregister_op_impl(operator)
        if rule is not None:
            fake_impls.register_op_impl(operator)(rule)


kernel_cache: ContextVar[Any] = ContextVar("exir_lowering_kernel_cache", default=None)
"""What puts kernels into operators that torch made before (the module `fast.lookups`), if this thread reuses them."""

_decomposing: list[_Kernels] = []  # the conversions that have replaced kernels; they are nested, since there is a lock


def _decompositions() -> list[tuple[Any, str, Any]]:
    override = exported_program._override_composite_implicit_decomp

    @contextmanager
    def restored(operators: Mapping[Any, Any]) -> Iterator[None]:
        kernels = _Kernels(operators)
        known = kernel_cache.get() if not _decomposing else None
        _decomposing.append(kernels)
        try:
            others = operators if known is None else known.reuse_kernels(kernels, operators)
            with override(others):
                # Another thread may decompose without the lock, by torch alone.
                if known is not None and _decomposing == [kernels]:
                    known.remember_kernels(kernels, others)
                yield
        finally:
            # If torch is interrupted in between, it restores nothing of what it has replaced.
            kernels.restore()
            if kernels in _decomposing:
                _decomposing.remove(kernels)

    return [(exported_program, "_override_composite_implicit_decomp", restored)]


DECOMPOSITIONS = replacing(lambda: _decompositions() if pins.is_on("restored kernels") else [])
"""A context that restores what conversions replace in operators, however they end."""
