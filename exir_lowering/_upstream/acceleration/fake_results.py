"""The fake results of operators, computed once for each case: see `results`.

ExecuTorch's passes retrace the graph, each of them, and compute the value that describes each node. A result is
found by the operator and by what its inputs are like. The value noted on the node in the graph is not trusted: a pass
may have changed the node and left it to tracing to correct the value. Each node gets a separate value.
"""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Any

import torch
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.lowered_backend_module import LoweredBackendModule

# The base of all passes that trace; one method computes a node's value and creates the node.
from executorch.exir.pass_base import ProxyValue, _ExportPassBase
from torch.fx import Interpreter
from torch.utils import _pytree as pytree

from exir_lowering._upstream.acceleration.memory import Work, current
from exir_lowering._upstream.acceleration.results import UnknownFormError, key_of, make, note, results_of
from exir_lowering._upstream.likeness import Likeness


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what remembers the results that passes compute."""
    compute = _ExportPassBase._fx

    def remembering(self: Any, kind: str, target: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        work, mode, key = current(), self.fake_tensor_mode, None
        # A pass may compute results in another way than by calling the operator.
        usual = type(self)._fx is remembering and type(self.interpreter) is Interpreter
        if work is not None and mode is not None and kind == "call_function" and usual:
            if target is operator.getitem and isinstance(args[0], ProxyValue) and type(args[1]) is int:
                return _create(self, target, args, kwargs, meta, args[0].data[args[1]])
            key = _key(target, args, kwargs, mode)
        if work is None or key is None:
            return compute(self, kind, target, args, kwargs, meta)
        result = _find(target, args, key, mode, work)
        if result is not None:
            return _create(self, target, args, kwargs, meta, result)
        proxy = compute(self, kind, target, args, kwargs, meta)
        with suppress(UnknownFormError):
            note(proxy.data, key, mode, work)
        return proxy

    return [(_ExportPassBase, "_fx", remembering)]


def _key(target: Any, args: Any, kwargs: Any, mode: Any) -> Any:
    """Return what a result depends on, None if it must be computed each time."""

    def other(value: Any) -> Any:
        if isinstance(value, ProxyValue):
            return likeness.describe(value.data)
        if type(value) is LoweredBackendModule:  # what it computes is its original graph, which nothing changes
            return value
        raise UnknownFormError

    likeness = Likeness(UnknownFormError, other, mode=mode)
    try:
        return key_of(target, likeness.describe((args, kwargs)))
    except UnknownFormError:
        return None


def _find(target: Any, args: Any, key: Any, mode: Any, work: Work) -> Any:
    """Return a new result of a known form, None if it has to be computed."""
    form = work.forms.get(key)
    if form is None and target is executorch_call_delegate:
        module, *data = pytree.tree_map_only(ProxyValue, lambda value: value.data, list(args))
        with suppress(UnknownFormError):
            form = note(results_of(module, data, mode, work), key, mode, work)
    return None if form is None else make(form, mode)


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
