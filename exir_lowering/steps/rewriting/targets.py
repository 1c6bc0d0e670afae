"""Which of the "safe" rewrites a partitioner's backend gains from: what it says, or what was measured for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from executorch.exir.backend.partitioner import Partitioner
from torch.export import ExportedProgram

from exir_lowering.errors import LoweringError, PartitionerContractError
from exir_lowering.graphs import DELEGATION_TAG
from exir_lowering.graphs.copies import private_copy
from exir_lowering.steps.tag import make_fake_state, tag

_SIMPLER = frozenset({"identity", "constants", "common-subexpressions"})
_MEASURED: Mapping[str, frozenset[str] | None] = {
    "executorch.backends.xnnpack.": None,
    "executorch.backends.openvino.": None,
    "executorch.backends.vulkan.": None,
    "executorch.backends.apple.coreml.": None,
    "executorch.backends.arm.": frozenset({"constants", "common-subexpressions"}),
}
"""By package of ExecuTorch's partitioners, what their backends gain from; None for all. docs/concepts/rewrite.md."""

Claim = tuple[str, frozenset[str]]
"""The name of a partitioner, and the rewrites that it does not gain from."""


def unwanted(partitioner: Partitioner, names: Collection[str]) -> frozenset[str]:
    """Return the rewrites of these names that a partitioner does not gain from.

    It says so by its attribute `rewrites`, a collection of names in which "safe" stands for all. One that does less
    than others (`partitioner`, `partitioners`) gains from what they gain from.

    Raises:
        PartitionerContractError: The attribute is something else.
    """
    said = getattr(partitioner, "rewrites", None)
    if said is not None:
        if isinstance(said, str) or not isinstance(said, Collection) or not all(isinstance(one, str) for one in said):
            raise PartitionerContractError(
                f"Partitioner {type(partitioner).__name__}: its attribute rewrites is {said!r}, expected the names of "
                'the rewrites that its backend gains from, such as {"identity", "constants"}, or {"safe"} for all.',
                violation="result_type",
                details={"partitioner": partitioner},
            )
        return frozenset() if "safe" in said else frozenset(names) - frozenset(said)
    inner = getattr(partitioner, "partitioners", None) or [getattr(partitioner, "partitioner", None)]
    if isinstance(inner, Iterable) and (found := [one for one in inner if isinstance(one, Partitioner)]):
        return frozenset().union(*(unwanted(one, names) for one in found))
    modules = [f"{base.__module__}." for base in type(partitioner).__mro__]
    gains = next((_MEASURED[key] for name in modules for key in _MEASURED if name.startswith(key)), _SIMPLER)
    return frozenset() if gains is None else frozenset(names) - gains


def find_claims(
    method: str, program: ExportedProgram, partitioners: Sequence[Partitioner], names: Collection[str]
) -> dict[str, Claim]:
    """Return, by node, the partitioner that would take it, and the rewrites of these names it does not gain from."""
    refused = [unwanted(partitioner, names) for partitioner in partitioners]
    claims: dict[str, Claim] = {}
    if any(refused):
        program = private_copy(program)
        state = make_fake_state(program)
        for partitioner, those in zip(partitioners, refused, strict=True):
            try:
                tagged = tag(method, program, partitioner, state)
            except LoweringError:  # said when the method itself is partitioned
                continue
            for node in tagged.program.graph.nodes:
                if node.meta.get(DELEGATION_TAG) is not None:
                    claims.setdefault(node.name, (type(partitioner).__name__, those))
    return {name: claim for name, claim in claims.items() if claim[1]}
