"""What AOTAutograd decomposes: core ATen, except where that changes random numbers or gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from exir_lowering._upstream.dynamo import core_aten_decompositions

_KEPT = (
    "aten.bernoulli",  # decomposed, it draws other numbers than in eager PyTorch
    "aten.rrelu",
)
_KEPT_IN_TRAINING = ("aten._scaled_dot_product_flash_attention_for_cpu",)
"""Decomposed, it returns something else than what its own backward operator needs."""


def choose_decompositions(given: Mapping[Any, Callable[..., Any]] | None, *, training: bool) -> dict[Any, Any]:
    """Return the decompositions for a graph.

    Args:
        given: The caller's; None for the default ones.
        training: Whether the graph is differentiated.
    """
    if given is not None:
        return dict(given)
    kept = _KEPT + (_KEPT_IN_TRAINING if training else ())
    return {
        operator: made for operator, made in core_aten_decompositions().items() if not str(operator).startswith(kept)
    }


def differentiable_attention(given: Mapping[Any, Any] | None, *, training: bool) -> AbstractContextManager[None]:
    """Return a context in which attention is traced as products and softmax, so that its backward graph is core ATen.

    Args:
        given: The caller's decompositions, which decide themselves.
        training: Whether the graph is differentiated.
    """
    return sdpa_kernel(SDPBackend.MATH) if training and given is None else nullcontext()
