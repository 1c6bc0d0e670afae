"""Which of the "safe" rewrites a partitioner's backend gains from: what it says, or what was measured for it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from executorch.exir.backend.partitioner import Partitioner
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering.errors import LoweringError, PartitionerContractError
from exir_lowering.graphs import DELEGATION_TAG
from exir_lowering.graphs.copies import private_copy
from exir_lowering.plugins.asking import make_fake_state
from exir_lowering.steps.tag import tag

_SIMPLER = frozenset({"identity", "constants", "common-subexpressions"})
_MEASURED: Mapping[str, frozenset[str] | None] = {
    "executorch.backends.xnnpack.": None,
    "executorch.backends.openvino.": None,
    "executorch.backends.vulkan.": None,
    "executorch.backends.arm.": frozenset({"constants", "common-subexpressions"}),
}
"""By package of ExecuTorch's partitioners, what their backends gain from; None for all. docs/concepts/rewrite.md."""
_BUT: Mapping[str, frozenset[str]] = {"executorch.backends.openvino.": frozenset({"pieces"})}
"""Of those that gain from all, what they do not gain from."""


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
    package = next((key for name in modules for key in _MEASURED if name.startswith(key)), "")
    gains = _MEASURED.get(package, _SIMPLER)
    return frozenset(names) & _BUT.get(package, frozenset()) if gains is None else frozenset(names) - gains


class Targets:
    """What the partitioners of a method gain from, and which nodes they would take."""

    def __init__(
        self, method: str, program: ExportedProgram, partitioners: Sequence[Partitioner], names: Collection[str]
    ) -> None:
        """Ask about the rewrites of these names; the program is the one before any of them."""
        self._method, self._program, self._partitioners = method, program, partitioners
        self._unwanted = [unwanted(partitioner, names) for partitioner in partitioners]

    def want(self, name: str) -> bool:
        """Return whether all partitioners gain from a rewrite."""
        return not any(name in those for those in self._unwanted)

    def refusing(self, name: str, nodes: Iterable[Node]) -> str | None:
        """Return the partitioner that would take one of these nodes, and does not gain from a rewrite."""
        claims = [self._claims[one.name] for one in nodes if one.name in self._claims]
        return next((type(self._partitioners[at]).__name__ for at in claims if name in self._unwanted[at]), None)

    @cached_property
    def _claims(self) -> dict[str, int]:
        """The first partitioner that takes a node, by its name."""
        claims: dict[str, int] = {}
        program = private_copy(self._program)
        state = make_fake_state(program)
        for number, partitioner in enumerate(self._partitioners):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # what it warns of, and raises, is said when it is asked in earnest
                    tagged = tag(self._method, program, partitioner, state)
            except LoweringError:
                continue
            for node in tagged.program.graph.nodes:
                if node.meta.get(DELEGATION_TAG) is not None:
                    claims.setdefault(node.name, number)
        return claims
