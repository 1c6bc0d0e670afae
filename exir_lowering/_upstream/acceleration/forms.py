"""What there is to know of a fake tensor (its sizes, strides, type), and what operators make of it.

The form of a result follows from the operator and the forms of its inputs. It is found out once for each case.
Operators that write or return views, symbolic sizes and constants whose elements tracing knows have more to them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from executorch.exir.dialects.edge._ops import EdgeOpOverload

# Traces with torch's kernels in Python, as passes do.
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx import Node, map_arg

from exir_lowering._upstream.acceleration.work import Work
from exir_lowering.errors.interrupts import let_through

__all__ = [
    "Form",
    "UnknownFormError",
    "compute",
    "describe",
    "form_of",
    "infer",
    "key_of",
    "make",
    "mode_of",
]

_SIMPLE = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class UnknownFormError(Exception):
    """A value or an operator for which forms do not say everything."""


class Form(tuple[Any, ...]):
    """The form of one tensor: sizes, strides, dtype, device, whether it requires gradients."""

    __slots__ = ()


def mode_of(node: Node) -> FakeTensorMode | None:
    """Return the fake mode of the value of a node, None if it is not a fake tensor."""
    value = node.meta.get("val")
    return value.fake_mode if isinstance(value, FakeTensor) else None


def form_of(value: Any, mode: FakeTensorMode) -> Any:
    """Return the form of a fake tensor of a mode; a tuple of forms for a list of them.

    UnknownFormError: There is more to it: symbolic sizes, known elements, another kind of value.
    """
    if type(value) is FakeTensor:
        if (
            value.fake_mode is not mode
            or value.constant is not None
            or value.real_tensor is not None
            or value._has_symbolic_sizes_strides
            or value.layout is not torch.strided
            or value.is_quantized
            or value.is_conj()
            or value.is_neg()
            or value.storage_offset() != 0
        ):
            raise UnknownFormError
        return Form((value.shape, value.stride(), value.dtype, value.fake_device, value.requires_grad))
    if isinstance(value, (list, tuple)):
        return tuple(form_of(item, mode) for item in value)
    raise UnknownFormError


def make(form: Any, mode: FakeTensorMode) -> Any:
    """Return a new fake tensor of a form, or a list of them."""
    if not isinstance(form, Form):
        return [make(each, mode) for each in form]
    sizes, strides, dtype, device, gradients = form
    with in_kernel_invocation_manager(mode):
        empty = torch.empty_strided(sizes, strides, dtype=dtype, device="meta", requires_grad=gradients)
    return FakeTensor(mode, empty, device)


def infer(node: Node, forms: dict[Node, Any], mode: FakeTensorMode, work: Work, value: Callable[[Node], Any]) -> Any:
    """Return the form of the result of a node that calls something; UnknownFormError if forms do not say what it is."""
    if node.target is operator.getitem:
        source, index = node.args
        if not isinstance(source, Node) or type(index) is not int or isinstance(forms[source], Form):
            raise UnknownFormError
        return forms[source][index]
    key = key_of(node.target, describe((node.args, dict(node.kwargs)), partial(_form_in, forms)))
    if key not in work.forms:
        work.forms[key] = form_of(compute(node, mode, value), mode)
    return work.forms[key]


def _form_in(forms: dict[Node, Any], value: Any) -> Any:
    if not isinstance(value, Node):
        raise UnknownFormError
    return forms[value]


def key_of(target: Any, described: Any) -> Any:
    """Return what a form follows from: operator and arguments; UnknownFormError if it writes or returns views."""
    return (_functional(target), described, *_state())


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


def _state() -> tuple[Any, ...]:
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _functional(target: Any) -> Any:
    """Return the operator of a node, if its results share nothing with its inputs."""
    target = target._op if type(target) is EdgeOpOverload else target
    if not isinstance(target, torch._ops.OpOverload):
        raise UnknownFormError
    schema = target._schema
    if schema.is_mutable or any(result.alias_info is not None for result in schema.returns):
        raise UnknownFormError
    return target


def describe(value: Any, form: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return what identifies arguments: the forms of the values among them, and the content of the rest.

    `form` is asked about what is neither simple nor a list. UnknownFormError: Something cannot be identified.
    """
    kind = type(value)
    if kind in _SIMPLE:
        return (kind, value)
    if isinstance(value, (list, tuple)):
        return (list, *(describe(item, form) for item in value))
    if isinstance(value, dict):
        return (dict, *((name, describe(item, form)) for name, item in sorted(value.items())))
    return (None, form(value))
