"""What a caller's thread has set for torch must not change what a file computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from exir_lowering import _upstream


def neutral() -> AbstractContextManager[None]:
    """Set aside autocast, inference mode, gradients, and other default devices and dtypes, while the context lasts.

    Memory that is made in inference mode cannot be written outside of it, and the others change what operators return.
    It is entered for each call of a delegate, and does the least where nothing but gradients is to be set aside.
    """
    if (
        torch.is_inference_mode_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.get_default_dtype() is not torch.float32
        or _upstream.function_modes()
    ):
        return _set_aside()
    return torch.no_grad()


@contextmanager
def _set_aside() -> Iterator[None]:
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        dtype = torch.get_default_dtype()
        if dtype is not torch.float32:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        yield
