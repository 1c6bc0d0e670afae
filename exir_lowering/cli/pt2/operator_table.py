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

from exir_lowering.errors import InputError
from exir_lowering.graphs.operators import functions
from exir_lowering.graphs.operators.functions import HIGHER_ORDER, REFUSED, split_words
from exir_lowering.graphs.serialized.grammar import UnsafeFileError

NAMESPACES = split_words(
    """
    aten prims quantized_decomposed dim_order_ops executorch_prim et_copy export quant_fusion
    torchao torchvision torchaudio llama cadence cortex_m arm tosa
    """
)
"""The namespaces of operators that only compute: PyTorch's, ExecuTorch's and those of the libraries of models."""

_HIGHER_ORDER = HIGHER_ORDER | {"flex_attention", "with_effects"}

FUNCTIONS = {f"{one.__module__}.{one.__name__}" for one in functions.FUNCTIONS.values() if one.__module__ != "builtins"}
FUNCTIONS |= split_words(
    """
    torch._functorch.predispatch._add_batch_dim torch._functorch.predispatch._remove_batch_dim
    torch._functorch.predispatch._vmap_increment_nesting torch._functorch.predispatch._vmap_decrement_nesting
    torch._functorch.predispatch.lazy_load_decompositions
    """
)
"""Functions other than operators: of symbolic sizes, and those that `torch.vmap` is exported as."""

_OVERLOAD = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)", re.ASCII)
_HIGHER_ORDER_NAME = re.compile(r"torch\.ops\.higher_order\.(\w+)", re.ASCII)


def check_target(name: str, known: frozenset[str]) -> None:
    """Check what a node calls: UnsafeFileError if it is in no closed list, InputError if it is not registered here."""
    higher = _HIGHER_ORDER_NAME.fullmatch(name)
    if name in FUNCTIONS or (higher and higher[1] in _HIGHER_ORDER):
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
    """Check what a model called, which torch looks up: UnsafeFileError if the way leaves torch over a module there."""
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
