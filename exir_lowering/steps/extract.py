"""Step extract: move the claimed nodes of a method into partitions, in one sweep over each of its graphs."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from exir_lowering.steps.partition_builder import build_partition, copy_node, find_owners

_PENDING = "pending_partition"
"""The key of LoweredBackendModule.meta under which a delegate that is not yet lowered names its partition."""

_PARTITION_META = frozenset({graphs.DELEGATION_TAG, "nn_module_stack", "source_fn_stack"})
"""Metadata about the location of a node, which does not apply to a getitem on a delegate's result."""


def extract(
    tagged: TaggedMethod, *, earlier: int = 0, non_convex: str = "split", shared: frozenset[str] = frozenset()
) -> ExtractedMethod:
    """Move the claimed nodes of a method into partitions, numbered from `earlier`; what is `shared` stays."""
    program = tagged.program
    lifted = graphs.lifted_inputs(program)
    mutated = graphs.written_state(program) | shared
    handle = debug_handles.find_highest(program.graph_module)
    method = _Method(tagged, earlier, non_convex, shared, mutated, handle)
    sweep = _GraphSweep(method, program.graph_module, (), lifted)
    owner = _make_owner(program, sweep.run(), sweep)
    return ExtractedMethod(tagged.name, owner, (*method.partitions, *method.nested), tuple(method.rejections))


@dataclass
class _Method:
    """What the sweeps of a method's graphs share."""

    tagged: TaggedMethod
    earlier: int
    non_convex: str
    shared: frozenset[str]
    mutated: frozenset[str]  # what is shared, and what is written
    debug_handle: int  # the highest one so far
    partitions: list[Partition] = field(default_factory=list)
    nested: list[Partition] = field(default_factory=list)  # those of nested graphs
    rejections: list[Rejection] = field(default_factory=list)


def _make_owner(program: ExportedProgram, module: GraphModule, sweep: _GraphSweep) -> ExportedProgram:
    """Make the owner's program: its signature has neither inputs nor mutations that partitions took over."""
    moved = {node for node in sweep.lifted if node.users and not sweep.env[node].users}  # only partitions read them now
    signature = graphs.copy_signature(program)
    placeholders = program.graph.find_nodes(op="placeholder")
    inputs = [spec for node, spec in zip(placeholders, signature.input_specs, strict=True) if node not in moved]
    outputs: list[OutputSpec] = []
    values = program.graph.output_node().args[0]
    for value, before, spec in zip(values, program.graph_signature.output_specs, signature.output_specs, strict=True):
        if id(before) not in sweep.taken:
            if isinstance(value, Node):
                spec.arg.name = sweep.env[value].name
            outputs.append(spec)
    for node in moved:
        module.graph.erase_node(sweep.env[node])
    gone = {sweep.lifted[node].target for node in moved} - {spec.target for spec in inputs}
    return assemble_program(
        graph_module=module,
        signature=ExportGraphSignature(input_specs=inputs, output_specs=outputs),
        state_dict={name: tensor for name, tensor in program.state_dict.items() if name not in gone},
        constants={name: tensor for name, tensor in program.constants.items() if name not in gone},
        range_constraints=dict(program.range_constraints),
        module_call_graph=list(program.module_call_graph),
        verifiers=program.verifiers,
        guards_code=guards_code_of(program),
    )


@dataclass
class _GraphSweep:
    """One graph of a method: its owner graph and the partitions that are taken from it."""

    method: _Method
    module: GraphModule
    path: tuple[str, ...]
    lifted: Mapping[Node, InputSpec]
    graph: Graph = field(default_factory=Graph)
    env: dict[Node, Node] = field(default_factory=dict)
    root: dict[str, Any] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)  # the output specs of mutations that partitions took over, by id
    calls: Counter[str] = field(default_factory=Counter)  # how many nodes read each attribute
    returned: Counter[Any] = field(default_factory=Counter)  # how often the program returns or writes each value
    lowered_modules: int = 0

    def run(self) -> GraphModule:
        nodes = list(self.module.graph.nodes)
        self.calls = Counter(str(n.target) for n in nodes if n.op == "get_attr" for _ in n.users)
        computing = [node for node in nodes if node.op == "call_function"]
        units, cycle = quotient.order(computing, self._claims(computing))
        if self.method.non_convex == "raise" and cycle is not None:
            raise PartitionerContractError(
                f"Method {self.method.tagged.name}: the nodes tagged {cycle.tag!r} are not convex: the path {cycle} "
                "leaves the tag and comes back, so the partition would need its own result as an input. Tag the nodes "
                'on the path too, use two tags, or set LoweringOptions(non_convex="split").',
                violation="not_convex",
                details={"tag": cycle.tag, "path": cycle.path},
            )
        pieces = Counter(unit.piece[0] for unit in units if unit.piece is not None)
        # The nodes of each unit are ordered as ExecuTorch does: graph order in the first partition, then its sort.
        first = next((tag for tag in self.method.tagged.destinations if tag in pieces), None)
        place = quotient.breadth_first(nodes) if len(pieces) > 1 else {}
        units = [
            unit
            if unit.piece is None or unit.piece[0] == first
            else Unit(unit.piece, tuple(sorted(unit.nodes, key=place.__getitem__)))
            for unit in units
        ]
        piece_of = {node: unit.piece for unit in units if unit.piece is not None for node in unit.nodes}
        program, shared = self.method.tagged.program, self.method.shared
        owned, mutations = find_owners(program, piece_of, self.lifted, shared, nested=bool(self.path))
        self.taken = {id(spec) for written in mutations.values() for spec in written.values()}
        self.returned = Counter(nodes[-1].args[0] if mutations else ())
        for node in nodes:
            if node.op == "placeholder":
                self._keep(node)
        for unit in units:
            if unit.piece is None:
                self._keep(unit.nodes[0])
            else:
                inputs = [(node, self.lifted[node], name) for node, name in owned.get(unit.piece, {}).items()]
                self._take(unit, unit.piece, pieces[unit.piece[0]], inputs, mutations.get(unit.piece, {}))
        self._keep_output(nodes[-1])
        owner = lazy_graph_module(self.root, self.graph)
        owner.meta.update(self.module.meta)
        return owner

    def _reject(self, node: Node, reason: str) -> None:
        about = self.method.tagged.name, graphs.qualified_name(self.path, node), graphs.operator_name(node)
        self.method.rejections.append(Rejection(*about, reason, "extract", "extract"))

    # -- which nodes are taken -----------------------------------------------------------------------------------

    def _claims(self, computing: Sequence[Node]) -> dict[Node, str]:
        """Return the tag of each node that moves: getitem follows its producer, and a tag must produce a result."""
        tag_of: dict[Node, str] = {}
        for node in computing:
            if graphs.is_getitem(node):
                producer = node.args[0]
                if isinstance(producer, Node) and producer in tag_of:
                    tag_of[node] = tag_of[producer]
            elif (tag := node.meta.get(graphs.DELEGATION_TAG)) is not None:
                if obstacle := self._obstacle(node):
                    self._reject(node, obstacle)
                else:
                    tag_of[node] = tag
        useful = {tag for node, tag in tag_of.items() if any(tag_of.get(user) != tag for user in node.users)}
        for node in [node for node, tag in tag_of.items() if tag not in useful]:
            self._reject(node, f"nothing reads a result of tag {tag_of.pop(node)!r}")
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

    # -- what stays ----------------------------------------------------------------------------------------------

    def _keep(self, node: Node) -> None:
        """Copy a node to the owner graph, after extracting from the graphs that it calls."""
        nested = list(graphs.nested_graphs(self.module, node))
        sweeps = []
        for graph in nested:
            if graph.name not in self.root:  # a graph that two calls share was swept at the first one
                received = graph.receivers(self.lifted) if self.calls[graph.name] == 1 else {}
                bound = {inner: self.lifted[outer] for inner, outer in received.items()}
                bound = {inner: spec for inner, spec in bound.items() if spec.target not in self.method.mutated}
                sweep = _GraphSweep(self.method, graph.module, (*self.path, graph.name), bound)
                self.root[graph.name] = sweep.run()
                sweeps.append((graph, sweep))
        self.env[node] = copy_node(self.graph, node, self._owner_value)
        layout = graphs.OPERAND_LAYOUTS.get(node.target) if nested else None
        if layout is not None and all(self.calls[graph.name] == 1 for graph in nested):
            _drop_operands(self.env[node], layout.unchanged, sweeps)

    def _owner_value(self, node: Node) -> Node:
        if node.op == "get_attr" and node not in self.env:
            target = str(node.target)
            if target not in self.root:
                self.root[target] = graphs.attribute(self.module, target)
            self.env[node] = copy_node(self.graph, node, self._owner_value)
        return self.env[node]

    def _keep_output(self, node: Node) -> None:
        """Copy the output node, without the mutations that partitions took over."""
        if not self.taken:
            self._keep(node)
            return
        specs = self.method.tagged.program.graph_signature.output_specs
        values = [v for v, spec in zip(node.args[0], specs, strict=True) if id(spec) not in self.taken]  # type: ignore[arg-type]
        kept = self.graph.output(tuple(self._owner_value(v) if isinstance(v, Node) else v for v in values))
        kept.meta = dict(node.meta)
        self.env[node] = kept

    # -- what moves ----------------------------------------------------------------------------------------------

    def _take(
        self,
        unit: Unit,
        piece: Piece,
        pieces: int,  # of its tag
        owned: Sequence[tuple[Node, InputSpec, str]],
        mutations: Mapping[Node, OutputSpec],
    ) -> None:
        """Build a unit's partition, and call it from the owner graph, with a getitem for each result."""
        results = self._results(unit, mutations)
        if not results:
            for node in unit.nodes:
                self._reject(node, f"nothing reads a result of tag {piece[0]!r}")
                self._keep(node)
            return
        method, spec = self.method, self.method.tagged.destinations[piece[0]]
        program, passed = build_partition(
            method.tagged.program, self.module, self.path, unit.nodes, owned, mutations, results
        )
        while hasattr(self.module, target := f"lowered_module_{self.lowered_modules}"):
            self.lowered_modules += 1
        self.lowered_modules += 1
        number = method.earlier + len(method.partitions) + len(method.nested)
        suffix = f".{piece[1]}" if pieces > 1 else ""
        partition = Partition(
            id=f"{'/'.join((method.tagged.name, *self.path))}/{number}:{piece[0]}{suffix}",
            method=method.tagged.name,
            tag=piece[0],
            backend_id=spec.backend_id,
            compile_specs=tuple(spec.compile_specs),
            program=program,
            site=CallSite(method.tagged.name, self.path, target),
            nodes=tuple(graphs.qualified_name(self.path, node) for node in unit.nodes if graphs.is_operator(node)),
        )
        (method.nested if self.path else method.partitions).append(partition)
        lowered = LoweredBackendModule(program, spec.backend_id, b"", list(partition.compile_specs), None)
        lowered.meta = {_PENDING: partition.id}
        self.root[target] = lowered
        arguments = tuple(self._owner_value(node) for node in passed)
        attr = self.graph.create_node("get_attr", target, name=target)
        call = self.graph.call_function(CALL_DELEGATE, (attr, *arguments))
        method.debug_handle += 1
        call.meta[debug_handles.KEY] = method.debug_handle
        call.meta["val"] = [node.meta["val"] for node in results]
        for i, node in enumerate(results):
            item = self.env[node] = self.graph.call_function(operator.getitem, (call, i))
            item.meta = {k: v for k, v in node.meta.items() if k not in _PARTITION_META}

    def _results(self, unit: Unit, mutations: Mapping[Node, OutputSpec]) -> list[Node]:
        """Return the nodes of a unit that are read outside of it, in graph order."""
        inside = set(unit.nodes)
        results = []
        for node in unit.nodes:
            readers = [user for user in node.users if user not in inside]
            if node in mutations and self.returned[node] == 1:  # the output reads what the unit writes itself
                readers = [user for user in readers if user.op != "output"]
            if readers:
                results.append(node)
        return results


def _drop_operands(call: Node, position: int, sweeps: Sequence[tuple[NestedGraph, _GraphSweep]]) -> None:
    """Remove constants from a call's operands that now only partitions inside its graphs read."""
    before: Any = call.args[position]
    operands = list(before)
    columns = [graph.module.graph.find_nodes(op="placeholder")[-len(operands) :] for graph, _ in sweeps]
    for i in reversed(range(len(operands))):
        inner = [(column[i], sweep) for column, (_, sweep) in zip(columns, sweeps, strict=True)]
        if all(node in sweep.lifted and not sweep.env[node].users for node, sweep in inner):
            del operands[i]
            for node, sweep in inner:
                sweep.graph.erase_node(sweep.env[node])
    call.update_arg(position, type(before)(operands))


def _is_pending(module: Any) -> bool:
    return isinstance(module, LoweredBackendModule) and _PENDING in (module.meta or {})
