"""Run a partitioner, check the form of its result, and say why it left operators on the host.

The reasons are its own words (what it returns, what it reports in ExecuTorch's ways), or which of its checks failed.
The other names are for those who replace torch.fx's `CapabilityBasedPartitioner`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from executorch.exir.backend.canonical_partitioners.config_partitioner import (
    ConfigerationBasedPartitioner,
    format_target_name,
)
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner

from exir_lowering import graphs
from exir_lowering._upstream.hooks import ask_support, guarded, listener, listening, proposing_with, qualified_operator
from exir_lowering._upstream.programs import fake_mode_of
from exir_lowering._upstream.tensors import SYMBOLS
from exir_lowering.errors import InputError, LoweringError, PartitionerContractError, exception_text
from exir_lowering.graphs import measures, sources
from exir_lowering.model import Adjustment, Rejection

__all__ = [
    "Answer", "Decomposing", "FakeState", "ask", "asked_of_forms", "guarded", "list_supported", "listen",
    "make_fake_state", "proposing_with", "qualified_operator", "view_of",
]  # fmt: skip

_Said = TypeVar("_Said", Rejection, Adjustment)

Refusals: TypeAlias = dict[Node, dict[str, str]]
"""What a partitioner reported while it ran, by node: each reason, and who gave it first."""


FakeState: TypeAlias = dict[str, Any]


def make_fake_state(program: ExportedProgram) -> FakeState:
    """Return fake parameters and buffers, of which partitioners see shapes only; the own ones without fake values."""
    mode = fake_mode_of(program.graph_module)
    if mode is None:
        return dict(program.state_dict)
    return {name: mode.from_tensor(tensor, static_shapes=True) for name, tensor in program.state_dict.items()}


def view_of(program: ExportedProgram, state: FakeState) -> ExportedProgram:
    """Return a program as partitioners see it: the same graph, with fake state, and copies of lifted constants."""
    view = graphs.copy_program(program, program.graph_module)
    view.state_dict.clear()
    view.state_dict.update({name: state[name] for name in program.state_dict})
    view.constants.update({name: one.clone() for name, one in program.constants.items() if type(one) is torch.Tensor})
    return view


def asked_of_forms(partitioner: Partitioner) -> Partitioner:
    """Return who says whether a few operators would be taken: one that weighs whole partitions names another one."""
    asked: Partitioner = getattr(partitioner, "asked_of_forms", partitioner)
    return asked


class _Listener:
    """Records the reasons that are reported in ExecuTorch's ways, and what checks raise; unless that is an error."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.reported: Refusals = {}
        self.failed: Refusals = {}  # those of checks that raised

    def refused(self, node: Node, reason: str, by: str) -> None:
        self.reported.setdefault(node, {}).setdefault(reason.strip().rstrip("."), by)

    def raised(self, node: Node, error: Exception, plugin: object, check: str) -> None:
        said, line = f"{check} raised {exception_text(error)}", graphs.source_line(node)
        if self.strict:
            raise PartitionerContractError(
                f"{said} for node {node.name} ({graphs.operator_name(node)}){f', {line}' if line else ''}"
                f"{sources.raised_at(error, type(plugin))}",
                violation="raised",
                details={"node": node.name},
            ) from error
        for told in (self.reported, self.failed):
            told.setdefault(node, {}).setdefault(f"{said}{sources.raised_at(error, type(plugin), ', at ')}", check)


@contextmanager
def listen(strict: bool | None = None) -> Iterator[_Listener]:
    """Listen while the context lasts; if strict, a check that raises is an error; None is as who listens already."""
    outer = listener()
    new = _Listener(outer.strict if strict is None and isinstance(outer, _Listener) else bool(strict))
    with listening(new):
        yield new


class Decomposing:
    """A partitioner as a conversion to Edge dialect asks it: an operator is decomposed where its check raises."""

    def __init__(self, partitioner: Partitioner) -> None:
        self.partitioner = partitioner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.partitioner, name)

    def ops_to_not_decompose(self, program: ExportedProgram) -> tuple[list[Any], Callable[[Node], Any] | None]:
        """Return what the partitioner returns, with a check that does not raise."""
        try:
            wanted, check = self.partitioner.ops_to_not_decompose(view_of(program, make_fake_state(program)))
        except (LoweringError, MemoryError):
            raise
        except Exception as error:
            kind = type(self.partitioner)
            at = sources.raised_at(error, kind)
            text = f"{kind.__name__}.ops_to_not_decompose raised {exception_text(error)}{at}"
            raise PartitionerContractError(text, violation="raised") from error
        if check is None:
            return wanted, None
        ask = partial(guarded, plugin=self.partitioner, check="ops_to_not_decompose")
        return wanted, lambda node: node.target in wanted and ask(node, call=partial(check, node))


def list_supported(partitioner: CapabilityBasedPartitioner) -> dict[Node, None]:
    """Return the nodes that a partitioner's support takes, and report those that it refuses."""
    modules, support = dict(partitioner.graph_module.named_modules()), partitioner.operator_support
    nodes = [node for node in partitioner.graph_module.graph.nodes if node.op != "output"]
    asked = ((node, partial(support.is_node_supported, modules, node)) for node in nodes)
    return {node: None for node, check in asked if ask_support(support, node, check)}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a partitioner returned."""

    partitioner: Partitioner
    tagged: ExportedProgram  # the one that it was given, or a copy
    destinations: dict[str, DelegationSpec]  # by tag
    given: Mapping[str, Rejection]  # the rejections that it returned, by node
    adjustments: tuple[Adjustment, ...]
    heard: _Listener

    def rejections(self, besides: Collection[str] = ()) -> tuple[Rejection, ...]:
        """Return a rejection, without its method, for each operator without a tag that does not move with a tagged one.

        The partitioner's checks must not see those `besides`, as ExecuTorch's mark nodes, which compile differently
        then.
        """
        found = []
        for path, node in graphs.staying_nodes(self.tagged.graph_module):
            key = graphs.qualified_name(path, node)
            if not graphs.is_operator(node) or graphs.DELEGATION_TAG in node.meta or key in besides:
                continue
            if key in self.given and node not in self.heard.failed:
                found.append(self.given[key])
                continue
            reasons = self.heard.reported.get(node)
            if reasons:
                text = _with_values(node, "; ".join(_cause(node, words) for words in reasons))
                code, by = "check", next(iter(reasons.values()))
            else:
                code, text, by = _failing_check(self.partitioner, self.tagged, path, node)
            by = by or type(self.partitioner).__name__
            found.append(Rejection("", key, graphs.operator_name(node), text, by, code))
        return tuple(found)


def ask(who: str, partitioner: Partitioner, program: ExportedProgram, strict: bool | None = None) -> Answer:
    """Run a partitioner, which errors call `who`; PartitionerContractError if it raises, or returns something else.

    Where its check of a node raises, that is the reason why the node stays on the host; see `listen` for `strict`.
    """
    try:
        with listen(strict) as heard:
            result: Any = partitioner(program)
    except InputError as error:  # from a partitioner of this package: the user's mistake, not the partitioner's
        raise InputError(f"{who}: {error}") from error
    except PartitionerContractError as error:
        raise PartitionerContractError(f"{who}: {error}", violation=error.violation, details=error.details) from error
    except MemoryError:
        raise
    except Exception as error:
        message = f"{who} raised {exception_text(error)}{sources.raised_at(error, type(partitioner))}"
        raise PartitionerContractError(message, violation="raised") from error
    if not isinstance(getattr(result, "tagged_exported_program", None), ExportedProgram):
        raise PartitionerContractError(
            f"{who} returned {type(result).__name__}, expected a PartitionResult with the tagged ExportedProgram.",
            violation="result_type",
        )
    given = _read_remarks(who, result, "rejections", Rejection)
    tags = getattr(result, "partition_tags", None)
    wrong: Any = {"violation": "destinations", "details": {"partitioner": partitioner}}
    if not isinstance(tags, Mapping):
        raise PartitionerContractError(
            f"{who} returned partition_tags={tags!r}, expected a mapping from each tag to a DelegationSpec.", **wrong
        )
    for name, spec in tags.items():
        specs = getattr(spec, "compile_specs", None)
        well_formed = isinstance(specs, (list, tuple)) and all(isinstance(item, CompileSpec) for item in specs)
        if not isinstance(getattr(spec, "backend_id", None), str) or not well_formed:
            raise PartitionerContractError(
                f"{who} sends tag {name!r} to {spec!r}, expected DelegationSpec(backend_id, [CompileSpec, ...]).",
                **wrong,
            )
    adjustments = _read_remarks(who, result, "adjustments", Adjustment)
    by_node = {rejection.node: rejection for rejection in given}
    return Answer(partitioner, result.tagged_exported_program, dict(tags), by_node, adjustments, heard)


def _read_remarks(who: str, result: Any, name: str, kind: type[_Said]) -> tuple[_Said, ...]:
    """Return what a partitioner returned in addition to its tags."""
    given = getattr(result, name, None) or ()
    if not isinstance(given, (list, tuple)) or not all(isinstance(item, kind) for item in given):
        raise PartitionerContractError(
            f"{who} returned {name}={given!r}, expected a list of exir_lowering.{kind.__name__}.",
            violation="result_type",
        )
    return tuple(given)


def _failing_check(
    partitioner: Partitioner, tagged: ExportedProgram, path: tuple[str, ...], node: Node
) -> tuple[str, str, str]:
    """Return the code, the text and who says so: the failing check, of one that is a table of them by operator."""
    name = type(partitioner).__name__
    while isinstance(getattr(partitioner, "partitioner", None), Partitioner):  # one that does less than another one
        partitioner = partitioner.partitioner
    if not isinstance(partitioner, ConfigerationBasedPartitioner):
        return "unclaimed", f"not claimed, and {name} does not say why", ""
    name = type(partitioner).__name__
    if path:
        return "nested", f"{name} looks at the top graph only, and this is in {'.'.join(path)}", ""
    config = partitioner.target_partitioner_configs.get(format_target_name(getattr(node.target, "__name__", "")))
    if config is None:
        return "op", f"{name} has no configuration for {graphs.operator_name(node)}", ""
    check = f"{type(config).__name__}.check_constraints"
    try:
        taken = config.check_constraints(node, tagged)
    except MemoryError:
        raise
    except Exception as error:  # a check that relies on what the partitioner did before
        return "check", f"{check} raised {exception_text(error)}", check
    if not taken:
        return "check", _with_values(node, f"{check} returned False"), check
    return "check", f"{type(config).__name__}.get_partition returned no partition with it", type(config).__name__


def _cause(node: Node, words: str) -> str:
    """Return the actual cause: ExecuTorch's check for XNNPACK says "invalid dtype" of all that is unusual."""
    values = [source.meta.get("val") for source in node.all_input_nodes]
    read = [tensor for value in values for tensor in measures.tensors(value)]
    if words != "invalid dtype":
        return words
    if any(isinstance(value, (int, float, *SYMBOLS)) for value in values):
        why = "one of its arguments is a number that is computed at run time, not a tensor"
    elif any(map(has_free_unbacked_symbols, read)):
        why = "one of its inputs has a size that depends on the values of a tensor"
    elif any(isinstance(size, int) and size == 0 for tensor in read for size in tensor.shape):
        why = "one of its inputs has no elements"
    else:
        return words
    return f'{why} (the check says "{words}")'


def _with_values(node: Node, reason: str) -> str:
    """Add the types of an operator's inputs and results: reasons such as "invalid dtype" lack them."""

    def types(nodes: Collection[Node]) -> list[str]:
        found = [tensor for one in nodes for tensor in measures.tensors(one.meta.get("val"))]
        return [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in found]

    read, made = ", ".join(types(node.all_input_nodes)), ", ".join(types([node]))
    return f"{reason} ({read or 'nothing'} -> {made or 'no tensor'})"
