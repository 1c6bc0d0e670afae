"""What a delegate returns, as far as fake tensors tell: torch would make a module of its program to run it on them."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import OutputKind
from torch.fx import Node
from torch.utils import _pytree as pytree

from exir_lowering._upstream.acceleration.forms import Form, UnknownFormError, form_of, infer, make, mode_of
from exir_lowering._upstream.acceleration.work import Work

__all__ = [
    "results_of",
]


def results_of(module: Any, args: list[Any], mode: FakeTensorMode, work: Work) -> Any:
    """Return the fake results of a call of a delegate; UnknownFormError if the program has to be run."""
    program = module.original_module
    signature, nodes = program.graph_signature, list(program.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    if any(spec.kind is not OutputKind.USER_OUTPUT for spec in signature.output_specs):
        raise UnknownFormError
    own = next((found for found in map(mode_of, placeholders) if found is not None), None)
    forms = {node: form_of(node.meta.get("val"), own) for node in placeholders if own is not None}
    users = set(signature.user_inputs)
    inputs = [node for node in placeholders if node.name in users]
    given = [form_of(arg, mode) for arg in args]
    if len(given) != len(inputs) or any(
        not isinstance(one, Form) or one[-1] or one[:-1] != forms.get(node, ())[:-1]
        for node, one in zip(inputs, given, strict=True)
    ):
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
    return _structured(outputs, forms, mode, program.call_spec.out_spec)


def _structured(outputs: Any, forms: dict[Node, Any], mode: FakeTensorMode, spec: Any) -> Any:
    found = [forms[each] if isinstance(each, Node) else None for each in outputs]
    if spec is None or spec.num_leaves != len(found):
        raise UnknownFormError
    if any(not isinstance(form, Form) or form[-1] for form in found):  # it is none, or needs gradients
        raise UnknownFormError
    return pytree.tree_unflatten([make(form, mode) for form in found], spec)
