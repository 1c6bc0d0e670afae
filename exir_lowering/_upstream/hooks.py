"""What is replaced in ExecuTorch and torch while a caller needs it: how partitioners propose, refuse and wait."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any, Protocol

import torch
from executorch.exir.backend.canonical_partitioners import group_partitioner
from executorch.exir.backend.canonical_partitioners.config_partitioner import ConfigerationBasedPartitioner
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
from exir_lowering.errors import PartitionerContractError


class Listener(Protocol):
    """Learns why partitioners leave nodes."""

    def refused(self, node: torch.fx.Node, reason: str, by: str) -> None:
        """Learn the reason, and what refused the node."""

    def raised(self, node: torch.fx.Node, error: Exception, plugin: object, check: str) -> None:
        """Learn that a check, of a plug-in or None, raised, which refuses the node; or raise."""


_listener: ContextVar[Listener | None] = ContextVar("exir_lowering_listener", default=None)


def listener() -> Listener | None:
    """Return who listens in this thread."""
    return _listener.get()


def listening(new: Listener) -> AbstractContextManager[Listener]:
    """Collect why partitioners of this thread leave nodes: they log or report it, only answer torch.fx, or raise."""
    return during(_listener, new, _REPORTING)


def _notify(node: torch.fx.Node, reason: str, by: str) -> None:
    if (heard := listener()) is not None:
        heard.refused(node, reason, by)


def guarded(node: torch.fx.Node, plugin: object, check: str, call: Callable[[], Any], no: Any = False) -> Any:
    """Return what a plug-in's check of a node answers; "no" if it raises, and somebody listens."""
    try:
        return call()
    except (PartitionerContractError, MemoryError):
        raise
    except Exception as error:
        if (heard := listener()) is None:
            raise
        heard.raised(node, error, plugin, check if plugin is None else f"{type(plugin).__name__}.{check}")
        return no


def ask_support(support: OperatorSupportBase, node: torch.fx.Node, call: Callable[[], Any]) -> bool:
    """Return what an operator support answers in a call; the listener is notified if it refuses the node."""

    def answer() -> bool:
        name, taken = type(support).__name__, bool(call())
        if not taken and name != "MatchTag":  # ExecuTorch's mark of what a partitioner chose before
            _notify(node, f"{name}.is_node_supported returned False", name)
        return taken

    return bool(guarded(node, support, "is_node_supported", answer))


class _GuardedConfig:
    """A configuration of XNNPACK's kind, whose checks refuse a node where they raise."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def check_constraints(self, node: torch.fx.Node, program: Any) -> Any:
        return guarded(node, self._config, "check_constraints", lambda: self._config.check_constraints(node, program))

    def get_partition(self, node: torch.fx.Node, program: Any) -> Any:
        return guarded(node, self._config, "get_partition", lambda: self._config.get_partition(node, program), [])


def _reporting() -> list[tuple[Any, str, Any]]:
    supported = CapabilityBasedPartitioner._is_node_supported

    def telling(report: Callable[[Any, torch.fx.Node, str], None]) -> Callable[[Any, torch.fx.Node, str], None]:
        def reported(self: Any, node: torch.fx.Node, reason: str) -> None:
            report(self, node, reason)
            _notify(node, reason, "")

        return reported

    def answered(self: CapabilityBasedPartitioner, node: torch.fx.Node) -> bool:
        return ask_support(self.operator_support, node, lambda: supported(self, node))

    @wraps(match := ConfigerationBasedPartitioner.get_matched_nodes_from_configs)
    def matched(self: ConfigerationBasedPartitioner, program: Any) -> Any:
        view, configs = copy.copy(self), self.target_partitioner_configs
        view.target_partitioner_configs = {name: _GuardedConfig(config) for name, config in configs.items()}
        return match(view, program)

    return [
        (WhyNoPartition, "__call__", telling(WhyNoPartition.__call__)),
        (WhyNoPartitionReporter, "report_reject", telling(WhyNoPartitionReporter.report_reject)),
        (CapabilityBasedPartitioner, "_is_node_supported", answered),
        (ConfigerationBasedPartitioner, "get_matched_nodes_from_configs", matched),
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


def conversions_by(convert: Callable[[str, Any, Any, Any], Any]) -> list[tuple[Any, str, Any]]:
    """Return what replaces ExecuTorch's conversion for partitioners by a function's, where that returns a program."""
    generate = et_program._gen_edge_manager_for_partitioners

    def generated(partitioners: Any, programs: Any, config: Any, constants: Any, etrecord: bool | None = False) -> Any:
        made: dict[str, Any] = {}
        for name, program in () if etrecord else programs.items():
            made[name] = convert(name, program, partitioners.get(name, []), config)
            if made[name] is None:
                break
        if len(made) < len(programs) or None in made.values():
            return generate(partitioners, programs, config, constants, etrecord)
        kept = {op for program in made.values() for op in program.verifiers[0]()._preserve_ops}
        config._core_aten_ops_exception_list = list({*config._core_aten_ops_exception_list, *kept})
        return EdgeProgramManager(made, constants, config, list(kept))

    return [(et_program, "_gen_edge_manager_for_partitioners", generated)]


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
