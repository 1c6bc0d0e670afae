"""What is replaced in ExecuTorch and torch while a caller needs it: how partitioners propose, refuse and wait."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any

import torch
from executorch.exir.backend.canonical_partitioners import group_partitioner
from executorch.exir.backend.canonical_partitioners.group_partitioner import GroupBasedPartitioner
from executorch.exir.backend.utils import WhyNoPartition, WhyNoPartitionReporter

# The functions that to_edge and to_edge_transform_and_lower call have no public names.
from executorch.exir.program import _program as et_program
from executorch.exir.program._program import EdgeProgramManager
from torch.export import ExportedProgram
from torch.fx.node import _get_qualified_name  # the names of operators that torch.fx's partitioner takes in arguments

# Its answer for each node, and its table of all downstream nodes, have private names.
from torch.fx.passes.infra import partitioner as fx_partitioner
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from exir_lowering._upstream import pins
from exir_lowering._upstream.locks import during, replacing

Refusal = Callable[[torch.fx.Node, str, str], None]  # of a node, the reason why it is left, and what refused it

_listener: ContextVar[Refusal | None] = ContextVar("exir_lowering_listener", default=None)


def listening(listener: Refusal) -> AbstractContextManager[Refusal]:
    """Collect why partitioners of this thread leave nodes: they log it, report it, or only answer torch.fx."""
    return during(_listener, listener, _REPORTING)


def _notify(node: torch.fx.Node, reason: str, by: str) -> None:
    listener = _listener.get()
    if listener is not None:
        listener(node, reason, by)


def note_refusal(support: OperatorSupportBase, node: torch.fx.Node) -> None:
    """Notify the listener that an operator support refused a node."""
    name = type(support).__name__
    if name != "MatchTag":  # ExecuTorch's mark of what a partitioner chose before
        _notify(node, f"{name}.is_node_supported returned False", name)


def _reporting() -> list[tuple[Any, str, Any]]:
    supported = CapabilityBasedPartitioner._is_node_supported

    def telling(report: Callable[[Any, torch.fx.Node, str], None]) -> Callable[[Any, torch.fx.Node, str], None]:
        def reported(self: Any, node: torch.fx.Node, reason: str) -> None:
            report(self, node, reason)
            _notify(node, reason, "")

        return reported

    def answered(self: CapabilityBasedPartitioner, node: torch.fx.Node) -> bool:
        answer: bool = supported(self, node)
        if not answer:
            note_refusal(self.operator_support, node)
        return answer

    return [
        (WhyNoPartition, "__call__", telling(WhyNoPartition.__call__)),
        (WhyNoPartitionReporter, "report_reject", telling(WhyNoPartitionReporter.report_reject)),
        (CapabilityBasedPartitioner, "_is_node_supported", answered),
    ]


_REPORTING = replacing(lambda: _reporting() if pins.is_on("refusal reasons") else [])


@cache  # the same context for the same function: the contexts of several threads end in any order
def proposing_with(propose: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Return a context in which all partitioners propose by a function, without their quadratic tables of nodes."""

    def replacements() -> list[tuple[Any, str, Any]]:
        if not pins.is_on("linear-time proposals"):
            return []
        kinds, viewers = (CapabilityBasedPartitioner, GroupBasedPartitioner), (fx_partitioner, group_partitioner)
        tables = [(one, "_DependencyViewer", partial(_LazyTable, one._DependencyViewer)) for one in viewers]
        return [*((kind, "propose_partitions", propose) for kind in kinds), *tables]

    return replacing(replacements)


class _LazyTable:
    """A table of downstream nodes that is made when it is first used."""

    def __init__(self, table: Callable[[torch.fx.GraphModule], Any], graph_module: torch.fx.GraphModule) -> None:
        self._make, self._graph_module, self._made = table, graph_module, None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = self._make(self._graph_module)
        return getattr(self._made, name)


def qualified_operator(node: torch.fx.Node) -> str:
    """Return torch.fx's partitioner's name for a node's operator."""
    return str(_get_qualified_name(node.target))  # type: ignore[arg-type]


def conversions_in(
    context: Callable[[], AbstractContextManager[Any]], prepare: Callable[[Any], Any] | None = None
) -> list[tuple[Any, str, Any]]:
    """Return what replaces ExecuTorch's own conversions by the same ones, each in a context, of prepared programs."""

    def prepared(given: Any) -> Any:
        if isinstance(given, dict):
            return {name: prepared(one) for name, one in given.items()}
        return prepare(given) if prepare is not None and isinstance(given, ExportedProgram) else given

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with context():
                return function(*map(prepared, args), **{name: prepared(one) for name, one in kwargs.items()})

        return wrapped

    manager = EdgeProgramManager
    methods = [(manager, name) for name in ("__init__", "transform", "to_backend", "to_executorch")]
    # The functions that to_edge and to_edge_transform_and_lower call before they have a manager.
    functions = [(et_program, name) for name in ("_generate_edge_program", "_gen_edge_manager_for_partitioners")]
    return [(owner, name, within(getattr(owner, name))) for owner, name in methods + functions]
