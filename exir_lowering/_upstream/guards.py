"""What evaluating an operator on fake tensors decides about sizes although nothing in a graph depends on it.

torch notes each answer that Python gets about a symbolic size as a guard, which narrows the size: a dimension is less
than 16 as torch would choose another kernel for more, or is what it is in the example inputs as a kernel in C++ asks
for a number. The kernels are torch's own; programs that are lowered have others. What tracing asks stays a guard: what
is traced depends on it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from executorch.exir import pass_base as et_pass_base  # these three trace, and describe each value that they trace
from torch._export import pass_base as torch_pass_base
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from exir_lowering._upstream import pins
from exir_lowering._upstream.fakes import shape_env_of
from exir_lowering._upstream.locks import during, replacing


def without_guards(shape_env: Any) -> AbstractContextManager[Any]:
    """Let what is evaluated leave sizes as they are; a program without symbolic sizes has no environment."""
    return nullcontext() if shape_env is None else shape_env.suppress_guards()


def evaluating() -> AbstractContextManager[bool]:
    """Keep a choice of a kernel and descriptions from narrowing sizes where this thread converts."""
    return during(_evaluating, True, _REPLACED)


_evaluating: ContextVar[bool] = ContextVar("exir_lowering_evaluating", default=False)


def _replacements() -> list[tuple[Any, str, Any]]:
    if not pins.is_on("sizes without guards"):
        return []

    def unguarded(owner: Any, name: str) -> tuple[Any, str, Any]:
        function = getattr(owner, name)

        @wraps(function)
        def asked(given: Any, *args: Any, **kwargs: Any) -> Any:
            environment = shape_env_of(pytree.tree_leaves(given)[0]) if _evaluating.get() else None
            with without_guards(environment):
                return function(given, *args, **kwargs)

        return owner, name, asked

    return [
        unguarded(torch._C, "_select_conv_backend"),  # what fake tensors ask of a convolution
        # Passes look at the first row of what is mapped, and take all of them apart.
        *(unguarded(base, "_unstack_pytree") for base in (et_pass_base, torch_pass_base)),
        # It asks whether a size is 1, to say how memory is ordered.
        *(unguarded(base, "_extract_tensor_metadata") for base in (proxy_tensor, et_pass_base, torch_pass_base)),
    ]


_REPLACED = replacing(_replacements)
