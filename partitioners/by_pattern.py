"""Delegate what looks like a plain Python function.

def swish(x):
    return x * torch.sigmoid(x)

PatternPartitioner("my_backend", Pattern(swish, (torch.randn(2, 3),)))
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import CompileSpec, ExplainedResult, graphs
from exir_lowering.partitioners.algorithms.convex import Proposal, list_computing, propose_partitions
from exir_lowering.partitioners.algorithms.limits import Limits
from exir_lowering.partitioners.by_support import SupportPartitioner
from exir_lowering.partitioners.supports.patterns import Pattern, PatternSupport
from exir_lowering.partitioners.supports.support import GraphScope, scopes


class PatternPartitioner(SupportPartitioner):
    """Gives a backend each match of a pattern as a separate partition, and says why the rest stays on the host.

    A pattern that matches nothing in a program causes a warning.

    Args:
        backend_id: The backend.
        patterns: The patterns.
        compile_specs: The compile specs of each partition, or a mapping from the backend to them.
        limits: How small and how large a partition may be.
        keep_apart: With `merge`, whether parts of a partition that share no edge become separate partitions.
        merge: Whether matches share partitions, so that there are as few as possible.
        own_state: Whether a buffer that one partition alone reads and writes moves into it; for backends that keep
            state from one call to the next.
        keep_whole: ATen operators, such as `torch.ops.aten.linear.default`, that are not decomposed on the way to Edge
            dialect where a pattern matches them before; the pattern calls them, without example inputs.

    Raises:
        InputError: There is no pattern, or an argument is invalid.
    """

    def __init__(
        self,
        backend_id: str,
        *patterns: Pattern,
        compile_specs: Sequence[CompileSpec] | Mapping[str, Sequence[CompileSpec]] = (),
        limits: Limits | None = None,
        keep_apart: bool = False,
        merge: bool = False,
        own_state: bool = False,
        keep_whole: Sequence[Any] = (),
    ) -> None:
        self.support = PatternSupport(*patterns)
        specs = compile_specs if isinstance(compile_specs, Mapping) else {backend_id: compile_specs}
        super().__init__(
            {backend_id: self.support},
            compile_specs=specs,
            limits=limits,
            keep_apart=keep_apart,
            own_state=own_state,
            keep_whole=keep_whole,
        )
        self.backend_id, self.merge = backend_id, merge

    def partition(self, exported_program: ExportedProgram) -> ExplainedResult:
        """Tag the matches of a program, including its nested graphs.

        Args:
            exported_program: A program in Edge dialect; its nodes get tags.

        Returns:
            The tagged program with a rejection for each operator that is left.

        Raises:
            PartitionerContractError: The check of a pattern raised.
        """
        self._warn(list(scopes(exported_program)))
        return super().partition(exported_program)

    def _propose(self, scope: GraphScope, groups: Sequence[Sequence[Node]]) -> Sequence[Proposal]:
        """Return the matches in a graph, or with `merge` the fewest convex partitions of them."""
        if self.merge:
            return propose_partitions(scope, self.supports, keep_apart=self.keep_apart)
        return [Proposal(self.backend_id, tuple(group)) for group in groups]

    def _warn(self, seen: Sequence[GraphScope]) -> None:
        """Warn about patterns that match nothing in the whole program."""
        matched = frozenset().union(*(self.support.matched(scope) for scope in seen))
        if len(matched) == len(self.support.patterns):
            return
        occurring: set[str] = set()
        made_of: dict[str, dict[str, None]] = {}
        for node in (node for scope in seen for node in list_computing(scope.graph_module)):
            occurring.add(graphs.operator_name(node))
            for origin in graphs.origins(node):
                made_of.setdefault(origin, {})[graphs.operator_name(node)] = None
        for number, pattern in enumerate(self.support.patterns):
            if number not in matched:
                near = next((found[number] for scope in seen if number in (found := self.support.nearest(scope))), None)
                warnings.warn(_nothing(pattern, occurring, made_of, near), UserWarning, stacklevel=3)


def _nothing(
    pattern: Pattern, occurring: set[str], made_of: Mapping[str, Iterable[str]], near: tuple[str, str] | None
) -> str:
    names = list(dict.fromkeys(" or ".join(names) for names in pattern.operators))
    text = [f"Pattern {pattern.name} ({', '.join(names)}) matches nothing in the program."]
    absent = dict.fromkeys(n for names in pattern.operators if occurring.isdisjoint(names) for n in names)
    for name in absent:
        made = list(made_of.get(name, ()))
        if len(made) > 1:
            text.append(
                f"After decomposition, {name} is {' + '.join(made)}: give the pattern example_inputs, or the "
                f"partitioner keep_whole=[torch.ops.{name}]."
            )
            continue
        close = _close_names(name, occurring)
        hint = f"; {' and '.join(close)} {'do' if len(close) > 1 else 'does'}" if close else ""
        text.append(f"{name} does not occur in it{hint}.")
    if near is not None:
        text.append(f"It nearly matched at {near[0]}, but {near[1]}.")
    elif not absent:
        text.append("Its operators occur, but not connected as in the pattern, or with other arguments.")
    return " ".join(text)


def _close_names(name: str, occurring: set[str]) -> list[str]:
    """Return names that are close when compared without namespaces and overloads, which most names share."""
    bare: dict[str, list[str]] = {}
    for other in sorted(occurring):
        bare.setdefault(other.split(".")[1] if other.count(".") > 1 else other, []).append(other)
    close = difflib.get_close_matches(name.split(".")[1] if name.count(".") > 1 else name, list(bare), n=2)
    return [other for key in close for other in bare[key]]
