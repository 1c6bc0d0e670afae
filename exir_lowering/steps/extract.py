"""Step extract: move the claimed nodes of a method into partitions, in one sweep over each of its graphs.

The quotient graph (each partition one vertex) is ordered first; then one pass over the nodes builds the owner graph and
every partition's graph side by side. Nothing is scanned, sorted, compiled or verified once per partition.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from executorch.exir.backend.partitioner import DelegationSpec
from torch.export import ExportedProgram, ExportGraphSignature
from torch.export.graph_signature import InputSpec, OutputSpec
from torch.fx import Graph, GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream.delegates import LoweredBackendModule
from exir_lowering._upstream.programs import CALL_DELEGATE, assemble_program, guards_code_of, lazy_graph_module
from exir_lowering.errors import PartitionerContractError
from exir_lowering.graphs import NestedGraph, debug_handles, quotient
from exir_lowering.graphs.quotient import Piece, Unit
from exir_lowering.model import CallSite, ExtractedMethod, Partition, Rejection, TaggedMethod
from exir_lowering.steps.partition_builder import (
    Ownership,
    PartitionBuilder,
    copy_node,
    nested_ownership,
    top_ownership,
)

_PENDING = "pending_partition"
"""The key of LoweredBackendModule.meta under which a delegate that is not yet lowered names its partition."""


def extract(
    tagged: TaggedMethod, *, earlier: int = 0, non_convex: str = "split", shared: frozenset[str] = frozenset()
) -> ExtractedMethod:
    """Move the claimed nodes of a method into partitions, for which the owner then calls pending delegates.

    Ids are numbered from `earlier`; what is `shared` with other methods stays; a tag with a cycle is split, or refused.
    """
    return _MethodSweep(tagged, earlier, non_convex, shared).run()


@dataclass
class _MethodSweep:
    """The state of one extraction, which the sweeps of the method's graphs share."""

    tagged: TaggedMethod
    earlier: int
    non_convex: str
    shared: frozenset[str]
    partitions: list[Partition] = field(default_factory=list)
    nested_partitions: list[Partition] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    debug_handle: int = 0

    @cached_property
    def mutated(self) -> frozenset[str]:
        return graphs.written_state(self.program) | self.shared

    @property
    def program(self) -> ExportedProgram:
        return self.tagged.program

    def run(self) -> ExtractedMethod:
        self.debug_handle = debug_handles.find_highest(self.program.graph_module)
        lifted = graphs.lifted_inputs(self.program)
        sweep = _GraphSweep(self, self.program.graph_module, (), lifted)
        owner_module = sweep.run()
        program = self._owner(owner_module, sweep, lifted)
        partitions = (*self.partitions, *self.nested_partitions)
        return ExtractedMethod(self.tagged.name, program, partitions, tuple(self.rejections))

    def reject(self, node: Node, path: tuple[str, ...], reason: str) -> None:
        name = graphs.qualified_name(path, node)
        self.rejections.append(
            Rejection(self.tagged.name, name, graphs.operator_name(node), reason, "extract", "extract")
        )

    def new_partition_id(self, path: tuple[str, ...], piece: Piece, pieces: int) -> str:
        number = self.earlier + len(self.partitions) + len(self.nested_partitions)
        suffix = f".{piece[1]}" if pieces > 1 else ""
        return f"{'/'.join((self.tagged.name, *path))}/{number}:{piece[0]}{suffix}"

    def _owner(self, module: GraphModule, sweep: _GraphSweep, lifted: Mapping[Node, InputSpec]) -> ExportedProgram:
        """Build the owner program: its signature without the inputs and mutations that partitions took over."""
        moved = {node for node in lifted if node.users and not sweep.env[node].users}  # only partitions read them now
        taken = sweep.owned.taken
        placeholders = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        old, new = self.program.graph_signature, graphs.copy_signature(self.program)
        inputs = [spec for node, spec in zip(placeholders, new.input_specs, strict=True) if node not in moved]
        outputs: list[OutputSpec] = []
        values = self.program.graph.output_node().args[0]
        for value, before, spec in zip(values, old.output_specs, new.output_specs, strict=True):
            if id(before) not in taken:
                if isinstance(value, Node):
                    spec.arg.name = sweep.env[value].name
                outputs.append(spec)
        for node in moved:
            module.graph.erase_node(sweep.env[node])
        kept = {spec.target for spec in inputs}
        gone = {lifted[node].target for node in moved} - kept
        return assemble_program(
            graph_module=module,
            signature=ExportGraphSignature(input_specs=inputs, output_specs=outputs),
            state_dict={name: t for name, t in self.program.state_dict.items() if name not in gone},
            constants={name: t for name, t in self.program.constants.items() if name not in gone},
            range_constraints=dict(self.program.range_constraints),
            module_call_graph=list(self.program.module_call_graph),
            verifiers=self.program.verifiers,
            guards_code=guards_code_of(self.program),
        )


@dataclass
class _GraphSweep:
    """One graph of a method: its owner graph and the partitions that are taken from it."""

    method: _MethodSweep
    module: GraphModule
    path: tuple[str, ...]
    lifted: Mapping[Node, InputSpec]
    graph: Graph = field(default_factory=Graph)
    env: dict[Node, Node] = field(default_factory=dict)
    root: dict[str, Any] = field(default_factory=dict)
    owned: Ownership = field(default_factory=lambda: Ownership({}, {}))
    calls: Counter[str] = field(default_factory=Counter)
    lowered_modules: int = 0

    def run(self) -> GraphModule:
        nodes = list(self.module.graph.nodes)
        self.calls = Counter(str(n.target) for n in nodes if n.op == "get_attr" for _ in n.users)
        computing = [node for node in nodes if node.op == "call_function"]
        tag_of = self._claims(computing)
        units, cycle = quotient.order(computing, tag_of)
        if self.method.non_convex == "raise" and cycle is not None:
            raise self._not_convex(cycle)
        units = self._inner_order(nodes, units)
        piece_of = {node: unit.piece for unit in units if unit.piece is not None for node in unit.nodes}
        if self.path:
            self.owned = nested_ownership(piece_of, self.lifted)
        else:
            self.owned = top_ownership(self.method.program, piece_of, self.lifted, self.method.shared)
        pieces = Counter(unit.piece[0] for unit in units if unit.piece is not None)
        for node in nodes:
            if node.op == "placeholder":
                self._keep(node)
        for unit in units:
            if unit.piece is None:
                self._keep(unit.nodes[0])
            else:
                self._take(unit, unit.piece, pieces[unit.piece[0]])
        self._keep_output(nodes[-1])
        owner = lazy_graph_module(self.root, self.graph)
        owner.meta.update(self.module.meta)
        return owner

    # -- which nodes are taken -----------------------------------------------------------------------------------

    def _claims(self, computing: Sequence[Node]) -> dict[Node, str]:
        """Return the tag of each node that moves: getitem follows its producer, and a tag must produce a result."""
        tag_of: dict[Node, str] = {}
        for node in computing:
            if graphs.is_getitem(node):
                producer = node.args[0]
                if isinstance(producer, Node) and producer in tag_of:
                    tag_of[node] = tag_of[producer]
                continue
            tag = node.meta.get(graphs.DELEGATION_TAG)
            if tag is None:
                continue
            obstacle = self._obstacle(node)
            if obstacle:
                self.method.reject(node, self.path, obstacle)
            else:
                tag_of[node] = tag
        useful = {tag for node, tag in tag_of.items() if any(tag_of.get(user) != tag for user in node.users)}
        for node in [node for node, tag in tag_of.items() if tag not in useful]:
            self.method.reject(node, self.path, f"nothing reads a result of tag {tag_of.pop(node)!r}")
        return tag_of

    def _obstacle(self, node: Node) -> str:
        """Return why a claimed node cannot move, "" if it can."""
        if isinstance(node.meta.get("val"), (list, tuple)) and not all(graphs.is_getitem(user) for user in node.users):
            return "its list of results is used as a whole, but a delegate returns single tensors"
        if graphs.is_delegate_call(node) and _is_pending(graphs.attribute(self.module, str(node.args[0]))):
            return "it was claimed by an earlier partitioner"
        for nested in graphs.nested_graphs(self.module, node):
            if any(_is_pending(getattr(module, name)) for _, module, name in graphs.delegates(nested.module)):
                return f"an earlier partitioner claimed nodes in its graph {nested.name}"
        return ""

    def _inner_order(self, nodes: Sequence[Node], units: Sequence[Unit]) -> list[Unit]:
        """Order the nodes of each unit as ExecuTorch does: graph order in the first partition, then its sort."""
        found = {unit.piece[0] for unit in units if unit.piece is not None}
        first = next((tag for tag in self.method.tagged.destinations if tag in found), None)
        place = quotient.breadth_first(nodes) if len(found) > 1 else {}
        return [
            unit
            if unit.piece is None or unit.piece[0] == first
            else Unit(unit.piece, tuple(sorted(unit.nodes, key=place.__getitem__)))
            for unit in units
        ]

    def _not_convex(self, cycle: quotient.Cycle) -> PartitionerContractError:
        return PartitionerContractError(
            f"Method {self.method.tagged.name}: the nodes tagged {cycle.tag!r} are not convex: the path {cycle} leaves "
            "the tag and comes back, so the partition would need its own result as an input. Tag the nodes on the path "
            'too, use two tags, or set LoweringOptions(non_convex="split").',
            violation="not_convex",
            details={"tag": cycle.tag, "path": cycle.path},
        )

    # -- what stays ----------------------------------------------------------------------------------------------

    def _keep(self, node: Node) -> None:
        """Copy a node to the owner graph, with the graphs that it calls."""
        nested = list(graphs.nested_graphs(self.module, node))
        if nested:
            self._keep_call(node, nested)
        else:
            self.env[node] = copy_node(self.graph, node, self._owner_value)

    def _owner_value(self, node: Node) -> Node:
        if node.op == "get_attr" and node not in self.env:
            target = str(node.target)
            if target not in self.root:
                self.root[target] = graphs.attribute(self.module, target)
            self.env[node] = copy_node(self.graph, node, self._owner_value)
        return self.env[node]

    def _keep_call(self, node: Node, nested: Sequence[NestedGraph]) -> None:
        """Copy a higher-order call after extracting from the graphs that it calls."""
        sweeps = []
        for graph in nested:
            if graph.name in self.root:  # a graph that two calls share was swept at the first one
                continue
            bound = self._bound(graph) if self.calls[graph.name] == 1 else {}
            sweep = _GraphSweep(self.method, graph.module, (*self.path, graph.name), bound)
            self.root[graph.name] = sweep.run()
            sweeps.append((graph, sweep))
        copied = copy_node(self.graph, node, self._owner_value)
        self.env[node] = copied
        layout = graphs.OPERAND_LAYOUTS.get(node.target)
        if layout is not None and all(self.calls[graph.name] == 1 for graph in nested):
            self._drop_operands(copied, layout.unchanged, sweeps)

    def _bound(self, graph: NestedGraph) -> dict[Node, InputSpec]:
        """Return the placeholders of a nested graph that stand for constants of the program."""
        bound = {inner: self.lifted[outer] for inner, outer in graph.receivers(self.lifted).items()}
        return {inner: spec for inner, spec in bound.items() if str(spec.target) not in self.method.mutated}

    def _drop_operands(self, call: Node, position: int, sweeps: Sequence[tuple[NestedGraph, _GraphSweep]]) -> None:
        """Remove constants from a call's operands that now only partitions inside its graphs read."""
        before: Any = call.args[position]
        operands = list(before)
        columns = [
            [n for n in graph.module.graph.nodes if n.op == "placeholder"][-len(operands) :] if operands else []
            for graph, _ in sweeps
        ]
        for i in reversed(range(len(operands))):
            inner = [(column[i], sweep) for column, (_, sweep) in zip(columns, sweeps, strict=True)]
            constant = all(node in sweep.lifted for node, sweep in inner)
            if constant and not any(sweep.env[node].users for node, sweep in inner):
                del operands[i]
                for node, sweep in inner:
                    sweep.graph.erase_node(sweep.env[node])
        call.update_arg(position, type(before)(operands))

    def _keep_output(self, node: Node) -> None:
        """Copy the output node, without the mutations that partitions took over."""
        taken = self.owned.taken
        if not taken:
            self._keep(node)
            return
        specs = self.method.program.graph_signature.output_specs
        values = [v for v, spec in zip(node.args[0], specs, strict=True) if id(spec) not in taken]  # type: ignore[arg-type]
        kept = self.graph.output(tuple(self._owner_value(v) if isinstance(v, Node) else v for v in values))
        kept.meta = dict(node.meta)
        self.env[node] = kept

    # -- what moves ----------------------------------------------------------------------------------------------

    def _take(self, unit: Unit, piece: Piece, pieces: int) -> None:
        """Build a unit's partition and call it from the owner graph."""
        mutations = self.owned.mutations.get(piece, ())
        results = self._results(unit, mutations)
        if not results:
            for node in unit.nodes:
                self.method.reject(node, self.path, f"nothing reads a result of tag {piece[0]!r}")
                self._keep(node)
            return
        owned = self.owned.inputs.get(piece, {})
        builder = PartitionBuilder(self.method.program, self.module, self.path, self.lifted, unit, owned)
        program = builder.build(mutations, results)
        target = self._new_target()
        site = CallSite(self.method.tagged.name, self.path, target)
        spec = self.method.tagged.destinations[piece[0]]
        partition = Partition(
            id=self.method.new_partition_id(self.path, piece, pieces),
            method=self.method.tagged.name,
            tag=piece[0],
            backend_id=spec.backend_id,
            compile_specs=tuple(spec.compile_specs),
            program=program,
            site=site,
            nodes=tuple(graphs.qualified_name(self.path, node) for node in unit.nodes if graphs.is_operator(node)),
        )
        (self.method.nested_partitions if self.path else self.method.partitions).append(partition)
        self._call(partition, spec, builder.user_inputs, results)

    def _results(self, unit: Unit, mutations: Sequence[tuple[Node, OutputSpec]]) -> list[Node]:
        """Return the nodes of a unit that are read outside of it, in graph order."""
        inside = set(unit.nodes)
        written = dict(mutations)
        results = []
        for node in unit.nodes:
            readers = [user for user in node.users if user not in inside]
            if node in written:
                returned = any(spec is not written[node] for spec in self.outputs_of.get(node, ()))
                readers = [user for user in readers if user.op != "output" or returned]
            if readers:
                results.append(node)
        return results

    @cached_property
    def outputs_of(self) -> dict[Node, list[OutputSpec]]:
        """For each value that the program returns or writes, its output specs."""
        found: dict[Node, list[OutputSpec]] = {}
        values: Any = self.module.graph.output_node().args[0]
        for value, spec in zip(values, self.method.program.graph_signature.output_specs, strict=True):
            if isinstance(value, Node):
                found.setdefault(value, []).append(spec)
        return found

    def _new_target(self) -> str:
        while hasattr(self.module, f"lowered_module_{self.lowered_modules}"):
            self.lowered_modules += 1
        self.lowered_modules += 1
        return f"lowered_module_{self.lowered_modules - 1}"

    def _call(
        self, partition: Partition, spec: DelegationSpec, inputs: Sequence[Node], results: Sequence[Node]
    ) -> None:
        """Add the delegate call and a getitem for each result to the owner graph."""
        lowered = LoweredBackendModule(partition.program, spec.backend_id, b"", list(partition.compile_specs), None)
        lowered.meta = {_PENDING: partition.id}
        target = partition.site.target
        self.root[target] = lowered
        arguments = tuple(self._owner_value(node) for node in inputs)
        attr = self.graph.create_node("get_attr", target, name=target)
        call = self.graph.call_function(CALL_DELEGATE, (attr, *arguments))
        self.method.debug_handle += 1
        call.meta[debug_handles.KEY] = self.method.debug_handle
        call.meta["val"] = [node.meta["val"] for node in results]
        for i, node in enumerate(results):
            item = self.graph.call_function(operator.getitem, (call, i))
            item.meta = {k: v for k, v in node.meta.items() if k not in _PARTITION_META}
            self.env[node] = item


_PARTITION_META = frozenset({graphs.DELEGATION_TAG, "nn_module_stack", "source_fn_stack"})
"""Metadata about the location of a node, which does not apply to a getitem on a delegate's result."""


def _is_pending(module: Any) -> bool:
    return isinstance(module, LoweredBackendModule) and _PENDING in (module.meta or {})
