"""State that is written in place: a cache of keys and values is not copied as a whole to change one row.

ExecuTorch emits a functional `index_put` into new memory, and then copies all of it into the buffer. Its own
`reinplace_pass` replaces that, but does not see views of the buffer that are read later, which share its memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.edge_operators import ADD_NUMBER, INDEX_PUT, INDEX_PUT_IN_PLACE, LESS, VIEWS, WHERE


def write_in_place(program: ExportedProgram) -> None:
    """Let operators that replace elements of a buffer write into it, where nothing reads the old state later.

    Args:
        program: A private copy of a lowered program, which is changed.
    """
    signature = program.graph_signature
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    results = list(output.args[0])
    place = {node: number for number, node in enumerate(program.graph.nodes)}
    counted: dict[tuple[Node, int], Node] = {}
    for result, spec in zip(list(results), signature.output_specs, strict=True):
        if spec.kind is not OutputKind.BUFFER_MUTATION or not isinstance(result, Node) or result.target != INDEX_PUT:
            continue
        state = result.args[0]
        if not isinstance(state, Node) or signature.inputs_to_buffers.get(state.name) != spec.target:
            continue
        if results.count(result) != 1 or not _is_last_use(state, result, place) or not _has_kernel(state, result):
            continue
        with program.graph.inserting_before(result):
            arguments = [state, _from_the_start(result, counted), *result.args[2:]]
            written = program.graph.call_function(INDEX_PUT_IN_PLACE, tuple(arguments), result.kwargs)
        written.meta = dict(result.meta)
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
    """Return the indices of a write, none of them counted from the end: the kernel that writes in place refuses those.

    Args:
        write: The write, which has one index.
        counted: What was added for an index and a size, once for all writes.
    """
    indices: Any = write.args[1]
    state: Any = write.args[0]
    (dim,) = (number for number, index in enumerate(indices) if index is not None)
    index, size = indices[dim], state.meta["val"].shape[dim]
    if (index, size) not in counted:
        calls = ((LESS, (index, 0)), (ADD_NUMBER, (index, size)))
        before = next(node for node in index.graph.nodes if node > index and node.op not in ("placeholder", "get_attr"))
        with index.graph.inserting_before(before):
            negative, moved = (_add(operator, arguments, write) for operator, arguments in calls)
            counted[index, size] = _add(WHERE, (negative, moved, index), write)
    return [*indices[:dim], counted[index, size], *indices[dim + 1 :]]


def _add(operator: Any, arguments: tuple[Any, ...], write: Node) -> Node:
    node: Node = write.graph.call_function(operator, arguments)
    values = torch.fx.node.map_arg(arguments, lambda operand: operand.meta["val"])
    node.meta = {**write.meta, "val": operator(*values)}
    return node


def _is_last_use(state: Node, write: Node, place: dict[Node, int]) -> bool:
    """Return whether the memory of a buffer's old state is read only before it is written to."""
    others = [user for user in state.users if user is not write]
    return all(place[user] < place[write] and _copies(user) for user in others)


def _copies(node: Node) -> bool:
    """Return whether the results of a node have memory of their own: delegates and nested graphs may alias inputs."""
    name = graphs.operator_name(node)
    return name.startswith("aten.") and node.op == "call_function" and node.target not in VIEWS
