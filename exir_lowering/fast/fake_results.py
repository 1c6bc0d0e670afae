"""The fake results of operators and delegates, computed once for each distinct call.

ExecuTorch's passes retrace the graph, each of them, and compute the value that describes each node. The form of a
result follows from the operator and from the forms of its inputs: see `_upstream.value_keys`. Operators that write or
return views, sizes that depend on data and constants whose elements tracing knows have more to them. The value noted on
the node in the graph is not trusted: a pass may have changed the node and left it to tracing to correct the value. Each
node gets a separate value.

Passes of XNNPACK end with retracing the graph, although most nodes have their value already, all but those that the
pass has inserted. There (`update_values`), a node's value is compared with what the operator computes, and is replaced
if it is something else. What cannot be compared is left to tracing.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Hashable
from contextlib import suppress
from copy import copy
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.dialects.backend._ops import BackendOpOverload
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.lowered_backend_module import LoweredBackendModule

# The base of all passes that trace; one method computes a node's value and creates the node.
from executorch.exir.pass_base import ExportPass, ProxyValue, _ExportPassBase
from torch._dispatch.python import enable_python_dispatcher  # traces with torch's kernels in Python, as passes do
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import OutputKind
from torch.fx import Graph, GraphModule, Interpreter, Node, map_arg, traceback
from torch.fx.node import map_aggregate
from torch.fx.passes.infra.pass_base import PassResult
from torch.fx.proxy import _COPY_META_FIELDS, _get_seq_nr  # what nodes take from the one that is run
from torch.utils import _pytree as pytree

from exir_lowering._upstream.value_keys import PLAIN, Form, KeyMaker
from exir_lowering.errors import explained
from exir_lowering.fast import Work, current
from exir_lowering.fast.lookups import source_of


class UnknownFormError(Exception):
    """A value or an operator for which forms do not say everything."""


_DIALECTS = (EdgeOpOverload, BackendOpOverload)
_ARGUMENTS = frozenset({int, float, bool, complex, str, type(None), *PLAIN})  # what stands in arguments as it is


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what remembers the results that passes compute, and describes nodes only where that is read."""
    compute, running = _ExportPassBase._fx, _ExportPassBase.ExportInterpreter.run_node

    def remembering(self: Any, kind: str, target: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        work, mode = current(), self.fake_tensor_mode
        # A pass may compute results in another way than by calling the operator.
        usual = type(self)._fx is remembering and type(self.interpreter) is Interpreter
        if work is None or mode is None or kind != "call_function" or not usual:
            return compute(self, kind, target, args, kwargs, meta)
        if target is operator.getitem and isinstance(args[0], ProxyValue) and type(args[1]) is int:
            return _create(self, target, args, kwargs, meta, args[0].data[args[1]])

        def other(value: Any) -> Any:
            if isinstance(value, ProxyValue):
                return maker.key(value.data)
            if type(value) is LoweredBackendModule:  # what it computes is its original graph, which nothing changes
                return value
            raise UnknownFormError

        maker = KeyMaker(UnknownFormError, other, mode=mode, symbols=work.symbols)
        try:
            key = _key_of(target, maker.key((args, kwargs)), maker.symbolic)
        except UnknownFormError:
            return compute(self, kind, target, args, kwargs, meta)
        form = work.forms.get(key)
        if form is None and target is executorch_call_delegate:
            module, *data = pytree.tree_map_only(ProxyValue, lambda value: value.data, list(args))
            with suppress(UnknownFormError):
                form = _note(results_of(module, data, mode, work), key, mode, work)
        if form is not None:
            return _create(self, target, args, kwargs, meta, _make(form, mode, work))
        proxy = compute(self, kind, target, args, kwargs, meta)
        with suppress(UnknownFormError):
            _note(proxy.data, key, mode, work)
        return proxy

    def run_node(self: Any, n: Node) -> Any:
        if current() is None or n.op == "output" or "node_debug_str" in _names_in(self.callback.__class__):
            return running(self, n)
        self.node, around = n, traceback.current_meta
        try:
            if traceback.should_preserve_node_meta and n.meta:
                source = source_of(n, f"Interpreter_{type(self).__name__}")
                traceback.current_meta = {**n.meta, "from_node": [source]}
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return getattr(self, n.op)(n.target, args, kwargs)
        except MemoryError:
            raise
        except Exception:  # for which the text of the node is there
            self.callback.node_debug_str = n.format_node()
            raise
        finally:
            traceback.current_meta = around

    return [(_ExportPassBase, "_fx", remembering), (_ExportPassBase.ExportInterpreter, "run_node", run_node)]


@lru_cache(maxsize=64)
def _names_in(kind: Any) -> frozenset[str]:
    """Return the names of attributes, and others, that the methods of a pass have."""
    methods = (item for each in kind.__mro__ if each is not _ExportPassBase for item in vars(each).values())
    return frozenset(name for each in methods if isinstance(each, FunctionType) for name in each.__code__.co_names)


_KNOWN = False  # what tracers do to make a node


def nodes() -> list[tuple[Any, str, Any]]:
    """Return what makes nodes without what is put elsewhere right after."""
    return [(sys.modules[__name__], "_KNOWN", True)]


def _create(self: Any, target: Any, args: Any, kwargs: Any, meta: Any, result: Any) -> ProxyValue:
    """Create a node as the method does, with a result that is known."""
    tracer, name = self.tracer, None
    if isinstance(target, torch._ops.OpOverload):
        name = tracer.graph._target_to_str(target.overloadpacket.__name__)
    try:
        if not _KNOWN or type(tracer) is not ExportPass.ExportTracer:  # others may make something else of arguments
            raise UnknownFormError
        node = _add(tracer, target, *map_aggregate((args, kwargs), _argument), name, meta.data)
        proxy = tracer.proxy(node)
    except UnknownFormError:
        args, kwargs = pytree.tree_map_only(ProxyValue, lambda value: value.proxy, (args, kwargs))
        proxy = tracer.create_proxy("call_function", target, args, kwargs, name=name)
    proxy.node.meta.update(meta.data)
    if type(result) is FakeTensor:
        proxy.node.meta.update(val=result, tensor_meta=None)
    else:
        tracer.set_metadata(proxy.node, result)
    return ProxyValue(result, proxy)


def _argument(value: Any) -> Any:
    """Return what stands for a value in a node's arguments; UnknownFormError if the tracer makes something of it."""
    if type(value) is not ProxyValue and type(value) not in _ARGUMENTS:
        raise UnknownFormError
    return value.proxy.node if type(value) is ProxyValue else value


def _add(tracer: Any, target: Any, args: Any, kwargs: Any, name: str | None, given: dict[str, Any]) -> Node:
    """Create a node as a tracer does, without what `given` takes the place of."""
    state = traceback.current_meta
    lines, special = state.get("stack_trace") or "", traceback.current_replay_node or state.get("autograd_backward")
    special = special or type(target) not in _DIALECTS or traceback.GRADIENT_ACC_SPECIAL_STACK in lines
    if special or not traceback.should_preserve_node_meta:
        return tracer.create_node("call_function", target, args, kwargs, name)  # type: ignore[no-any-return]
    node = _append(tracer.graph, target, args, kwargs)
    tracer.node_name_to_scope[node.name] = (tracer.scope.module_path, tracer.scope.module_type)
    taken = {"stack_trace": lines or None, "seq_nr": None if "seq_nr" in given else _get_seq_nr(node.name)}
    taken |= {key: copy(state[key]) for key in _COPY_META_FIELDS if key in state and key not in given}
    node.meta.update((key, value) for key, value in taken.items() if value is not None or key in _COPY_META_FIELDS)
    return node


def _append(graph: Graph, target: Any, args: Any, kwargs: Any) -> Node:
    """Create a node as a graph does; among its arguments are no sizes for it to look for."""
    if getattr(graph.owning_module, "_create_node_hooks", None) is not None:
        return graph.create_node("call_function", target, args, kwargs, _name_of(target), None)
    name = graph._graph_namespace.create_name(_name_of(target), None)
    node = Node(graph, name, "call_function", target, args, kwargs, None)
    graph._graph_namespace.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


@lru_cache(maxsize=4096)
def _name_of(target: Any) -> str:
    return Graph()._target_to_str(target)


def _form_in(mode: FakeTensorMode, value: Any, work: Work) -> Any:
    """Return the form of a value of a mode; UnknownFormError: there is more to it."""
    return KeyMaker(UnknownFormError, mode=mode, symbols=work.symbols).key(value)


def _make(form: Any, mode: FakeTensorMode, work: Work) -> Any:
    """Return a new fake tensor of a form, or several."""
    if not isinstance(form, Form):
        kind, forms = form
        if kind is int:
            return forms
        return kind([_make(each, mode, work) for each in forms])
    # Without the modes and kernels of tracing, which would make another fake tensor of its memory, in twice the time.
    with torch._C._DisableTorchDispatch(), torch._C._DisablePythonDispatcher():
        layout = ([work.symbols.get(one, one) for one in numbers] for numbers in (form.sizes, form.strides))
        empty = torch.empty_strided(*layout, dtype=form.dtype, device="meta")
        return FakeTensor(mode, empty, form.device, requires_grad=form.requires_grad)


def _key_of(target: Any, arguments: Hashable, symbolic: bool) -> Any:
    """Return what a form follows from: operator and arguments; UnknownFormError if it writes or returns views."""
    setting: Any = None
    if type(target) is BackendOpOverload:
        if symbolic:  # some of Arm's make a symbol each time
            raise UnknownFormError
        arm = sys.modules.get("executorch.backends.arm.tosa.specification")
        setting = arm and arm.TosaLoweringContext.tosa_spec_var.get(None)  # says what Arm's operators take
        setting = id(setting), setting
    target = target._op if type(target) in _DIALECTS else target
    if target is not executorch_call_delegate:
        if not isinstance(target, torch._ops.OpOverload):
            raise UnknownFormError
        if target._schema.is_mutable or any(result.alias_info is not None for result in target._schema.returns):
            raise UnknownFormError
    switches = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return target, arguments, setting, *switches


def _note(result: Any, key: Hashable, mode: FakeTensorMode, work: Work) -> Any:
    """Remember the form of a result, and return it; UnknownFormError if it has more than tensors and integers."""
    form = _form_in(mode, result, work)
    parts = form[1] if isinstance(result, (list, tuple)) else (form,)
    if not all(isinstance(each, Form) or each[0] is int for each in parts):
        raise UnknownFormError
    work.forms[key] = form
    return form


def _infer(node: Node, forms: dict[Node, Any], mode: FakeTensorMode, work: Work, value: Callable[[Node], Any]) -> Any:
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

    maker = KeyMaker(UnknownFormError, known, mode=mode, symbols=work.symbols)
    key = _key_of(node.target, maker.key((node.args, node.kwargs)), maker.symbolic)
    return work.forms.get(key) or _note(_compute(node, mode, value), key, mode, work)


def _compute(node: Node, mode: FakeTensorMode, value: Callable[[Node], Any]) -> Any:
    """Return what an operator computes from fake values, as a pass would."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), value)
    mode.allow_non_fake_inputs = True
    with explained(lambda _: UnknownFormError()), mode, enable_python_dispatcher():  # tracing says what is wrong
        return node.target(*args, **kwargs)  # type: ignore[operator]


def results_of(module: Any, args: list[Any], mode: FakeTensorMode, work: Work) -> Any:
    """Return the fake results of a call of a delegate; UnknownFormError if torch has to run its program on them."""
    program = module.original_module
    signature, nodes = program.graph_signature, list(program.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    own = _mode_of(placeholders)
    if own is None or any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        raise UnknownFormError

    def tensor(form: Any, gradients: bool = True) -> Form:
        if not isinstance(form, Form) or (form.requires_grad and not gradients):
            raise UnknownFormError
        return form

    forms: dict[Node, Any] = {node: tensor(_form_in(own, node.meta.get("val"), work)) for node in placeholders}
    users = set(signature.user_inputs)
    inputs = [node for node in placeholders if node.name in users]
    given = [tensor(_form_in(mode, arg, work), gradients=False) for arg in args]
    if given != [forms[node]._replace(requires_grad=False) for node in inputs]:
        raise UnknownFormError
    forms.update(zip(inputs, given, strict=True))
    outputs: Any = ()
    for node in nodes:
        if node.op == "call_function":
            forms[node] = _infer(node, forms, mode, work, lambda each: _make(forms[each], mode, work))
        elif node.op == "output":
            (outputs,) = node.args
        elif node.op != "placeholder":
            raise UnknownFormError
    spec = program.call_spec.out_spec
    if spec is None or spec.num_leaves != len(outputs) or not all(isinstance(each, Node) for each in outputs):
        raise UnknownFormError
    return pytree.tree_unflatten([_make(tensor(forms[each], gradients=False), mode, work) for each in outputs], spec)


def _mode_of(nodes: list[Node]) -> FakeTensorMode | None:
    """Return the fake mode of the values of nodes, None if none is a fake tensor."""
    values = (node.meta.get("val") for node in nodes)
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


# What a pass would override to do something while it traces; most do their work in `call`, before.
_OVERRIDES = (
    *(name for name in vars(_ExportPassBase) if name.startswith("call_")),
    *("__call__", "ExportInterpreter", "ExportTracer", "_fx", "inputs", "on_attr", "output", "placeholder"),
)


def tracing() -> list[tuple[Any, str, Any]]:
    """Return what brings a graph up to date in place where a pass of XNNPACK that is known would trace it."""
    calling = _ExportPassBase.call

    def call(self: Any, graph_module: GraphModule) -> Any:
        work, kind = current(), type(self)
        only_traces = all(getattr(kind, name, None) is getattr(ExportPass, name, None) for name in _OVERRIDES)
        if work is not None and work.running is kind and only_traces and update_values(graph_module, work):
            return PassResult(graph_module, True)
        return calling(self, graph_module)

    return [(_ExportPassBase, "call", call)]


def update_values(module: GraphModule, work: Work) -> bool:
    """Give each node of a graph the value that tracing would give it; False if that needs tracing."""
    nodes = list(module.graph.nodes)
    mode = _mode_of(nodes)
    if mode is None:
        return False
    forms: dict[Node, Any] = {}
    try:
        for node in nodes:
            if node.op == "placeholder":
                forms[node] = _form_in(mode, node.meta.get("val"), work)
            elif node.op == "call_function":
                form = forms[node] = _infer(node, forms, mode, work, _value)
                noted = None
                with suppress(UnknownFormError):
                    noted = _form_in(mode, node.meta.get("val"), work)
                if form != noted:
                    taken = node.target is operator.getitem
                    node.meta["val"] = _value(node.args[0])[node.args[1]] if taken else _compute(node, mode, _value)
            elif node.op == "output":
                node.meta["val"] = map_arg(node.args[0], _value)
            else:
                return False
    except UnknownFormError:
        return False
    return True


def _value(node: Any) -> Any:
    return node.meta["val"]
