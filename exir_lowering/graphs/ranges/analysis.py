"""The analysis: what each value of a graph can be."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from exir_lowering.errors import InputError
from exir_lowering.graphs.ranges import doubts, elementwise, masks, movements, reductions
from exir_lowering.graphs.ranges.intervals import BOUND, TOP, Doubt, Range, limits, symmetric, whole
from exir_lowering.graphs.ranges.known_values import Constants, filling, is_small, rounded
from exir_lowering.graphs.ranges.transfers import Call, Found, Result, dtype_of, result_of
from exir_lowering.graphs.walking import is_getitem
from exir_lowering.options import ASSUMPTIONS, FINITE_BOUND

_TABLES = (elementwise, movements, reductions)  # importing them registers their transfer functions

_STATE_BOUND = 2.0**40
"""The magnitude that is tried for what a program keeps in a buffer."""

_KEEPS_NUMBER = (
    "view_copy", "unsqueeze_copy", "squeeze_copy", "permute_copy", "expand_copy", "slice_copy", "select_copy", "clone",
    "_clone_dim_order", "_to_dim_order_copy", "_to_copy", "alias_copy", "transpose_copy", "t_copy", "detach_copy",
)  # fmt: skip


class ValueRanges:
    """What is known about the values of a program without running it.

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
        program: The program, in Edge dialect or of ATen's functional operators.
        assume: Properties of inputs that the caller promises, by the inputs' names: "finite" (no element is NaN, and
            each is at most 1e6 in magnitude) or "finite_rows" (no row along the last dimension is entirely -inf,
            entirely False or, of integers, entirely 0).
        volatile: Names of buffers that another program may write to: nothing is known about them, whatever this program
            writes, unless `bound_together` finds it.

    Raises:
        InputError: The program has no such input, or there is no such property.
    """

    def __init__(
        self,
        program: ExportedProgram,
        assume: Mapping[str, str] = MappingProxyType({}),
        volatile: Collection[str] = (),
    ) -> None:
        self._program = program
        self._assumed = _check_assumed(program, assume)
        self._constants = Constants(program, volatile)
        self._ranges: Found[Result] = Found()
        self._inputs = {name for name in program.graph_signature.user_inputs if isinstance(name, str)}
        self._volatile = frozenset(volatile)
        self._bounded: frozenset[str] = frozenset()
        self._kept: frozenset[str] | None = None
        self._rows = masks.Rows(self)

    def of(self, node: Node) -> Range:
        """Return the range of a value; of several values, the range of all of them.

        Args:
            node: A node of the program's graph; of other nodes nothing is known.
        """
        return _as_one(self._ranges.of(node, self._compute))

    def constant(self, node: Node) -> torch.Tensor | None:
        """Return the content of a value that does not depend on inputs, and None if it does or is not known.

        The tensors of parameters, constants and buffers that the program does not mutate are returned as they are: they
        must not be written to. What is computed from them alone is computed here if it has at most a million elements.

        Args:
            node: A node of the program's graph.
        """
        return self._constants.value(node)

    def uniform(self, node: Node) -> float | None:
        """Return the number that all elements of a value are, and None if they differ or nothing is known.

        True is 1.0. The number has the precision of the elements' type.

        Args:
            node: A node of the program's graph.
        """
        casts: list[torch.dtype | None] = []
        number: float | None = None
        while True:
            casts.append(dtype_of(node))
            if (number := filling(node)) is not None:
                break
            source = node.args[0] if node.op == "call_function" and node.args and _copies(node.target) else None
            if isinstance(source, Node):
                node = source
                continue
            tensor = self._constants.value(node) if is_small(node) else None
            if tensor is None or tensor.numel() == 0 or tensor.is_complex():
                return None
            first = tensor.detach().reshape(-1)[0]
            if not bool(((tensor == first) & (torch.signbit(tensor) == torch.signbit(first))).all()):
                return None  # NaN is not equal to itself, and -0.0 is not 0.0
            number = float(first)
            break
        for dtype in reversed(casts):
            number = rounded(number, dtype) if number is not None else None
        return number

    def bounded(self, node: Node) -> Doubt | None:
        """Return None if every element is NaN or at most 1e37 in magnitude, and otherwise what makes that doubtful.

        Args:
            node: A node of the program's graph.
        """
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
        if self._kept is None:
            self._kept = self._prove_state()
        return self._kept

    def is_input(self, node: Node) -> bool:
        """Return whether a node is an input that the user passes."""
        return node.op == "placeholder" and node.name in self._inputs

    def assumed(self, node: Node) -> str | None:
        """Return what is assumed about an input, None if nothing is or it is not an input."""
        return self._assumed.get(node.name) if self.is_input(node) else None

    def state_name(self, node: Node) -> str | None:
        """Return the name of the mutated buffer that a node stands for, None if it is something else."""
        return self._constants.mutated(node)

    def is_volatile(self, state: str) -> bool:
        """Return whether another program may write to a buffer.

        Args:
            state: The buffer's name.
        """
        return state in self._volatile

    def _compute(self, node: Node) -> Result:
        """Compute the range of a node from those of operands that it depends on: not of what is normalised."""
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op != "call_function":
            return TOP
        if is_getitem(node):
            source, index = node.args[0], node.args[1]
            several = self._ranges[source] if isinstance(source, Node) else None
            if isinstance(several, tuple) and isinstance(index, int) and 0 <= index < len(several):
                return several[index]
            return whole(dtype_of(node))
        found = result_of(Call(node, lambda each: _as_one(self._ranges[each])))
        if isinstance(found, Range) and not found.finite:
            return self._look(node) or found
        return whole(dtype_of(node)) if found is None else found

    def _look(self, node: Node) -> Range | None:
        """Return the range of what the node computes, if that is known and not found already."""
        inputs = node.all_input_nodes
        if not inputs or not is_small(node) or any(self._ranges.get(each) == TOP for each in inputs):
            return None
        value = self._constants.value(node)
        return self._constants.extremes(value) if value is not None else None

    def _placeholder(self, node: Node) -> Range:
        dtype = dtype_of(node)
        state = self._constants.mutated(node)
        if state is not None:
            kept = state in self.bounded_state and dtype is not None and dtype.is_floating_point
            return symmetric(_STATE_BOUND, True) if kept else whole(dtype)
        stored = self._constants.stored(node)
        if stored is not None:
            return self._constants.extremes(stored)
        if self.assumed(node) == "finite" and dtype is not None and dtype.is_floating_point:
            return symmetric(min(FINITE_BOUND, limits(dtype)[0]), False)
        return whole(dtype)

    def _prove_state(self) -> frozenset[str]:
        """Find the buffers that are bounded at first, and after each run that finds them so."""
        written, shared = self._written(), self._bounded
        kept = shared.union(state for state in self.initially_bounded() if state in written) - (self._volatile - shared)
        before = self._ranges
        for attempt in range(3):
            kept = kept if attempt < 2 else shared
            self._kept, self._ranges = kept, Found()
            still = shared | {each for each in kept - shared if self.of(written[each]).magnitude <= _STATE_BOUND}
            if still == kept:
                break
            kept = still
        for node, found in self._ranges.items():
            before.setdefault(node, found)  # what was found before does not depend on buffers
        self._ranges = before
        return kept

    def _written(self) -> dict[str, Node]:
        signature, output = self._program.graph_signature, self._program.graph.output_node()
        return {
            str(spec.target): value
            for spec, value in zip(signature.output_specs, output.args[0], strict=False)
            if spec.kind is OutputKind.BUFFER_MUTATION and isinstance(value, Node)
        }

    def initially_bounded(self) -> Iterator[str]:
        """Yield the names of the mutated buffers that are bounded at first."""
        for node in self._program.graph.find_nodes(op="placeholder"):
            state, first = self._constants.mutated(node), self._constants.stored(node)
            if state is None or first is None or not first.is_floating_point():
                continue
            if self._constants.extremes(first).magnitude <= _STATE_BOUND:
                yield state

    def keeps_bounded(self, state: str) -> bool:
        """Return whether the program keeps a buffer bounded that is, or does not write to it.

        Args:
            state: The buffer's name.
        """
        value = self._written().get(state)
        return value is None or self.of(value).magnitude <= _STATE_BOUND

    def rely_on(self, states: frozenset[str]) -> None:
        """Begin again, with what is known about volatile buffers.

        Args:
            states: The names of those that stay bounded, whoever writes them.
        """
        self._bounded, self._kept, self._ranges = states, None, Found()


def bound_together(shared: Sequence[Collection[tuple[ValueRanges, str]]]) -> None:
    """Find which of the buffers that programs share all of them keep bounded, and let the analyses rely on that.

    Args:
        shared: For each buffer, the analyses of all programs that have it, which were not asked anything yet, with its
            name, which is volatile in them.
    """
    first = {ranges: frozenset(ranges.initially_bounded()) for each in shared for ranges, _ in each}
    kept = [each for each in shared if all(name in first[ranges] for ranges, name in each)]
    for attempt in range(4):
        kept = kept if attempt < 3 else []
        for ranges in first:
            ranges.rely_on(frozenset(name for each in kept for other, name in each if other is ranges))
        still = [each for each in kept if all(ranges.keeps_bounded(name) for ranges, name in each)]
        if len(still) == len(kept):
            return
        kept = still


def _check_assumed(program: ExportedProgram, assume: Mapping[str, str]) -> dict[str, str]:
    """Return the assumptions by input; InputError if there is no such input or no such property."""
    inputs = [str(name) for name in program.graph_signature.user_inputs if isinstance(name, str)]
    for name, promised in assume.items():
        if name not in inputs:
            raise InputError(
                f"assume names {name!r}, which is not an input of the program. "
                f"Its inputs are: {', '.join(inputs) or 'none'}."
            )
        if promised not in ASSUMPTIONS:
            possible = "; ".join(f"{key!r}: {text}" for key, text in ASSUMPTIONS.items())
            raise InputError(f"assume says {promised!r} of the input {name!r}. What can be assumed is {possible}.")
    return dict(assume)


def _as_one(found: Result) -> Range:
    return found if isinstance(found, Range) else TOP


def _copies(target: object) -> bool:
    name = str(getattr(target, "_op", target))
    return name.startswith(("aten.", "dim_order_ops.")) and name.split(".")[1] in _KEEPS_NUMBER and ".dtype" not in name
