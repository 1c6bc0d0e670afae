"""Run a partitioner inside another one: on the same program, with some operators hidden from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import (
    Adjustment,
    DelegationSpec,
    ExplainedResult,
    Partitioner,
    PartitionerContractError,
    Rejection,
    graphs,
)
from exir_lowering.plugins import asking


@dataclass(frozen=True)
class Run:
    """What a partitioner did to a program, from which its tags were removed again."""

    tags: Mapping[Node, str]  # of each node of the program that it claimed, including constants
    destinations: Mapping[str, DelegationSpec]  # of each tag
    rejections: tuple[Rejection, ...]  # of each operator that it could see and left
    adjustments: tuple[Adjustment, ...]  # of partitions that it dropped or cut


def run(partitioner: Partitioner, program: ExportedProgram, out_of_sight: Iterable[Node] = ()) -> Run:
    """Run a partitioner on a program without tags, and remove those that it sets; errors as of `asking.ask`.

    It sees unsupported operators in place of those out of sight, and may not take a call of a graph with one.
    """
    who = f"Partitioner {type(partitioner).__name__}"
    names = {node: (path, node.name) for path, node in graphs.every_node(program.graph_module)}
    unseen = set(out_of_sight)
    calls = _calls_of(program.graph_module, unseen)
    with _hidden([*unseen, *calls]):
        answer = asking.ask(who, partitioner, program)
    hidden = {graphs.qualified_name(names[node][0], node) for node in (*unseen, *calls)}
    rejections = answer.rejections(besides=hidden)
    tags = _take_off(who, answer)
    if answer.tagged is not program:  # it tagged a copy
        _take_off(who, replace(answer, tagged=program))
    kept = {node: tags[key] for node, key in names.items() if key in tags and node not in unseen and node not in calls}
    if unseen:
        _clear_marks(names, kept)
    left = []
    for node, held in calls.items():
        reason = f"it calls a graph with {held}, whose destination was decided before"
        name = graphs.qualified_name(names[node][0], node)
        left.append(Rejection("", name, graphs.operator_name(node), reason, "nested_run", "nested"))
    return Run(kept, answer.destinations, (*rejections, *left), answer.adjustments)


def tagged(
    program: ExportedProgram,
    tags: Mapping[Node, str],
    destinations: Mapping[str, DelegationSpec],
    rejections: Iterable[Rejection],
    adjustments: Iterable[Adjustment],
) -> ExplainedResult:
    """Tag a program, and return the result with the destinations that are used."""
    for node, tag in tags.items():
        node.meta[graphs.DELEGATION_TAG] = tag
    used = set(tags.values())
    kept = {tag: spec for tag, spec in destinations.items() if tag in used}
    return ExplainedResult(program, kept, tuple(rejections), tuple(adjustments))


def _calls_of(module: GraphModule, unseen: Collection[Node]) -> dict[Node, str]:
    """Return the calls of graphs that contain one of the unseen nodes, with that node's name."""
    found: dict[Node, str] = {}
    for node in module.graph.nodes:
        for nested in graphs.nested_graphs(module, node) if unseen else ():
            inner = _calls_of(nested.module, unseen)
            found.update(inner)
            held = next((n for n in nested.module.graph.nodes if n in unseen or n in inner), None)
            if held is not None and node not in unseen:
                found.setdefault(node, f"{nested.name}.{held.name}")
    return found


def _take_off(who: str, answer: asking.Answer) -> dict[tuple[tuple[str, ...], str], str]:
    """Remove the tags from a program, and return them by path and name."""
    tags = {}
    for path, node in graphs.every_node(answer.tagged.graph_module):
        tag = node.meta.pop(graphs.DELEGATION_TAG, None)
        if tag is None:
            continue
        tags[path, node.name] = tag
        if tag not in answer.destinations:
            raise PartitionerContractError(
                f"{who} tagged {graphs.qualified_name(path, node)} with {tag!r}, but partition_tags has no "
                f"destination for it (it has: {', '.join(map(repr, answer.destinations)) or 'none'}). Add it with "
                "a DelegationSpec.",
                violation="tag_without_destination",
            )
    return tags


def ask_preserved(
    partitioners: Iterable[Partitioner], ep: ExportedProgram, visible: Callable[[int, Node], bool]
) -> tuple[list[Any], Callable[[Node], bool] | None]:
    """Return the `ops_to_not_decompose` of partitioners together; `visible` says whether one may take a node."""
    preserved = [partitioner.ops_to_not_decompose(ep) for partitioner in partitioners]
    operators = list(dict.fromkeys(operator for wanted, _ in preserved for operator in wanted))

    def kept(node: Node) -> bool:
        return any(
            node.target in wanted and visible(i, node) and (supported is None or supported(node))
            for i, (wanted, supported) in enumerate(preserved)
        )

    return operators, kept if operators else None


@contextmanager
def _hidden(nodes: Iterable[Node]) -> Iterator[None]:
    """Replace the operators of nodes by one that no backend supports while the context lasts."""
    targets = {node: node.target for node in nodes}
    for node in targets:
        node.target = _make_unsupported_operator()[1]
    try:
        yield
    finally:
        for node, target in targets.items():
            node.target = target


@cache
def _make_unsupported_operator() -> tuple[torch.library.Library, Any]:
    """Return an operator with a name and a schema, as partitioners expect, and the library that it disappears with."""
    library = torch.library.Library("exir_lowering", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("out_of_sight(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
    return library, torch.ops.exir_lowering.out_of_sight.default


# -- marks of XNNPACK -------------------------------------------------------------------------------------------------


def _clear_marks(nodes: Iterable[Node], claimed: Collection[Node]) -> None:
    """Clear the marks by which XNNPACK's checks make a (de)quantisation part of an operator that they then refuse."""
    from executorch.backends.xnnpack.utils.quant_utils import IS_IMPLICIT_Q_DQ_TAG

    # A node that is claimed by itself and still marked would be compiled to nothing. The nodes are in graph order.
    valid: set[Node] = set()
    for node in reversed(list(nodes)):
        if IS_IMPLICIT_Q_DQ_TAG not in node.meta:
            continue
        read_by = any(user in claimed and IS_IMPLICIT_Q_DQ_TAG not in user.meta for user in node.users)
        sources = [source for source in node.all_input_nodes if source in claimed and source.op == "call_function"]
        made_by = not all(graphs.operator_name(source).startswith("quantized_decomposed.") for source in sources)
        if read_by or any(user in valid for user in node.users) or (made_by and "dequantize" not in node.name):
            valid.add(node)
        else:
            del node.meta[IS_IMPLICIT_Q_DQ_TAG]
