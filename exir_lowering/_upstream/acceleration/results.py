"""The fake results of operators and delegates, computed once for each case.

ExecuTorch's passes retrace the graph, each of them, and compute the value that describes each node. What a result is
like follows from the operator and from what its inputs are like: see `likeness`. Operators that write or return views,
symbolic sizes and constants whose elements tracing knows have more to them. The value noted on the node in the graph is
not trusted: a pass may have changed the node and left it to tracing to correct the value. Each node gets a separate
value.

Passes of XNNPACK end with retracing the graph, although most nodes have their value already, all but those that the
pass has inserted. There (`settle`), a node's value is compared with what the operator computes, and is replaced if it
is something else. What cannot be compared is left to tracing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import lru_cache, wraps
from typing import Any

import torch
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.lowered_backend_module import LoweredBackendModule

# The base of all passes that trace; one method computes a node's value and creates the node.
# The base of all passes that trace.
from executorch.exir.pass_base import ExportPass, ProxyValue, _ExportPassBase
from torch._dispatch.python import enable_python_dispatcher  # traces with torch's kernels in Python, as passes do
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import OutputKind
from torch.fx import GraphModule, Interpreter, Node, map_arg
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils import _pytree as pytree

from exir_lowering._upstream.acceleration import Work, current
from exir_lowering._upstream.likeness import Form, Likeness


class UnknownFormError(Exception):
    """A value or an operator for which forms do not say everything."""


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


def mode_of(node: Node) -> FakeTensorMode | None:
    """Return the fake mode of the value of a node, None if it is not a fake tensor."""
    value = node.meta.get("val")
    return value.fake_mode if isinstance(value, FakeTensor) else None


def form_in(mode: FakeTensorMode, value: Any) -> Any:
    """Describe a value of a mode; UnknownFormError: there is more to it."""
    return Likeness(UnknownFormError, mode=mode).describe(value)


def make(form: Any, mode: FakeTensorMode) -> Any:
    """Return a new fake tensor of a form, or several."""
    if not isinstance(form, Form):
        kind, forms = form
        return kind([make(each, mode) for each in forms])
    # Without the modes and kernels of tracing, which would make another fake tensor of its memory, in twice the time.
    with torch._C._DisableTorchDispatch(), torch._C._DisablePythonDispatcher():
        empty = torch.empty_strided(form.sizes, form.strides, dtype=form.dtype, device="meta")
        return FakeTensor(mode, empty, form.device, requires_grad=form.requires_grad)


def key_of(target: Any, described: Hashable) -> Any:
    """Return what a form follows from: operator and arguments; UnknownFormError if it writes or returns views."""
    target = target._op if type(target) is EdgeOpOverload else target
    if target is not executorch_call_delegate:
        if not isinstance(target, torch._ops.OpOverload):
            raise UnknownFormError
        if target._schema.is_mutable or any(result.alias_info is not None for result in target._schema.returns):
            raise UnknownFormError
    switches = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return target, described, *switches


def note(result: Any, key: Hashable, mode: FakeTensorMode, work: Work) -> Any:
    """Remember the form of a result, and return it; UnknownFormError if it is no tensor, and no list of tensors."""
    form = form_in(mode, result)
    if not all(isinstance(each, Form) for each in (form[1] if isinstance(result, (list, tuple)) else (form,))):
        raise UnknownFormError
    work.forms[key] = form
    return form


def infer(node: Node, forms: dict[Node, Any], mode: FakeTensorMode, work: Work, value: Callable[[Node], Any]) -> Any:
    """Return the form of the result of a node that calls something; UnknownFormError if forms do not say what it is."""
    if node.target is operator.getitem:
        source, index = node.args
        if not isinstance(source, Node) or type(index) is not int or isinstance(forms[source], Form):
            raise UnknownFormError
        return forms[source][1][index]

    def known(operand: Any) -> Any:
        if not isinstance(operand, Node):
            raise UnknownFormError
        return forms[operand]

    key = key_of(node.target, Likeness(UnknownFormError, known, mode=mode).describe((node.args, node.kwargs)))
    return work.forms.get(key) or note(compute(node, mode, value), key, mode, work)


def compute(node: Node, mode: FakeTensorMode, value: Callable[[Node], Any]) -> Any:
    """Return what an operator computes from fake values, as a pass would."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), value)
    mode.allow_non_fake_inputs = True
    try:
        with mode, enable_python_dispatcher():
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except MemoryError:
        raise
    except Exception as error:  # tracing says what is wrong
        raise UnknownFormError from error


def results_of(module: Any, args: list[Any], mode: FakeTensorMode, work: Work) -> Any:
    """Return the fake results of a call of a delegate; UnknownFormError if torch has to run its program on them."""
    program = module.original_module
    signature, nodes = program.graph_signature, list(program.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    own = next((found for found in map(mode_of, placeholders) if found is not None), None)
    if own is None or any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        raise UnknownFormError
    forms = {node: _tensor(form_in(own, node.meta.get("val"))) for node in placeholders}
    users = set(signature.user_inputs)
    inputs = [node for node in placeholders if node.name in users]
    given = [_without_gradients(form_in(mode, arg)) for arg in args]
    if given != [forms[node]._replace(requires_grad=False) for node in inputs]:
        raise UnknownFormError
    forms.update(zip(inputs, given, strict=True))
    outputs: Any = ()
    for node in nodes:
        if node.op == "call_function":
            forms[node] = infer(node, forms, mode, work, lambda each: make(forms[each], mode))
        elif node.op == "output":
            (outputs,) = node.args
        elif node.op != "placeholder":
            raise UnknownFormError
    spec = program.call_spec.out_spec
    if spec is None or spec.num_leaves != len(outputs) or not all(isinstance(each, Node) for each in outputs):
        raise UnknownFormError
    return pytree.tree_unflatten([make(_without_gradients(forms[each]), mode) for each in outputs], spec)


def _tensor(form: Any) -> Form:
    if not isinstance(form, Form):
        raise UnknownFormError
    return form


def _without_gradients(form: Any) -> Form:
    if _tensor(form).requires_grad:
        raise UnknownFormError
    return form  # type: ignore[no-any-return]


_OVERRIDES = (
    *(name for name in vars(_ExportPassBase) if name.startswith("call_")),
    *("__call__", "ExportInterpreter", "ExportTracer", "_fx", "inputs", "on_attr", "output", "placeholder"),
)
"""What a pass would override to do something while it traces; most do their work in `call`, before."""


def settling() -> list[tuple[Any, str, Any]]:
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
