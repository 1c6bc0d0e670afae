"""What can go where: which backends take an operator, and what stays together, before costs decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import Adjustment, CompileSpec, DelegationSpec, Partitioner, Rejection, graphs
from exir_lowering.partitioners.algorithms import nested_run
from exir_lowering.partitioners.algorithms.claims import explain
from exir_lowering.partitioners.algorithms.convex import list_computing
from exir_lowering.partitioners.supports.support import No, Scope, Support, make_check


@dataclass(frozen=True, slots=True)
class Offer:
    """What can go where in one graph."""

    # For each operator, the places that take it, each with the label of its partitions.
    labels: Mapping[Node, Mapping[str, str]]
    groups: Sequence[Sequence[Node]]  # nodes that stay together
    pinned: frozenset[Node]  # operators that cannot be on the host
    why: Callable[[Node], No | None]  # why no place takes an operator, None if that is unknown


@dataclass(frozen=True, slots=True)
class Offers:
    """What can go where in a program."""

    places: tuple[str, ...]  # the backends, in priority order
    specs: Mapping[str, DelegationSpec]  # the destination of the partitions with each label
    of: Callable[[Scope], Offer]  # the offer for a graph
    merge: bool = True  # whether partitions with the same label may be merged, and groups must be convex
    # Parameters, buffers and constants that partitions may own; None: all that are not written.
    constants: frozenset[Node] | None = None
    rejections: Sequence[Rejection] = ()  # so far
    adjustments: Sequence[Adjustment] = ()  # so far


def offers_of_supports(supports: Mapping[str, Support], compile_specs: Mapping[str, Sequence[CompileSpec]]) -> Offers:
    """Derive the offers from supports, in their order."""

    def of(scope: Scope) -> Offer:
        checks = {place: make_check(support, scope) for place, support in supports.items()}
        labels = {
            node: {place: place for place, check in checks.items() if check(node) is None}
            for node in list_computing(scope.graph_module)
            if graphs.is_operator(node)
        }
        groups = [group for support in supports.values() for group in support.groups(scope)]
        return Offer(labels, groups, frozenset(), explain(supports, scope))

    specs = {place: DelegationSpec(place, list(compile_specs.get(place, ()))) for place in supports}
    return Offers(tuple(supports), specs, of)


def offers_of_partitioner(program: ExportedProgram, partitioner: Partitioner) -> Offers:
    """Let a partitioner tag the program, and derive the offers from the tags."""
    match = getattr(partitioner, "get_matched_nodes_from_configs", None)
    merge = match is not None and not getattr(partitioner, "per_op_mode", False)
    run = nested_run.run(partitioner, program)
    matches = [list(group) for group in match(program)] if match is not None and merge else []
    whole = _find_kept_whole(program, partitioner)
    specs = run.destinations
    label_of = _labels(specs) if merge else {tag: tag for tag in specs}

    def of(scope: Scope) -> Offer:
        nodes = {node: run.tags.get(node) for node in list_computing(scope.graph_module)}
        labels = {n: {specs[tag].backend_id: label_of[tag]} if tag else {} for n, tag in nodes.items()}
        groups = [group for group in matches if any(node in nodes for node in group)] if merge else _by_tag(nodes)
        pinned = frozenset(node for node, labelled in labels.items() if labelled and whole(node))
        return Offer(labels, groups, pinned, lambda node: None)

    return Offers(
        places=tuple(dict.fromkeys(spec.backend_id for spec in specs.values())),
        specs={label_of[tag]: spec for tag, spec in specs.items()},
        of=of,
        merge=merge,
        constants=frozenset(node for node in run.tags if node.op == "placeholder"),
        rejections=run.rejections,
        adjustments=run.adjustments,
    )


def _find_kept_whole(program: ExportedProgram, partitioner: Partitioner) -> Callable[[Node], bool]:
    operators, wanted = partitioner.ops_to_not_decompose(program)
    names = {graphs.target_name(operator) for operator in operators}
    return lambda node: graphs.operator_name(node) in names and (wanted is None or bool(wanted(node)))


def _labels(specs: Mapping[str, DelegationSpec]) -> dict[str, str]:
    """Give tags that go to the same backend with the same compile specs the same label."""
    known: list[tuple[DelegationSpec, str]] = []
    labels: dict[str, str] = {}
    for tag, spec in specs.items():
        label = next((label for other, label in known if _same(spec, other)), None)
        if label is None:
            label = f"{spec.backend_id}_{len(known)}"
            known.append((spec, label))
        labels[tag] = label
    return labels


def _same(one: DelegationSpec, other: DelegationSpec) -> bool:
    return one.backend_id == other.backend_id and list(one.compile_specs) == list(other.compile_specs)


def _by_tag(tag_of: Mapping[Node, str | None]) -> list[list[Node]]:
    groups: dict[str, list[Node]] = {}
    for node, tag in tag_of.items():
        if tag is not None:
            groups.setdefault(tag, []).append(node)
    return list(groups.values())


__all__ = ["Offer", "Offers", "offers_of_partitioner", "offers_of_supports"]
