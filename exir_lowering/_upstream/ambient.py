"""Torch's settings in a caller's thread must not change what a file or a conversion computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache

import torch

from exir_lowering._upstream import locks


def neutral() -> AbstractContextManager[None]:
    """Set aside autocast, inference mode, gradients, other default devices and dtypes; fast, for each delegate call."""
    if (
        torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.get_default_dtype() is not torch.float32
        or torch._C._len_torch_function_stack()  # of modes that torch functions go through; a default device is one
    ):
        return set_aside(torch.float32, gradients=False)
    return torch.no_grad()


def switches() -> tuple[object, ...]:
    """Return the global settings that decide what operators consist of, such as the preferred kind of attention."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
    )


_OWNERS = (torch, torch.nn.functional, torch.Tensor)
_PLACES = [(owner, name) for owner in _OWNERS for name in dir(owner) if callable(getattr(owner, name, None))]
_BEFORE = [getattr(owner, name) for owner, name in _PLACES]


def replaced() -> tuple[object, ...]:
    """Return the code that somebody has put in the place of torch's functions, which its decompositions call."""
    now = [getattr(owner, name, None) for owner, name in _PLACES]
    changed = () if now == _BEFORE else zip(_PLACES, _BEFORE, now, strict=True)
    return tuple((place, getattr(new, "__code__", new)) for place, before, new in changed if new != before)


@contextmanager
def set_aside(dtype: torch.dtype, *, gradients: bool) -> Iterator[None]:
    """Set aside this thread's settings for torch while the context lasts, for those given."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(gradients))
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if torch.get_default_dtype() is not dtype:
            stack.enter_context(_default_dtype(dtype))
        yield


@cache
def _default_dtype(dtype: torch.dtype) -> locks.Shared:
    """Return a context with another default dtype. All threads share the dtype, so the last one out restores it."""

    def prepare() -> tuple[locks.Change, locks.Change]:
        before = torch.get_default_dtype()
        return lambda: torch.set_default_dtype(dtype), lambda: torch.set_default_dtype(before)

    return locks.Shared(prepare)
