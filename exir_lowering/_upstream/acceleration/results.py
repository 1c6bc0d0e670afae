"""The results of operators on fake tensors, computed once for each case, and the results of delegates.

What a result is like follows from the operator and from what its inputs are like: see `likeness`. Operators that write
or return views, symbolic sizes and constants whose elements tracing knows have more to them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any

import torch
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.dialects.edge._ops import EdgeOpOverload

# Traces with torch's kernels in Python, as passes do.
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import OutputKind
from torch.fx import Node, map_arg
from torch.utils import _pytree as pytree

from exir_lowering._upstream.acceleration.memory import Work
from exir_lowering._upstream.likeness import Form, Likeness
from exir_lowering.errors.interrupts import let_through


class UnknownFormError(Exception):
    """A value or an operator for which forms do not say everything."""


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
    except Exception as error:  # tracing says what is wrong
        let_through(error)
        raise UnknownFormError from error


def results_of(module: Any, args: list[Any], mode: FakeTensorMode, work: Work) -> Any:
    """Return the fake results of a call of a delegate; UnknownFormError if the program has to be run.

    torch would make a module of the program to run it on them.
    """
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
