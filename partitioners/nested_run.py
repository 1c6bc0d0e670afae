"""Run a partitioner inside of another one: on the same program, with some operators out of its sight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from executorch.exir.backend.partitioner import DelegationSpec
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import Adjustment, Partitioner, PartitionerContractError, Rejection, graphs, refusals


@dataclass(frozen=True)
class Run:
    """What a partitioner did to a program, taken off it again.

    Attributes:
        tags: The tag of each node that it claimed, constants included.
        destinations: For each tag where it goes.
        rejections: For each operator that it left, and that it could see, why.
        adjustments: What it says of partitions that it dropped or cut.
    """

    tags: Mapping[Node, str]
    destinations: Mapping[str, DelegationSpec]
    rejections: tuple[Rejection, ...]
    adjustments: tuple[Adjustment, ...]


def run(partitioner: Partitioner, program: ExportedProgram, out_of_sight: Iterable[Node] = ()) -> Run:
    """Run a partitioner and take its tags off the program.

    Args:
        partitioner: The partitioner.
        program: The program, without tags; it has none afterwards.
        out_of_sight: Operators that it must not take: it sees an operator there that nobody supports.

    Raises:
        PartitionerContractError: It returned something else than a PartitionResult for this program.
    """
    unseen = list(out_of_sight)
    with refusals.heard() as heard, _hidden(unseen):
        result = partitioner(program)
    destinations = getattr(result, "partition_tags", None)
    if not isinstance(destinations, Mapping) or getattr(result, "tagged_exported_program", None) is not program:
        raise PartitionerContractError(
            f"Partitioner {type(partitioner).__name__} returned {result!r}, expected a PartitionResult with the "
            "program that it was given and a mapping from tags.",
            violation="result_type",
        )
    given = {rejection.node: rejection for rejection in getattr(result, "rejections", None) or ()}
    rejections = refusals.rejections("", program, partitioner, given, heard)
    out = set(unseen)
    walked = graphs.staying_nodes(program.graph_module)
    hidden = {graphs.qualified_name(path, node) for path, node in walked if node in out} if out else set()
    tags = {}
    for _, module in graphs.walk(program.graph_module):
        for node in module.graph.nodes:
            if graphs.DELEGATION_TAG in node.meta:
                tags[node] = node.meta.pop(graphs.DELEGATION_TAG)
    return Run(
        tags,
        dict(destinations),
        tuple(rejection for rejection in rejections if rejection.node not in hidden),
        tuple(getattr(result, "adjustments", None) or ()),
    )


def preserved(
    partitioners: Iterable[Partitioner], ep: ExportedProgram, visible: Callable[[int, Node], bool]
) -> tuple[list[Any], Callable[[Node], bool] | None]:
    """Ask partitioners what not to decompose.

    Args:
        partitioners: The partitioners.
        ep: The program.
        visible: Whether the partitioner of that number may take a node.

    Returns:
        As ExecuTorch's `Partitioner.ops_to_not_decompose`, for all of them together.
    """
    asked = [partitioner.ops_to_not_decompose(ep) for partitioner in partitioners]
    operators = list(dict.fromkeys(operator for wanted, _ in asked for operator in wanted))

    def kept(node: Node) -> bool:
        return any(
            node.target in wanted and visible(i, node) and (supported is None or supported(node))
            for i, (wanted, supported) in enumerate(asked)
        )

    return operators, kept if operators else None


@contextmanager
def _hidden(nodes: Iterable[Node]) -> Iterator[None]:
    """Put an operator that nobody supports in the place of nodes while the context lasts."""
    targets = {node: node.target for node in nodes}
    for node in targets:
        node.target = _nobodys()
    try:
        yield
    finally:
        for node, target in targets.items():
            node.target = target


@cache
def _nobodys() -> Any:
    """Return an operator of our own, with a name and a schema as partitioners expect of operators."""
    library = torch.library.Library("exir_lowering", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("out_of_sight(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
    _KEPT.append(library)  # the operator goes with the library
    return torch.ops.exir_lowering.out_of_sight.default


_KEPT: list[torch.library.Library] = []

__all__ = ["Run", "preserved", "run"]
