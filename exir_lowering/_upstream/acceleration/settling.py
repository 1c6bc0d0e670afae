"""The values that describe the nodes of a graph, brought up to date in place.

Passes end with retracing the graph, so that each node has the value that its operator computes. Most nodes have it
already, all but those that the pass has inserted. Here, a node's value is compared with what the operator computes, and
is replaced if it is something else. What cannot be compared is left to tracing.
"""

from __future__ import annotations

import operator
from functools import lru_cache, wraps
from typing import Any

# The base of all passes that trace.
from executorch.exir.pass_base import ExportPass, _ExportPassBase
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node, map_arg
from torch.fx.passes.infra.pass_base import PassResult

from exir_lowering._upstream.acceleration.memory import Work, current
from exir_lowering._upstream.acceleration.results import UnknownFormError, compute, form_in, infer, mode_of

_OVERRIDES = (
    *(name for name in vars(_ExportPassBase) if name.startswith("call_")),
    *("__call__", "ExportInterpreter", "ExportTracer", "_fx", "inputs", "on_attr", "output", "placeholder"),
)
"""What a pass would override to do something while it traces; most do their work in `call`, before."""


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what brings a graph up to date in place where a pass of XNNPACK that is known would trace it."""
    return [(_ExportPassBase, "call", _settling(_ExportPassBase.call))]


@lru_cache(maxsize=8)  # whether a pass is known is remembered for its functions
def _settling(calling: Any) -> Any:
    @wraps(calling)  # it is recognised by its source
    def call(self: Any, graph_module: GraphModule) -> Any:
        work = current()
        if work is not None and work.running is type(self) and _only_traces(type(self)) and settle(graph_module, work):
            return PassResult(graph_module, True)
        return calling(self, graph_module)

    return call


def _only_traces(kind: Any) -> bool:
    """Return whether a pass does nothing but trace when it traces."""
    return all(getattr(kind, name, None) is getattr(ExportPass, name, None) for name in _OVERRIDES)


def settle(module: GraphModule, work: Work) -> bool:
    """Give each node of a graph the value that tracing would give it; False if that needs tracing."""
    nodes = list(module.graph.nodes)
    mode = next((mode for mode in map(mode_of, nodes) if mode is not None), None)
    if mode is None:
        return False
    forms: dict[Node, Any] = {}
    try:
        for node in nodes:
            if node.op == "placeholder":
                forms[node] = form_in(mode, node.meta.get("val"))
            elif node.op == "call_function":
                forms[node] = _settle_node(node, forms, mode, work)
            elif node.op == "output":
                node.meta["val"] = map_arg(node.args[0], _value)
            else:
                return False
    except UnknownFormError:
        return False
    return True


def _settle_node(node: Node, forms: dict[Node, Any], mode: FakeTensorMode, work: Work) -> Any:
    form = infer(node, forms, mode, work, _value)
    if form != _noted_form(node, mode):
        if node.target is operator.getitem:
            node.meta["val"] = _value(node.args[0])[node.args[1]]
        else:
            node.meta["val"] = compute(node, mode, _value)
    return form


def _value(node: Any) -> Any:
    return node.meta["val"]


def _noted_form(node: Node, mode: FakeTensorMode) -> Any:
    try:
        return form_in(mode, node.meta.get("val"))
    except UnknownFormError:
        return None
