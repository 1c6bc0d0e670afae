"""What a caller's thread has set for torch must not change what is computed by a file or by a conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache

import torch

from exir_lowering._upstream import locks
from exir_lowering._upstream.tensors import function_modes


def neutral() -> AbstractContextManager[None]:
    """Set aside autocast, inference mode, gradients, and other default devices and dtypes, while the context lasts.

    Memory that is made in inference mode cannot be written outside of it, and the others change what operators return.
    It is entered for each call of a delegate, and does the least where nothing but gradients is to be set aside.
    """
    if (
        torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.get_default_dtype() is not torch.float32
        or function_modes()
    ):
        return set_aside(torch.float32, gradients=False)
    return torch.no_grad()


@contextmanager
def set_aside(dtype: torch.dtype, *, gradients: bool) -> Iterator[None]:
    """Set aside what this thread has set for torch, while the context lasts.

    Args:
        dtype: The default dtype meanwhile.
        gradients: Whether they are enabled meanwhile.
    """
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
    """Return a context with another default dtype; it is that of all threads, so the last one out puts it back."""

    def change() -> Callable[[], None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        return lambda: torch.set_default_dtype(before)

    return locks.Shared(change)
