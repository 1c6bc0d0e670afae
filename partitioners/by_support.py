"""A partitioner for backends that can say, node by node, what they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import CompileSpec, ExplainedResult, InputError, Partitioner, graphs
from exir_lowering.partitioners.algorithms.claims import Claims, explain
from exir_lowering.partitioners.algorithms.convex import propose_partitions
from exir_lowering.partitioners.algorithms.limits import Limits
from exir_lowering.partitioners.supports.support import (
    Check,
    Scope,
    Support,
    SupportLike,
    as_support,
    make_check,
)


class SupportPartitioner(Partitioner):  # type: ignore[misc]
    """Gives each backend the fewest convex partitions of what it supports, and says why the rest stays on the host.

    Args:
        supports: For each backend id, what it supports: a `Support`, a torch.fx `OperatorSupportBase`, or a function
            from a node to a bool. The first backend that takes a node gets it.
        compile_specs: The compile specs of each backend id.
        limits: How small and how large a partition may be.
        keep_apart: Whether parts of a partition that share no edge become partitions of their own.
        own_state: Whether a buffer that one partition alone reads and writes moves into it; for backends that keep
            state from one call to the next.
        keep_whole: ATen operators, such as `torch.ops.aten.linear.default`, that are not decomposed on the way to Edge
            dialect where a backend supports them.

    Raises:
        InputError: An argument is invalid.
    """

    def __init__(
        self,
        supports: Mapping[str, SupportLike],
        *,
        compile_specs: Mapping[str, Sequence[CompileSpec]] | None = None,
        limits: Limits | None = None,
        keep_apart: bool = False,
        own_state: bool = False,
        keep_whole: Sequence[Any] = (),
    ) -> None:
        super().__init__()
        self.supports = supports_of(type(self).__name__, supports)
        self.compile_specs = compile_specs_of(type(self).__name__, self.supports, compile_specs)
        self.limits = limits or Limits()
        self.keep_apart = keep_apart
        self.own_state = own_state
        self.keep_whole = list(keep_whole)

    def partition(self, exported_program: ExportedProgram) -> ExplainedResult:
        """Tag what the backends support.

        Args:
            exported_program: A program in Edge dialect; its nodes get tags.

        Returns:
            The tagged program with a rejection for each operator that is left.

        Raises:
            PartitionerContractError: A support raised.
            InputError: A group of nodes that must stay together cannot be convex.
        """
        claims = Claims(exported_program, self.compile_specs, type(self).__name__)
        for scope in claims.scopes():
            groups = [group for support in self.supports.values() for group in support.groups(scope)]
            proposals = propose_partitions(scope, self.supports, keep_apart=self.keep_apart)
            claims.settle(scope, proposals, self.limits, groups=groups, why=explain(self.supports, scope))
        return claims.result(state=self.own_state)

    def describe_requests(self) -> Sequence[Any] | None:
        """Return what `ops_to_not_decompose` depends on, for the cache: what supports answer is not known."""
        return None if self.keep_whole else ()

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], Callable[[Node], bool] | None]:
        """Keep the operators of `keep_whole` where a backend supports them."""
        if not self.keep_whole:
            return [], None
        constants = {node.name for node in graphs.lifted_inputs(ep)}
        checks: dict[Any, list[Check]] = {}

        def supported(node: Node) -> bool:
            if node.target not in self.keep_whole:  # at the end it is the Edge operator, which may stay whole
                return False
            if node.graph not in checks:  # the given program, or ExecuTorch's copy of it
                held = frozenset(n for n in node.graph.nodes if n.op == "placeholder" and n.name in constants)
                scope = Scope(node.graph.owning_module or GraphModule({}, node.graph), held)
                checks[node.graph] = [make_check(support, scope) for support in self.supports.values()]
            return any(check(node) is None for check in checks[node.graph])

        return list(self.keep_whole), supported


def supports_of(who: str, supports: Any) -> dict[str, Support]:
    """Check a mapping from backend ids to supports; InputError if it is not one."""
    if not isinstance(supports, Mapping) or not supports or not all(isinstance(key, str) and key for key in supports):
        raise InputError(
            f"{who}: got supports={supports!r}, expected a mapping from backend ids to what each backend supports, "
            "such as {'MyBackend': ops('aten.add.Tensor')}."
        )
    return {backend_id: as_support(support) for backend_id, support in supports.items()}


def compile_specs_of(
    who: str, backends: Mapping[str, Any], given: Mapping[str, Sequence[CompileSpec]] | None
) -> dict[str, list[CompileSpec]]:
    """Check a mapping from backend ids to compile specs.

    Raises InputError if it is not one, or names a backend that the partitioner does not know.
    """
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise InputError(f"{who}: got compile_specs={given!r}, expected a mapping from backend ids to lists.")
    for backend_id, specs in given.items():
        if backend_id not in backends:
            raise InputError(
                f"{who}: compile_specs names {backend_id!r}, which is not one of its backends: {', '.join(backends)}."
            )
        if not isinstance(specs, (list, tuple)) or not all(isinstance(spec, CompileSpec) for spec in specs):
            raise InputError(f"{who}: compile_specs[{backend_id!r}] is {specs!r}, expected a list of CompileSpec.")
    return {backend_id: list(specs) for backend_id, specs in given.items()}


__all__ = ["SupportPartitioner", "compile_specs_of", "supports_of"]
