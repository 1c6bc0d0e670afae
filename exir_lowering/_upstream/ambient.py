"""What a caller's thread has set for torch must not change what is computed, neither by a file nor by a conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import _upstream, graphs
from exir_lowering._upstream import locks


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
        return _set_aside(torch.float32, gradients=False)
    return torch.no_grad()


@contextmanager
def converting(programs: Iterable[ExportedProgram], *, gradients: bool) -> Iterator[None]:
    """Set the same aside for a conversion, and leave nothing of it behind; the lock of conversions is to be held.

    Args:
        programs: What is converted. Its default dtype is that of its export: operators that were given no dtype mean
            it.
        gradients: Whether they are enabled, as they are by default: a conversion decomposes other operators without.
    """
    before = _upstream.ConversionState()
    _converting.append(before)
    try:
        with _upstream.DECOMPOSITIONS, settings(programs, gradients=gradients):
            yield
    finally:
        before.restore()
        _converting.remove(before)


_converting: list[_upstream.ConversionState] = []


def _restore_in_child() -> None:
    """Undo in a forked child what the thread that was converting had changed."""
    if _converting:
        _converting[0].restore()
        _converting.clear()


locks.restore_in_child(_restore_in_child)


def settings(programs: Iterable[ExportedProgram], *, gradients: bool) -> AbstractContextManager[None]:
    """Set the same aside as `converting`, for what needs no lock."""
    return _set_aside(_exported_dtype(programs), gradients=gradients)


@contextmanager
def _set_aside(dtype: torch.dtype, *, gradients: bool) -> Iterator[None]:
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


def _exported_dtype(programs: Iterable[ExportedProgram]) -> torch.dtype:
    """Return the default dtype with which programs were exported, float32 if no operator tells."""
    for program in programs:
        for _, module in graphs.walk(program.graph_module):
            for node in module.graph.nodes:
                dtype = _defaulted(node)
                if dtype is not None:
                    return dtype
    return torch.float32


def _defaulted(node: Node) -> torch.dtype | None:
    """Return the dtype of a floating-point tensor that an operator made of none, and without being told a dtype."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return None
    if not graphs.operator_name(node).startswith("aten."):
        return None
    given = [*node.args, *node.kwargs.values()]
    if any(isinstance(argument, torch.dtype) for argument in given):
        return None
    sources = [source.meta.get("val") for source in node.all_input_nodes]
    if any(
        isinstance(source, torch.Tensor) and (source.is_floating_point() or source.is_complex()) for source in sources
    ):
        return None
    return value.dtype
