"""The operators that an exported program may call, found in the dispatcher's table instead of by attributes.

torch takes a name such as `torch.os.system` apart, and follows it from attribute to attribute.

These lists say what a program may name. `graphs.operators.pure` says what a `.pte` file may have executed by its mere
name: far less, and by schema. A program that is lowered may have operators of libraries, which backends take whole.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import torch

from exir_lowering._upstream.operators import list_registered_operators
from exir_lowering.cli.pt2.expressions import split_words
from exir_lowering.cli.pt2.unsafe import UnsafeFileError
from exir_lowering.errors import InputError

NAMESPACES = split_words(
    """
    aten prims quantized_decomposed dim_order_ops executorch_prim et_copy export quant_fusion
    torchao torchvision torchaudio llama cadence cortex_m arm tosa
    """
)
"""The namespaces of operators that only compute: PyTorch's, ExecuTorch's and those of the libraries of models."""

REFUSED = frozenset(("aten::from_file", "aten::_print", "aten::_test_string_default", "aten::_test_ambiguous_defaults"))
"""Operators of these namespaces that do more than compute, by name without overload."""

HIGHER_ORDER = split_words(
    """
    associative_scan auto_functionalized auto_functionalized_v2 cond flex_attention hints_wrapper invoke_subgraph
    map_impl out_dtype scan strict_mode tag_activation_checkpoint while_loop while_loop_stack_output with_effects wrap
    wrap_activation_checkpoint wrap_with_autocast wrap_with_set_grad_enabled
    """
)

FUNCTIONS = split_words(
    """
    _operator.eq _operator.ne _operator.le _operator.ge _operator.lt _operator.gt _operator.neg _operator.pos
    _operator.mul _operator.add _operator.sub _operator.floordiv _operator.mod _operator.pow _operator.truediv
    _operator.and_ _operator.or_ _operator.xor _operator.not_ _operator.lshift _operator.rshift _operator.getitem
    _operator.abs math.trunc math.floor math.ceil math.sqrt
    torch.sym_not torch.sym_int torch.sym_float torch.sym_ite torch.sym_max torch.sym_min torch._sym_sqrt
    torch._functorch.predispatch._add_batch_dim torch._functorch.predispatch._remove_batch_dim
    torch._functorch.predispatch._vmap_increment_nesting torch._functorch.predispatch._vmap_decrement_nesting
    torch._functorch.predispatch.lazy_load_decompositions
    """
)
"""Functions other than operators: of symbolic sizes, and those that `torch.vmap` is exported as."""

_OVERLOAD = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)", re.ASCII)
_HIGHER_ORDER = re.compile(r"torch\.ops\.higher_order\.(\w+)", re.ASCII)


def list_registered() -> frozenset[str]:
    """Return the operators of the dispatcher; those of TorchScript, which read and write files too, are not in it."""
    return frozenset(list_registered_operators())


def check_target(name: str, known: frozenset[str]) -> None:
    """Check the name of what a node calls, among the operators known in this process.

    Raises UnsafeFileError if it is not in the closed lists, InputError if it is not registered here.
    """
    higher = _HIGHER_ORDER.fullmatch(name)
    if name in FUNCTIONS or (higher and higher[1] in HIGHER_ORDER):
        return
    overload = _OVERLOAD.fullmatch(name)
    if overload is None or overload[1] not in NAMESPACES or f"{overload[1]}::{overload[2]}" in REFUSED:
        raise UnsafeFileError(
            f"it calls {name[:200]!r}, which is not in the closed lists of operators that only compute"
        )
    space, operator, kind = overload.groups()
    if f"{space}::{operator}{'' if kind == 'default' else '.' + kind}" not in known:
        raise InputError(
            f"it calls {name!r}, which no library in this process has registered. Import the library that has it, or "
            "install the version of PyTorch that the program was exported with"
        )


def check_source(name: str) -> None:
    """Check a name in a node's `source_fn_stack`: what the model called, which torch looks up but does not call.

    Raises UnsafeFileError if the way to it leaves torch, over a module that is imported there.
    """
    first, *rest = name.split(".")
    if first != "torch":
        return
    found: Any = torch
    for part in rest:
        if not isinstance(found, ModuleType):
            return
        found = vars(found).get(part)
        if isinstance(found, ModuleType) and found.__name__.partition(".")[0] != "torch":
            raise UnsafeFileError(f"a node names {name[:200]!r} as its source, which is not torch's")
