"""The nodes that a pass makes when it traces a graph again, without what nobody sees.

ExecuTorch's passes run the graph node by node, and make each node anew. torch looks for what tracing a model would have
to record, and copies what describes the old node; then the pass puts the same in the place of it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from copy import copy
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from executorch.exir.dialects.backend._ops import BackendOpOverload
from executorch.exir.dialects.edge._ops import EdgeOpOverload

# The base of all passes, what runs the graph for them, and what makes the nodes.
from executorch.exir.pass_base import ExportPass, ProxyValue, _ExportPassBase

# What a node takes over from the one that is run, if the pass gives it nothing else; and whether it has more to it.
from torch.fx import Interpreter, Node, proxy as fx_proxy, traceback
from torch.fx.experimental.proxy_tensor import _should_save_eager_input_vals

from exir_lowering.fast import current


def add_node(tracer: Any, target: Any, args: Any, kwargs: Any, name: str | None, meta: Mapping[str, Any]) -> Node:
    """Make a node as a pass's tracer does, and give it what the pass says about it."""
    if not _is_usual(tracer, target):
        node: Node = tracer.create_node("call_function", target, args, kwargs, name)
        node.meta.update(meta)
        return node
    node = tracer.graph.create_node("call_function", target, args, kwargs, name or _name_of(target), None)
    tracer.node_name_to_scope[node.name] = (tracer.scope.module_path, tracer.scope.module_type)
    state = traceback.current_meta
    if state.get("stack_trace") and "stack_trace" not in meta:
        node.meta["stack_trace"] = state["stack_trace"]
    for key in fx_proxy._COPY_META_FIELDS:
        if key in state and key not in meta:
            node.meta[key] = copy(state[key])
    node.meta.update(meta)
    return node


def _is_usual(tracer: Any, target: Any) -> bool:
    """Return whether a node has nothing that comes from elsewhere than the one that is run."""
    if type(tracer) is not ExportPass.ExportTracer or not traceback.should_preserve_node_meta:
        return False
    if traceback.current_replay_node is not None or traceback._should_preserve_node_meta:
        return False
    state = traceback.current_meta
    if state.get("autograd_backward") or traceback.GRADIENT_ACC_SPECIAL_STACK in (state.get("stack_trace") or ""):
        return False
    if type(target) in (EdgeOpOverload, BackendOpOverload) or target is operator.getitem:
        return True
    return isinstance(target, torch._ops.OpOverload) and not _should_save_eager_input_vals(target)


@lru_cache(maxsize=4096)
def _name_of(target: Any) -> str:
    """Return what a node is called after that calls something, but for its number."""
    return torch.fx.Graph()._target_to_str(target)


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what makes a pass run nodes without preparing what is only for errors, or put elsewhere right after."""
    interpreter, placing, describing = (
        _ExportPassBase.ExportInterpreter,
        _ExportPassBase.placeholder,
        EdgeOpOverload.__repr__,
    )
    running = interpreter.run_node

    def run_node(self: Any, n: Node) -> Any:
        if current() is None:
            return running(self, n)
        told = vars(self).get("_exir_lowering_told")
        if told is None:
            told = self._exir_lowering_told = _reads_text(type(self.callback))
        if told or n.op == "output":
            self.callback.node_debug_str = n.format_node()
        self.node = n
        try:
            return Interpreter.run_node(self, n)
        except Exception:
            self.callback.node_debug_str = n.format_node()
            raise

    def placeholder(self: Any, name: str, arg: Any, meta: Any) -> ProxyValue:
        tracer = self.tracer
        if current() is None or type(tracer) is not ExportPass.ExportTracer:
            return placing(self, name, arg, meta)  # type: ignore[no-any-return]
        node = tracer.graph.create_node("placeholder", name, (), {}, None, None)
        tracer.node_name_to_scope[node.name] = (tracer.scope.module_path, tracer.scope.module_type)
        node.meta = meta.data
        node.meta["val"] = arg
        return ProxyValue(arg, tracer.proxy(node))

    described = lru_cache(maxsize=4096)(describing)

    def text(self: Any) -> str:
        return described(self) if current() is not None else describing(self)

    return [
        (interpreter, "run_node", run_node),
        (_ExportPassBase, "placeholder", placeholder),
        (EdgeOpOverload, "__repr__", text),
        (EdgeOpOverload, "__str__", text),
    ]


def _reads_text(kind: type) -> bool:
    """Return whether a pass looks at the text of the node that it runs, which is for errors."""
    functions = (item for each in kind.__mro__ for item in vars(each).values() if isinstance(item, FunctionType))
    return any("node_debug_str" in function.__code__.co_names for function in functions if function is not _INIT)


_INIT = _ExportPassBase.__init__
