"""What a conversion needs from the thread that it runs in, and what it must not leave behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream import locks
from exir_lowering._upstream.ambient import replaced, set_aside
from exir_lowering._upstream.guards import evaluating
from exir_lowering._upstream.tracing import DECOMPOSITIONS, ConversionState
from exir_lowering._upstream.value_keys import MEMORY
from exir_lowering.fast import accelerated
from exir_lowering.graphs.measures import tensors


@contextmanager
def converting(programs: Iterable[ExportedProgram], *, gradients: bool, fast: bool = True) -> Iterator[None]:
    """Take the lock of conversions, set aside what `neutral` does for one, and leave nothing behind.

    Without gradients, a conversion decomposes other operators. If `fast`, torch's operators are looked up once.
    """
    with locks.conversion():
        MEMORY.keep_for(replaced())
        before = ConversionState()
        _converting.append(before)
        try:
            with DECOMPOSITIONS, evaluating(), settings(programs, gradients=gradients), accelerated(fast, "look up"):
                yield
        except BaseException:
            before.restore()
            raise
        finally:  # torch has restored everything itself; Dynamo, in another thread, may have switched something too
            _converting.remove(before)


_converting: list[ConversionState] = []


def _restore_in_child() -> None:
    """Undo in a forked child what the thread that was converting had changed."""
    if _converting:
        _converting[0].restore()
        _converting.clear()


locks.restore_in_child(_restore_in_child)


def settings(programs: Iterable[ExportedProgram], *, gradients: bool) -> AbstractContextManager[None]:
    """Set the same aside as `converting`, for what needs no lock."""
    nodes = (node for program in programs for _, node in graphs.every_node(program.graph_module))
    return set_aside(next(filter(None, map(_find_default_dtype, nodes)), torch.float32), gradients=gradients)


def _find_default_dtype(node: Node) -> torch.dtype | None:
    """Return the dtype of a floating-point tensor that an operator made from no tensor and without a dtype argument."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return None
    if not graphs.operator_name(node).startswith("aten."):
        return None
    said = any(isinstance(argument, torch.dtype) for argument in (*node.args, *node.kwargs.values()))
    read = tensors([source.meta.get("val") for source in node.all_input_nodes])
    return None if said or any(one.is_floating_point() or one.is_complex() for one in read) else value.dtype
