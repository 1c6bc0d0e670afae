"""Whether padding behind the end of inputs changes what a program computes for the rest.

A dimension whose size has a symbol has more elements in a run of a larger size than the inputs had: those behind are
padded. For each value it holds, by induction, that its *kept* elements, whose indices are all below the given sizes,
are what they would be without padding; or the value is *mixed*, and whatever depends on it is. What the padded elements
are is known as a range for each padded dimension: of the elements that are behind its end, and kept in all others.
`ValueRanges` holds for all elements, as a padded run is a run of the program too. Unknown operators mix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from exir_lowering._upstream.fakes import expression, grows, smallest
from exir_lowering._upstream.likeness import SYMBOLS
from exir_lowering.errors import let_through
from exir_lowering.graphs.copies import written_state
from exir_lowering.graphs.operators.names import target_name
from exir_lowering.graphs.ranges.analysis import ValueRanges
from exir_lowering.graphs.ranges.intervals import INF, TOP, Range, meet, union, whole
from exir_lowering.graphs.ranges.masks import Rows
from exir_lowering.graphs.ranges.padding_rules import ZERO, MixedError, rule_of
from exir_lowering.graphs.ranges.transfers import Call, Result, dim_of, name_of, rank_of, result_of
from exir_lowering.graphs.walking import is_getitem

_RETURNED = (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION)
_SQUARED = 1e12
"""Sums of squares of numbers up to this do not overflow."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """Why padding may change what is kept."""

    node: Node  # the one that mixes positions
    reason: str
    advice: str = ""


Kept: TypeAlias = "tuple[Mapping[int, Any], ...]"
"""For each output of the file's method its padded dimensions, with the expressions of their sizes."""


def follow(program: ExportedProgram, symbols: Collection[Any], assume: Mapping[str, str]) -> Kept | Mixing:
    """Prove that padding the dimensions whose sizes have some symbols is safe, or say why it may not be.

    An InputError says that there is no such input or promise in `assume`, of which `ValueRanges` has more.
    """
    functional = program.run_decompositions({})
    unknown = {
        node.target
        for node in functional.graph.nodes
        if name_of(node) and isinstance(node.meta.get("val"), torch.Tensor) and rule_of(node.target) is None
    }
    if unknown:
        table = default_decompositions()
        chosen = {target: table[target] for target in unknown if target in table}
        functional = program.run_decompositions(chosen) if chosen else functional
    return Positions(functional, frozenset(symbols), assume).outputs()


class Positions:
    """What is known about the padded positions of the values of a graph."""

    def __init__(self, program: ExportedProgram, symbols: frozenset[Any], assume: Mapping[str, str]) -> None:
        self._program, self._symbols = program, symbols
        users = set(program.graph_signature.user_inputs)
        self._users = [n for n in program.graph.find_nodes(op="placeholder") if n.name in users]
        # A row that is entirely padded breaks a promise about rows.
        broken = {node.name for node in self._users if any(dim + 1 < node.meta["val"].dim() for dim in self.dims(node))}
        kept = {name: what for name, what in assume.items() if what != "finite_rows" or name not in broken}
        self.ranges = ValueRanges(program, kept, volatile=written_state(program))
        self._whole: dict[Node, Result] = {}
        self._pads: dict[Node, list[dict[int, Range]]] = {}  # for each result of the node
        self.counts: dict[Node, dict[int, Any]] = {}
        """Dimensions along which each element is its own index; they are values of integers."""
        self.rows = Rows(self.ranges, self.counts)
        self._mixed: dict[Node, Mixing] = {}

    def outputs(self) -> Kept | Mixing:
        """Go through the graph, and say what is kept of its outputs."""
        for node in self._program.graph.nodes:
            found = self._visit(node) if node.op != "output" else None
            if found is not None:
                self._mixed[node] = found
                if not node.users and node.meta.get("val") is None:
                    return found  # a check, which would be of other values
        outputs: list[Mapping[int, Any]] = []
        results: Any = self._program.graph.output_node().args[0]
        for spec, value in zip(self._program.graph_signature.output_specs, results, strict=True):
            if not isinstance(value, Node):
                outputs.append({})
                continue
            if value in self._mixed:
                return self._mixed[value]
            if self.sized(value):
                return Mixing(value, "the program returns the padded size itself")
            if spec.kind in _RETURNED:
                outputs.append(self.dims(value))
        return tuple(outputs)

    # -- what rules ask ------------------------------------------------------------------------------------------------

    def dims(self, node: Any) -> dict[int, Any]:
        """Return the padded dimensions of a value, with the expressions of their sizes."""
        return self.padded(node.meta.get("val") if isinstance(node, Node) else None)

    def padded(self, value: Any) -> dict[int, Any]:
        """Return the padded dimensions of a fake tensor."""
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        found = {dim: expression(size) for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)}
        return {dim: each for dim, each in found.items() if each.free_symbols & self._symbols}

    def sized(self, argument: Any) -> bool:
        """Return whether an argument is a number that depends on the padded sizes."""
        value = argument.meta.get("val") if isinstance(argument, Node) else argument
        symbols: set[Any] = expression(value).free_symbols if isinstance(value, SYMBOLS) else set()
        return bool(symbols & self._symbols)

    def least(self, size: Any) -> int:
        """Return the smallest number that a padded size can be; no dimension is given without elements."""
        return smallest(size, self._program.range_constraints)

    def _is_size(self, node: Node) -> bool:
        """Return whether a value is a number that depends on nothing but the padded sizes."""
        value: Any = node.meta.get("val")
        return isinstance(value, SYMBOLS) and bool(expression(value).free_symbols <= self._symbols)

    def whole(self, node: Any) -> Range:
        """Return the range of all elements of a value."""
        found = self._whole.get(node, TOP)
        return found if isinstance(found, Range) else union(found)

    def pad(self, node: Any, dim: int) -> Range:
        """Return the range of the padded elements of a value in a dimension; of all of them if it is not padded."""
        found = self._pads.get(node) or [{}]
        return found[0].get(dim % max(1, rank_of(node)), self.whole(node))

    def aligned(self, node: Any, back: int) -> Range:
        """Return the range of what meets, in an operand, the padding of the result's dimension `back`, such as -1."""
        dim = rank_of(node) + back
        return self.pad(node, dim) if dim in self.dims(node) else self.whole(node)

    def padding(self, node: Any) -> list[Range]:
        """Return ranges that all padded elements of a value are in, those that are padded in several dimensions too."""
        dims = self.dims(node)
        found = [self.pad(node, dim) for dim in dims]
        if len(dims) > 1:
            found.append(ZERO if node in self._users else self.whole(node))
        return found

    def transfer(self, node: Node, lookup: Callable[[Node], Range]) -> Range:
        """Return the range of a call's results (of the first one, if there are several) for ranges of its operands."""
        found = self._transfer(node, lookup)
        return found if isinstance(found, Range) else found[0]

    # -- the walk ------------------------------------------------------------------------------------------------------

    def _visit(self, node: Node) -> Mixing | None:
        self._whole[node] = self._find_whole(node)
        if node.op == "placeholder":
            self._pads[node] = [dict.fromkeys(self.dims(node), ZERO)] if node in self._users else [{}]
            return None
        inputs = node.all_input_nodes
        value = node.meta.get("val")
        results = value if isinstance(value, (tuple, list)) else [value]
        metadata = target_name(node.target) == "aten._assert_tensor_metadata.default"
        if metadata or (value is None and all(map(self._is_size, inputs))):
            return None  # a check that holds for each size of the program
        blamed = next((self._mixed[each] for each in inputs if each in self._mixed), None)
        if blamed or node.op != "call_function":
            return blamed
        if isinstance(value, SYMBOLS):
            read = any(map(self.dims, inputs)) and not target_name(node.target).startswith("aten.sym_")
            return Mixing(node, "it makes a number of what is padded") if read else None
        if is_getitem(node):
            source, index = node.args
            self._pads[node] = [self._pads[source][index]] if source in self._pads else [{}]  # type: ignore[index]
            return None
        if not any(map(self.dims, inputs)) and not any(map(self.sized, inputs)) and not any(map(self.padded, results)):
            return None
        found = self._apply(node, results)
        if found is None and any(not grows(size) for each in results for size in self.padded(each).values()):
            return Mixing(node, f"{target_name(node.target)}: its size may shrink when inputs grow")
        return found

    def _apply(self, node: Node, results: Any) -> Mixing | None:
        """Apply the rule of an operator that has to do with padded values."""
        name, rule = target_name(node.target), rule_of(node.target)
        try:
            if rule is None:
                raise MixedError("it may mix positions: nothing is known about what it does with padded ones")
            apply, takes_sizes = rule
            if not takes_sizes and any(map(self.sized, node.all_input_nodes)):
                raise MixedError("it computes with the padded size itself")
            found = apply(self, node)
        except MixedError as mixed:
            return Mixing(node, f"{name}: {mixed.reason}", f"{mixed.advice} " if mixed.advice else "")
        except Exception as error:
            let_through(error)
            return Mixing(node, f"{name}: its arguments are not understood ({type(error).__name__}: {error})")
        several = found if isinstance(found, list) else [found]
        known = self._whole[node]
        ranges = known if isinstance(known, tuple) else (known,) * len(several)
        self._pads[node] = [
            {dim: meet(one.get(dim, all_), all_) for dim in self.padded(result)}
            for one, result, all_ in zip(several, results, ranges, strict=True)
        ]
        return None

    def _find_whole(self, node: Node) -> Result:
        """Return the ranges of all elements: those of `ValueRanges`, and what follows from the ranges before.

        `ValueRanges` does not look at what is normalised, so that it does not exclude NaN there.
        """
        if node.op != "call_function":
            return self.ranges.of(node)
        if is_getitem(node):
            source = self._whole.get(node.args[0], TOP)  # type: ignore[arg-type]
            known = self.ranges.of(node)
            return meet(source[node.args[1]], known) if isinstance(source, tuple) else known  # type: ignore[index]
        found = self._transfer(node, self.whole, related=True)
        return found if isinstance(found, tuple) else meet(found, self.ranges.of(node))

    def _transfer(self, node: Node, lookup: Callable[[Node], Range], related: bool = False) -> Result:
        call = Call(node, lookup, related=related)
        found = result_of(call)
        if isinstance(found, Range) and found.nan and found.finite and self._is_number(call):
            return Range(found.low, found.high, False)
        return whole(call.dtype) if found is None else found

    def _is_number(self, call: Call) -> bool:
        """Return whether a normalisation or a softmax, of which `ValueRanges` says less, gives no NaN."""
        name, given = target_name(call.node.target), call.range(call.get(0))
        if given.nan or given.high == INF:
            return False
        if name == "aten.layer_norm.default":
            affine = [call.range(each) for each in (call.get(2), call.get(3)) if each is not None]
            return given.magnitude < _SQUARED and all(each.finite and not each.nan for each in affine)
        if name in ("aten._softmax.default", "aten.softmax.int"):
            return self.rows.floor(call.node.args[0], dim_of(call.node, call.node)) > -INF  # type: ignore[arg-type]
        return name == "aten._safe_softmax.default"
