"""State is written back when a method ends: all of it was read before any of it is written.

A program's signature is a parallel assignment: a buffer takes a value that was computed from the state as it was. In
the file, values share memory: what a buffer takes may be another buffer's old state, or a view of it, and a method may
return old state. So the writes are put in an order in which none destroys what a later one needs; where there is none,
as when two buffers are exchanged, a copy is made first. ExecuTorch's own write-back finds nothing left to do.

Rows of a buffer, such as a cache, are written in place where it is proven that nothing reads the old state later.
ExecuTorch's `reinplace_pass` does not see views of the buffer that are read later, which share its memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream import edge
from exir_lowering._upstream.fakes import dim_order
from exir_lowering._upstream.operators import is_view, written_arguments
from exir_lowering._upstream.programs import fake_mode_of
from exir_lowering.errors import InputError
from exir_lowering.graphs import measures
from exir_lowering.graphs.inlining import inline_sharing, insert_call
from exir_lowering.graphs.walking import writes

_FUNCTIONALIZED = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)
_STATISTICS = frozenset({"aten.batch_norm.default", "aten.instance_norm.default", "aten.native_batch_norm.default"})
_COPIED = {edge.CLONE: 0, edge.CLONE_IN_ORDER: 0, edge.COPY: 1}  # which argument an operator copies
_WRITES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)


def write_back(program: ExportedProgram, *, in_place: bool) -> None:
    """Let a private copy write its state and inputs with operators, rows `in_place` where nothing reads them later."""
    _drop_copies(program)
    if in_place:
        _write_rows(program)
    _keep_overwritten(program)
    ending = _Ending(program)
    writes = {place: target for place, target in ending.targets.items() if not ending.is_written(place)}
    ending.keep_returned(writes.values())
    for place in _in_order(ending, writes):
        ending.write(place)
    ending.finish()


def separate(program: ExportedProgram, *, distinct: bool = False) -> None:
    """Give each value that a copy writes, and old state that it returns, memory of its own, as `module()` does not."""
    mode = fake_mode_of(program.graph_module)
    if mode is not None and writes(program.graph_module):
        inline_sharing(program.graph_module, mode)
        for _, module in graphs.walk(program.graph_module):
            _fit_copied(module, distinct)
    ending = _Ending(program)
    ending.keep_returned(ending.targets.values())
    for place in ending.targets:
        if not ending.is_written(place) and ending.shared(place):
            ending.copy(place)
    ending.finish()


def check_written(method: str, program: ExportedProgram) -> None:
    """Check that what a functional program writes has the type and shape of its target, as readers rely on it."""
    signature = program.graph_signature
    inputs = {spec.target or spec.arg.name for spec in signature.input_specs}
    for spec in signature.output_specs:
        if spec.kind in _WRITES and spec.target not in inputs:
            raise InputError(
                f"Method {method!r} writes {spec.target!r}, which is not among its inputs: ExecuTorch's to_edge "
                "removes parameters that are not read. Give `lower` what torch.export made, or use a buffer."
            )
    given = graphs.user_inputs(program)
    for _, node in graphs.every_node(program.graph_module):
        norm = graphs.operator_name(node) in _STATISTICS and node.args[5]
        written = [one for one in node.args[3:5] if one in given] if norm else ()
        if written:  # their schemas hide it, and decompositions lose the result
            raise InputError(
                f"Method {method!r}: {graphs.operator_name(node)} updates running statistics that are inputs of the "
                f"method ({', '.join(map(str, written))}), at {graphs.source_line(node) or 'an unknown line'}. "
                "Make them buffers of a module (self.register_buffer), or evaluate without training."
            )
    ending = _Ending(program)
    for place, target in ending.targets.items():
        new, old = ending.value(place).meta.get("val"), target.meta.get("val")
        if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
            continue
        if new.dtype is not old.dtype or not measures.same_sizes(new.shape, old.shape):
            raise InputError(
                f"Method {method!r} writes {new.dtype} {list(new.shape)} into {target.name}, which is {old.dtype} "
                f"{list(old.shape)}. PyTorch's decomposition (run_decompositions, ExecuTorch's to_edge) drops the "
                "conversion of `copy_`, so the program is not the model any more. Give `lower` the program as "
                "torch.export made it, or convert in the model: `state.copy_(x.to(state.dtype).expand_as(state))`."
            )


def _fit_copied(module: GraphModule, distinct: bool) -> None:
    """Give what `copy_` writes the form of its target, whose place it takes when the graph is functional."""
    copies = module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    if not copies:
        return
    origins = _list_origins(module, module.graph.find_nodes(op="placeholder"))
    written = frozenset[Node]().union(
        *(
            found
            for node, found in origins.items()
            if graphs.is_mutating(node) or any(writes(nested.module) for nested in graphs.nested_graphs(module, node))
        )
    )
    for node in copies:
        target, value = node.args[:2]
        with module.graph.inserting_before(node):
            if not isinstance(value, Node):
                node.update_arg(1, _add(torch.ops.aten.full_like.default, (target, value), node))
                continue
            shared = target in origins and (distinct or written & origins.get(value, frozenset()))
            place = target.meta["val"]
            if not measures.same_sizes(value.meta["val"].shape, place.shape):
                value = _add(torch.ops.aten.expand_as.default, (value, target), node)
            if value.meta["val"].dtype is not place.dtype:
                value, shared = _add(torch.ops.aten._to_copy.default, (value,), node, dtype=place.dtype), False
            order = list(dim_order(place))
            if _replaces_all(target) and not value.meta["val"].permute(order).is_contiguous():
                value = _add(torch.ops.aten.permute.default, (value, order), node)
                value = _add(torch.ops.aten.clone.default, (value,), node, memory_format=torch.contiguous_format)
                value = _add(
                    torch.ops.aten.permute.default, (value, [order.index(dim) for dim in range(len(order))]), node
                )
            elif shared:
                value = _add(torch.ops.aten.clone.default, (value,), node)
        node.update_arg(1, value)


def _replaces_all(target: Node) -> bool:
    """Return whether a write into a value, whose sizes are known, leaves nothing of the memory that it is in."""
    base: Any = target
    while base.op == "call_function" and (is_view(base.target) or graphs.is_mutating(base)):
        base = base.args[0]
    known = all(isinstance(size, int) for size in target.meta["val"].shape)
    return known and measures.value_elements(base) == measures.value_elements(target)


class _Ending:
    """The end of a graph, where copies and writes are added."""

    def __init__(self, program: ExportedProgram) -> None:
        self._graph, self._specs = program.graph, program.graph_signature.output_specs
        self._output = self._graph.output_node()
        self._values: list[Any] = list(self._output.args[0])
        self._copies: dict[Node, Node] = {}
        inputs = {spec.target or spec.arg.name: spec.arg.name for spec in program.graph_signature.input_specs}
        nodes = {node.name: node for node in self._graph.find_nodes(op="placeholder")}
        # the inputs that are written, by the place of their new value among the results
        self.targets = {
            place: nodes[inputs[str(spec.target)]] for place, spec in enumerate(self._specs) if spec.kind in _WRITES
        }
        self._origins = _list_origins(program.graph_module, self.targets.values()) if self.targets else {}

    def value(self, place: int) -> Any:
        """Return a result."""
        return self._values[place]

    def is_written(self, place: int) -> bool:
        """Return whether an input has its new value already: its old one, or what was written in place."""
        value = self._values[place]
        while graphs.is_mutating(value):
            value = value.args[0]
        return value is self.targets[place]

    def shared(self, place: int) -> frozenset[Node]:
        """Return the inputs that are written and whose memory a result may share."""
        value = self._values[place]
        if place not in self.targets and value.target in edge.VIEWS:
            return frozenset()  # ExecuTorch copies views that are returned
        return self._origins.get(value, frozenset())

    def keep_returned(self, written: Iterable[Node]) -> None:
        """Copy the old state that is returned: it is read after the writes."""
        lost = frozenset(written)
        for place, value in enumerate(self._values):
            if place not in self.targets and isinstance(value, Node) and lost & self.shared(place):
                self.copy(place)

    def copy(self, place: int) -> None:
        """Let a result be a copy."""
        value = self._values[place]
        if value not in self._copies:
            self._copies[value] = self._add(edge.CLONE, (value,), dict(value.meta))
        self._values[place] = self._copies[value]

    def write(self, place: int) -> None:
        """Write an input's new value, which ExecuTorch's kernel expects in the same memory order."""
        target, value = self.targets[place], self._values[place]
        new, old = value.meta.get("val"), target.meta.get("val")
        if (
            isinstance(new, torch.Tensor)
            and isinstance(old, torch.Tensor)
            and not measures.same_sizes(new.stride(), old.stride())
            and new.dim_order() != old.dim_order()
        ):
            meta = {**value.meta, "val": new.new_empty_strided(old.shape, old.stride())}
            value = self._add(edge.CLONE_IN_ORDER, (value,), meta, dim_order=list(old.dim_order()))
        self._values[place] = self._add(torch.ops.aten.copy_.default, (target, value), {"val": old})

    def _add(self, operator: Any, arguments: tuple[Node, ...], meta: dict[str, Any], **options: Any) -> Node:
        return insert_call(self._output, operator, arguments, options, meta=meta)

    def finish(self) -> None:
        """Let the graph return what was added, and the signature say so."""
        self._output.args = (tuple(self._values),)
        for value, spec in zip(self._values, self._specs, strict=True):
            if isinstance(value, Node):
                spec.arg.name = value.name


def _list_origins(module: GraphModule, inputs: Iterable[Node]) -> dict[Node, frozenset[Node]]:
    """Return, for each node whose value may share the memory of some of the inputs, those inputs."""
    origins = {node: frozenset((node,)) for node in inputs}
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if graphs.calls_graphs(module, node):
            operands = node.all_input_nodes  # a branch may return what it is given
        elif is_view(node.target) or node.target in edge.VIEWS or graphs.is_getitem(node) or graphs.is_mutating(node):
            operands = [node.args[0]]
        else:
            continue
        found = frozenset[Node]().union(*(origins.get(operand, ()) for operand in operands))
        if found:
            origins[node] = found
    return origins


def _in_order(ending: _Ending, writes: dict[int, Node]) -> Iterator[int]:
    """Yield writes so that each comes after those that need the state it replaces; copy what keeps all waiting."""
    place_of = {target: place for place, target in writes.items()}
    needs = {place: [place_of[target] for target in ending.shared(place) if target in place_of] for place in writes}
    waits_for: dict[int, dict[int, None]] = {place: {} for place in writes}
    for place, needed in needs.items():
        for other in needed:
            if other != place:
                waits_for[other][place] = None
    ready = [place for place in writes if not waits_for[place]]
    waiting = {place: None for place in writes if waits_for[place]}
    while ready or waiting:
        if ready:
            done = [heapq.heappop(ready)]
            yield done[0]
        else:
            done = [*waits_for[next(iter(waiting))]]
            for place in done:
                ending.copy(place)
        for place in done:
            for other in needs.pop(place, ()):
                waits_for[other].pop(place, None)
                if not waits_for[other] and other in waiting:
                    del waiting[other]
                    heapq.heappush(ready, other)


def _drop_copies(program: ExportedProgram) -> None:
    """Let state take what a copy is of, unless the copy is returned too: it is copied at the end, if need be."""
    results: list[Any] = list(program.graph.output_node().args[0])
    for value, spec in zip(results, program.graph_signature.output_specs, strict=True):
        copied = _COPIED.get(value.target) if isinstance(value, Node) and spec.kind in _WRITES else None
        if copied is not None and results.count(value) == 1 and not writes(program.graph_module):
            source = value.args[copied]
            new, old = (one.meta["val"] for one in (value, source))
            both = ((new.shape, old.shape), (new.stride(), old.stride()))
            if new.dtype is old.dtype and all(measures.same_sizes(*each) for each in both):
                value.replace_all_uses_with(source)
                program.graph.erase_node(value)
                spec.arg.name = source.name


def _keep_overwritten(program: ExportedProgram) -> None:
    """Copy what is needed and a custom operator overwrites: torch.export made it functional, ExecuTorch undoes it."""
    nodes = list(program.graph.nodes)
    calls = [node for node in nodes if node.target in _FUNCTIONALIZED]
    if not calls:
        return
    place = {node: number for number, node in enumerate(nodes)}
    base_of: dict[Node, Node] = {}
    last: dict[Node, int] = {}
    for node in nodes:
        base_of[node] = base_of[node.args[0]] if node.target in edge.VIEWS else node
        for operand in node.all_input_nodes if node.target not in edge.VIEWS else ():
            last[base_of[operand]] = place[node]
    ending = _Ending(program)
    values = ((target, ending.value(written)) for written, target in ending.targets.items())
    taken: dict[Node, Any] = {target: value for target, value in values if isinstance(value, Node)}
    for call in calls:
        for number, given in enumerate(_overwritten(call)):
            base, result_of = base_of[given], None
            result = taken.get(base)
            if result is not None and graphs.is_getitem(result) and result.args[0] is call:
                # What is overwritten comes behind the results that the operator has anyway.
                result_of = result.args[1] - (len(result.args[0].meta["val"]) - len(_overwritten(result.args[0])))
            if last[base] > place[call] or (base.op == "placeholder" and result_of != number):
                call.replace_input_with(given, insert_call(call, edge.CLONE, (given,), meta=dict(given.meta)))


def _overwritten(call: Node) -> list[Node]:
    """Return what a functional form of a custom operator would overwrite."""
    if "_all_bases" in call.kwargs:
        return [base for base in call.kwargs["_all_bases"] if isinstance(base, Node)]  # type: ignore[union-attr]
    given = [call.kwargs.get(name) for name in written_arguments(call.args[0])]
    return [operand for operand in given if isinstance(operand, Node)]


def _write_rows(program: ExportedProgram) -> None:
    """Let operators that replace elements of a buffer write into it, where nothing reads the old state later."""
    signature = program.graph_signature
    results: list[Any] = list(program.graph.output_node().args[0])
    place = {node: number for number, node in enumerate(program.graph.nodes)}
    counted: dict[tuple[Node, int], Node] = {}
    for result, spec in zip(list(results), signature.output_specs, strict=True):
        if (
            spec.kind is not OutputKind.BUFFER_MUTATION
            or not isinstance(result, Node)
            or result.target != edge.INDEX_PUT
        ):
            continue
        state = result.args[0]
        if not isinstance(state, Node) or signature.inputs_to_buffers.get(state.name) != spec.target:
            continue
        # The memory of the old state is read only before it is written to, by what has results of its own: delegates
        # and nested graphs may alias inputs.
        last = all(
            place[user] < place[result]
            and user.op == "call_function"
            and user.target not in edge.VIEWS
            and graphs.operator_name(user).startswith("aten.")
            for user in state.users
            if user is not result
        )
        if results.count(result) != 1 or not last or not _has_kernel(state, result):
            continue
        with program.graph.inserting_before(result):
            arguments = [state, _from_the_start(result, counted), *result.args[2:]]
            written = program.graph.call_function(edge.INDEX_PUT_IN_PLACE, tuple(arguments), result.kwargs)
        written.meta = dict(result.meta)
        for user in list(result.users):
            if user.target in edge.VIEWS:  # ExecuTorch plans their memory with that of their operand, as if it were new
                user.replace_input_with(result, state)
        result.replace_all_uses_with(written)
        program.graph.erase_node(result)
        place[written] = place[result]
        spec.arg.name = written.name


def _has_kernel(state: Node, write: Node) -> bool:
    """Return whether ExecuTorch's kernel writes in place: rows along one dimension, without adding to what is there."""
    indices, values = write.args[1], write.args[2]
    if graphs.argument(write, "accumulate") or not isinstance(indices, (list, tuple)) or not isinstance(values, Node):
        return False
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    index = indices[dims[0]] if len(dims) == 1 else None
    if not isinstance(index, Node) or state in (index, values):
        return False
    old, new, rows = (node.meta.get("val") for node in (state, values, index))
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and isinstance(rows, torch.Tensor)):
        return False
    fits = rows.dtype is torch.int64 and rows.dim() == 1 and old.dtype is new.dtype and old.dim() == new.dim()
    sizes = [*old.shape]
    sizes[dims[0]] = rows.shape[0]
    return fits and all(isinstance(size, int) for size in (*sizes, *new.shape)) and sizes == [*new.shape]


def _from_the_start(write: Node, counted: dict[tuple[Node, int], Node]) -> list[Node | None]:
    """Return a write's indices, with its one counted from the start, as its kernel needs; `counted` has all so far."""
    indices: Any = write.args[1]
    state: Any = write.args[0]
    (dim,) = (number for number, index in enumerate(indices) if index is not None)
    index, size = indices[dim], state.meta["val"].shape[dim]
    if (index, size) not in counted:
        calls = ((edge.LESS, (index, 0)), (edge.ADD_NUMBER, (index, size)))
        before = next(node for node in index.graph.nodes if node > index and node.op not in ("placeholder", "get_attr"))
        with index.graph.inserting_before(before):
            negative, moved = (_add(operator, arguments, write) for operator, arguments in calls)
            counted[index, size] = _add(edge.WHERE, (negative, moved, index), write)
    return [*indices[:dim], counted[index, size], *indices[dim + 1 :]]


def _add(operator: Any, arguments: tuple[Any, ...], write: Node, **options: Any) -> Node:
    node: Node = write.graph.call_function(operator, arguments, options)
    values = torch.fx.node.map_arg(arguments, lambda operand: operand.meta["val"])
    node.meta = {**write.meta, "val": operator(*values, **options)}
    return node
