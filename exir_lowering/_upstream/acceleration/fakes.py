"""The fake results of operators, computed once for the same operator and inputs.

ExecuTorch's passes trace the graph anew, each of them, and compute the value that describes each node. A result is
found by the operator and by what it is given: the very fake tensors, which passes hand on, and equal numbers. What is
noted on the node in the graph is not trusted: a pass may have changed the node and left it to tracing to correct it.

A pass gets each result once: two nodes of a graph never share a value.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.lowered_backend_module import LoweredBackendModule

# The base of all passes that trace; one method computes a node's value and creates the node.
from executorch.exir.pass_base import ProxyValue, _ExportPassBase
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Interpreter
from torch.utils import _pytree as pytree

from exir_lowering._upstream.acceleration.delegates import results_of
from exir_lowering._upstream.acceleration.forms import Form, UnknownFormError, describe, form_of, key_of, make
from exir_lowering._upstream.acceleration.work import Work, current

__all__ = [
    "replacements",
]

_MOST = 200_000
"""How many results are remembered at most before all of them are forgotten."""

_KEEPING = frozenset(("aten::copy_", "aten::index_put_"))
"""Operators that write, but only elements."""

_SMALL = 1024
"""The most elements of a constant that is kept for its identity."""

_REAL = (torch.Tensor, torch.nn.Parameter)

_SIMPLE = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _UnknownError(Exception):
    """A value of which nothing can be remembered."""


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what remembers the results that passes compute."""
    compute = _ExportPassBase._fx

    def remembering(self: Any, kind: str, target: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        work = current()
        if work is None or kind != "call_function" or not _is_usual(self, remembering):
            return compute(self, kind, target, args, kwargs, meta)
        key = _key(self, work, target, args, kwargs)
        if key is None:
            return compute(self, kind, target, args, kwargs, meta)
        # Per tracing of one graph: how often each key occurred in it.
        seen = vars(self.tracer).setdefault("_exir_lowering_seen", {})
        number = seen[key] = seen.get(key, -1) + 1
        results = work.results.setdefault(key, [])
        if number < len(results):
            return _create(self, target, args, kwargs, meta, results[number])
        form = None
        if number == len(results):
            form = _form_key(self, target, args, kwargs)
            known = _from_forms(self, work, target, args, form)
            if known is not None:
                results.append(known)
                return _create(self, target, args, kwargs, meta, known)
        proxy = compute(self, kind, target, args, kwargs, meta)
        if number == len(results) and isinstance(proxy, ProxyValue) and _is_static(proxy.data, self.fake_tensor_mode):
            results.append(proxy.data)
            _note_form(self, work, form, proxy.data)
        return proxy

    return [(_ExportPassBase, "_fx", remembering)]


def _form_key(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
    """Return what the form of a result follows from, None if it has to be computed."""
    if not isinstance(target, (EdgeOpOverload, torch._ops.OpOverload)):
        return None
    try:
        described = describe((args, dict(kwargs)), lambda value: _form(value, self.fake_tensor_mode))
        return key_of(target, described)
    except UnknownFormError:
        return None


def _form(value: Any, mode: Any) -> Any:
    return form_of(value.data if isinstance(value, ProxyValue) else value, mode)


def _from_forms(self: Any, work: Work, target: Any, args: Any, key: Any) -> Any:
    """Return a new result of a known form, None if it has to be computed."""
    mode = self.fake_tensor_mode
    try:
        if target is executorch_call_delegate:
            module, *data = pytree.tree_map_only(ProxyValue, lambda value: value.data, list(args))
            return results_of(module, data, mode, work)
    except UnknownFormError:
        return None
    form = work.forms.get(key) if key is not None else None
    return make(form, mode) if isinstance(form, Form) else None


def _note_form(self: Any, work: Work, key: Any, result: Any) -> None:
    if key is not None and isinstance(result, FakeTensor):
        try:
            work.forms[key] = form_of(result, self.fake_tensor_mode)
        except UnknownFormError:
            return


def _is_usual(self: Any, remembering: Any) -> bool:
    """Return whether a pass computes results in the usual way, by calling the operator."""
    return type(self)._fx is remembering and type(self.interpreter) is Interpreter


def _create(self: Any, target: Any, args: Any, kwargs: Any, meta: Any, result: Any) -> ProxyValue:
    """Create a node as the method does, with a result that is known."""
    args, kwargs = pytree.tree_map_only(ProxyValue, lambda value: value.proxy, (args, kwargs))
    name = None
    if isinstance(target, torch._ops.OpOverload):
        name = self.tracer.graph._target_to_str(target.overloadpacket.__name__)
    proxy = self.tracer.create_proxy("call_function", target, args, kwargs, name=name)
    proxy.node.meta.update(meta.data)
    self.tracer.set_metadata(proxy.node, result)
    return ProxyValue(result, proxy)


def _key(self: Any, work: Work, target: Any, args: Any, kwargs: Any) -> Any:
    """Return what a result depends on, None if it must be computed each time."""
    if isinstance(target, (EdgeOpOverload, torch._ops.OpOverload)):
        # An operator of the Edge dialect computes what the one that it wraps does.
        operation: Any = target._op if type(target) is EdgeOpOverload else target
        if operation._schema.is_mutable:
            if operation.name() not in _KEEPING:
                work.results.clear()  # it may change what other results were computed from
            return None
    elif target is not operator.getitem and target is not executorch_call_delegate:
        return None
    else:
        operation = target
    mode = self.fake_tensor_mode
    if len(work.kept) > _MOST:
        work.results.clear()
        work.kept.clear()
    try:
        found: list[Any] = [operation]
        _describe(args, mode, work, found)
        for name in sorted(kwargs):
            found.append(name)
            _describe(kwargs[name], mode, work, found)
    except _UnknownError:
        return None
    work.kept.setdefault(id(mode), mode)
    found += (id(mode), torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    return tuple(found)


def _describe(value: Any, mode: Any, work: Work, found: list[Any]) -> None:
    """Append what identifies a value: a fake tensor itself, or the content of a simple one."""
    if isinstance(value, ProxyValue):
        value = value.data
    kind = type(value)
    if kind is FakeTensor:
        if not _is_plain(value, mode):
            raise _UnknownError
        work.kept.setdefault(id(value), value)
        found.append(id(value))
    elif kind in _REAL and value.numel() <= _SMALL:
        # A constant: passes use it itself, and fake tensors show its form. Its elements do not count.
        work.kept.setdefault(id(value), value)
        found += (id(value), value.dtype, tuple(value.shape), value.stride(), value.requires_grad)
    elif kind in _SIMPLE_TYPES:
        found.append(kind)
        found.append(value)
    elif kind is LoweredBackendModule:  # what it computes is its original graph, which nothing changes
        work.kept.setdefault(id(value), value)
        found.append(id(value))
    elif isinstance(value, (list, tuple)):
        found.append(len(value))
        for item in value:
            _describe(item, mode, work, found)
        found.append(list)
    else:
        raise _UnknownError


_SIMPLE_TYPES = frozenset(_SIMPLE)


def _is_plain(value: FakeTensor, mode: Any) -> bool:
    """Return whether a fake tensor is of a mode, its sizes are known, and no value of its elements."""
    return (
        value.fake_mode is mode
        and value.constant is None
        and value.real_tensor is None
        and not value._has_symbolic_sizes_strides
    )


def _is_static(value: Any, mode: Any) -> bool:
    if type(value) is FakeTensor:
        return _is_plain(value, mode)
    return isinstance(value, (list, tuple)) and bool(value) and all(_is_static(item, mode) for item in value)
