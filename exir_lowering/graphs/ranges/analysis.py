"""The analysis: what each value of a graph can be."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from exir_lowering.graphs.ranges import doubts, masks
from exir_lowering.graphs.ranges.intervals import BOUND, TOP, Doubt, Range, limits, whole
from exir_lowering.graphs.ranges.known_values import Constants, filling
from exir_lowering.graphs.ranges.nodes import MOVEMENTS, compute_for, dtype_of, name_of, product, shape_of
from exir_lowering.graphs.ranges.operators import operands, range_of
from exir_lowering.options import FINITE_BOUND

_STATE_BOUND = 2.0**40
"""The magnitude that is tried for what a program keeps in a buffer."""

_SMALL = 1 << 14
"""The number of elements up to which a value is computed where its range would do."""


class ValueRanges:
    """What is known about the values of a program without running it, as far as attention needs it to be exact.

    A range holds for every run: whatever the inputs are (NaN, infinities, numbers so large that sums of them overflow,
    tensors without elements), and whatever earlier runs have left in the program's buffers. What is not known is `TOP`.
    A range is never wrong: unknown operators have unknown results.

    Two things are assumed. Kernels compute with the usual errors of floating point: an element of a normalisation is at
    most the root of the number of its terms, times its weight, although a kernel which subtracts almost equal numbers
    of more than 1e15 may return noise that is larger. And indices are within their tensors.

    Results are kept for each node, so that asking for all nodes takes linear time. The graph may be edited while it is
    analysed as long as each node keeps computing the same values: a node that gets another meaning has to be a new
    node. Weights are read once, when a bound of theirs is first needed, and never copied.

    An instance must not be used by two threads at once.

    Args:
        program: The program, in Edge dialect.
        assume: Properties of inputs that the caller promises, by the inputs' names: "finite" (no element is NaN, and
            each is at most 1e6 in magnitude) or "finite_rows" (no row along the last dimension is entirely -inf,
            entirely False or, of integers, entirely 0).
        volatile: Names of buffers that another program may write to: nothing is known about them, whatever this program
            writes, unless `bound_together` finds it.
    """

    def __init__(
        self, program: ExportedProgram, assume: Mapping[str, str] = MappingProxyType({}), volatile: Collection[str] = ()
    ) -> None:
        self._program = program
        self._inputs = frozenset(name for name in program.graph_signature.user_inputs if isinstance(name, str))
        self._assumed = dict(assume)
        self._constants = Constants(program, volatile)
        self.volatile = frozenset(volatile)
        self._ranges: dict[Node, Range] = {}
        self._bounded: frozenset[str] | None = None  # the buffers that stay bounded, if that was asked already
        self._rows = masks.Rows(self)

    def of(self, node: Node) -> Range:
        """Return the range of a value; of several values nothing is known."""
        self._prove_state()
        return compute_for(node, self._ranges, operands, self._compute)

    def constant(self, node: Node) -> torch.Tensor | None:
        """Return the content of a value that does not depend on inputs, and None if it does or is not known.

        The tensors of parameters, constants and buffers that the program does not mutate are returned as they are: they
        must not be written to. What is computed from them alone is computed here if it has at most a million elements.
        """
        return self._constants.value(node)

    def uniform(self, node: Node) -> float | None:
        """Return the number that all elements of a value are, and None if they differ or nothing is known.

        True is 1.0. The number has the precision of the elements' type.
        """
        dtype = dtype_of(node)
        while name_of(node) in MOVEMENTS and node.all_input_nodes and dtype_of(node.all_input_nodes[0]) is dtype:
            node = node.all_input_nodes[0]
        number, shape = filling(node, dtype), shape_of(node)
        if number is None and shape is not None and product(shape) <= _SMALL:
            tensor = self._constants.value(node)
            if tensor is None or tensor.numel() == 0 or tensor.is_complex():
                return None
            first = tensor.detach().reshape(-1)[0]
            if not bool(((tensor == first) & (torch.signbit(tensor) == torch.signbit(first))).all()):
                return None  # NaN is not equal to itself, and -0.0 is not 0.0
            number = float(first)
        return number

    def bounded(self, node: Node) -> Doubt | None:
        """Return None if every element is NaN or at most 1e37 in magnitude, and otherwise what makes that doubtful."""
        return None if self.of(node).magnitude <= BOUND else doubts.unbounded(self, node)

    def rows_doubt(self, node: Node, dim: int) -> Doubt | None:
        """Return None if no row of a value can be entirely -inf, and otherwise what makes that doubtful.

        Rows without elements are no reason to doubt.

        Args:
            node: A node of the program's graph, of floating point.
            dim: The dimension along which the rows are.
        """
        return self._rows.doubt(node, dim)

    @property
    def bounded_state(self) -> frozenset[str]:
        """The names of the buffers that are mutated and stay NaN or at most 2**40 in magnitude.

        This is relied on in all ranges. It holds if no one else writes to the buffers, except to those that are
        volatile.
        """
        self._prove_state()
        return self._bounded or frozenset()

    def is_input(self, node: Node) -> bool:
        """Return whether a node is an input that the user passes."""
        return node.op == "placeholder" and node.name in self._inputs

    def assumed(self, node: Node) -> str | None:
        """Return what is assumed about an input, None if nothing is or it is not an input."""
        return self._assumed.get(node.name) if self.is_input(node) else None

    def state_name(self, node: Node) -> str | None:
        """Return the name of the mutated buffer that a node stands for, None if it is something else."""
        return self._constants.mutated(node)

    def _compute(self, node: Node) -> Range:
        dtype, shape = dtype_of(node), shape_of(node)
        if node.op == "call_function":
            found = range_of(node, self._ranges)
            if not found.finite and shape is not None and product(shape) <= _SMALL:
                value = self._constants.value(node)
                return found if value is None else self._constants.extremes(value)
            return found
        state, stored = self._constants.mutated(node), self._constants.stored(node)
        if state is not None:
            kept = state in self.bounded_state and dtype is not None and dtype.is_floating_point
            return Range(-_STATE_BOUND, _STATE_BOUND) if kept else whole(dtype)
        if stored is not None:
            return self._constants.extremes(stored)
        if self.assumed(node) == "finite" and dtype is not None and dtype.is_floating_point:
            most = min(FINITE_BOUND, limits(dtype)[0])
            return Range(-most, most)
        return whole(dtype) if node.op == "placeholder" else TOP

    # -- buffers -------------------------------------------------------------------------------------------------------

    def _prove_state(self) -> None:
        if self._bounded is None:
            self.rely_on(frozenset())
            _prove(self.own_state())

    def own_state(self) -> _Shared:
        """Return the buffers that no other program writes to, each alone."""
        return [[(self, state)] for state in self._written() if state not in self.volatile]

    def _written(self) -> dict[str, Node]:
        signature, output = self._program.graph_signature, self._program.graph.output_node()
        return {
            str(spec.target): value
            for spec, value in zip(signature.output_specs, output.args[0], strict=False)
            if spec.kind is OutputKind.BUFFER_MUTATION and isinstance(value, Node)
        }

    def initially_bounded(self) -> set[str]:
        """Return the names of the mutated buffers that are bounded at first."""
        found = set()
        for node in self._program.graph.find_nodes(op="placeholder"):
            state, first = self._constants.mutated(node), self._constants.stored(node)
            if state is None or first is None or not first.is_floating_point():
                continue
            if self._constants.extremes(first).magnitude <= _STATE_BOUND:
                found.add(state)
        return found

    def keeps_bounded(self, state: str) -> bool:
        """Return whether the program keeps a buffer bounded that is, or does not write to it."""
        value = self._written().get(state)
        return value is None or self.of(value).magnitude <= _STATE_BOUND

    def rely_on(self, bounded: frozenset[str]) -> None:
        """Begin again, with the buffers that stay bounded."""
        self._bounded, self._ranges = bounded, {}


_Shared = Sequence[Collection[tuple[ValueRanges, str]]]


def bound_together(shared: _Shared) -> None:
    """Find which of the buffers that programs share all of them keep bounded, and let the analyses rely on that.

    Args:
        shared: For each buffer, the analyses of all programs that have it, which were not asked anything yet, with its
            name, which is volatile in them.
    """
    analyses = {ranges: None for each in shared for ranges, _ in each}
    _prove([*shared, *(each for ranges in analyses for each in ranges.own_state())])


def _prove(states: _Shared) -> None:
    """Rely on it that buffers which are bounded at first stay so; on fewer, until every program keeps them so."""
    first = {ranges: ranges.initially_bounded() for each in states for ranges, _ in each}
    kept = [each for each in states if all(name in first[ranges] for ranges, name in each)]
    for attempt in range(6):
        kept = kept if attempt < 5 else []
        for ranges in first:
            ranges.rely_on(frozenset(name for each in kept for other, name in each if other is ranges))
        still = [each for each in kept if all(ranges.keeps_bounded(name) for ranges, name in each)]
        if len(still) == len(kept):
            return
        kept = still
