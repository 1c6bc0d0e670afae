"""In-place operators on intermediate values and on buffers: what is read after one of them is its result.

Composite operators return what they are given, or views of it, only where they declare it: others that do so, in a
program that writes, were replaced before (`graphs.inlining`).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Container, Iterator
from typing import Any

import torch
from networkx.utils import UnionFind
from torch._higher_order_ops.auto_functionalize import can_auto_functionalize
from torch.fx import Graph, Node

from exir_lowering import graphs
from exir_lowering._upstream import operators
from exir_lowering._upstream.fakes import FakeTensorMode
from exir_lowering._upstream.programs import pytree
from exir_lowering._upstream.tensors import version
from exir_lowering._upstream.value_keys import MEMORY, NotCoveredError, evaluate, renew
from exir_lowering.errors import ignoring_errors
from exir_lowering.fast.calls import CallKeys
from exir_lowering.fast.lookups import source_of
from exir_lowering.fast.rewriter import COPIED_META
from exir_lowering.graphs.inlining import insert_call, replace_call, shares_memory
from exir_lowering.graphs.measures import tensors

FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2
"""What torch makes of an operator of users that writes: it returns what that returns, then what was written."""

_ATEN = torch.ops.aten
_PLAIN_VIEWS = frozenset(  # by operators that tracing leaves as they are
    {
        *(_ATEN.view.default, _ATEN.unsqueeze.default, _ATEN.squeeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims),
        *(_ATEN.expand.default, _ATEN.select.int, _ATEN.slice.Tensor, _ATEN.diagonal.default),
        *(_ATEN.t.default, _ATEN.transpose.int, _ATEN.permute.default),
    }
)


class Writes:
    """The writes of one graph, which become results; those into buffers are to be returned, too."""

    def __init__(self, graph: Graph, mode: FakeTensorMode, buffers: frozenset[Node], step: str) -> None:
        """Describe a graph, the buffers among its inputs, and the step for the histories of what is made."""
        self.described: set[Node] = set()  # nodes whose histories name the step already
        self._graph, self._mode, self._buffers, self._step = graph, mode, buffers, step
        self._results: set[Node] = set()  # what calls of FUNCTIONALIZED that were made here have written
        self._written: set[Node] = set()  # the results of operators that do write

    def read_results(self) -> None:
        """Make what is read after in-place operators their results.

        NotCoveredError for one that changes what is read elsewhere.
        """
        for node in list(self._graph.nodes):
            if is_mutable(node) and not operators.is_built_in(node.target):
                self._make_functional(node)
        mutating = [node for node in self._graph.nodes if is_mutable(node) or node in self._results]
        if not mutating:
            return
        places: Any = UnionFind(self._graph.nodes)
        for node in self._graph.nodes:
            places.union(node, *self._shared(node))
        members: dict[Node, list[Node]] = defaultdict(list)  # what may share memory, in order
        for node in self._graph.nodes:
            members[places[node]].append(node)
        order = {node: index for index, node in enumerate(self._graph.nodes)}
        for node in mutating:
            if is_mutable(node) and _writes_nothing(node, self._mode):
                continue
            self._written.add(node)
            versions, shared = self._list_versions(node), members[places[node]]
            # Nothing else that may share the memory is an input, or is read after the write; and torch makes views of
            # what was written when they are first read.
            others = [member for member in shared if order[member] < order[node] and member not in versions]
            later = (one for one in shared if order[one] > order[node] and not self._is_write(one))
            if (
                not versions
                or not self._is_new(versions[-1])
                or any(one.op != "call_function" or any(order[to] >= order[node] for to in one.users) for one in others)
                or not all(self._is_new(one) or _is_plain_view(one) for one in later)
            ):
                target = node.args[0].args[0] if node in self._results else node.target
                raise NotCoveredError(f"{target}, which writes into what is read elsewhere")
            for earlier in versions:
                afterwards = [user for user in earlier.users if order[user] > order[node]]
                earlier.replace_all_uses_with(node, delete_user_cb=afterwards.__contains__)

    def renew_views(self) -> None:
        """Make views of what was written anew where they are first read, as torch does: with all it is a view of, each.

        NotCoveredError if one is returned.
        """
        stale: dict[Node, bool] = {}  # views as the program makes them, and whether they have been made anew
        for node in list(self._graph.nodes):
            for operand in node.all_input_nodes:
                if stale.get(operand) is False:
                    if node.op == "output":
                        raise NotCoveredError("a view of what was written is returned")
                    renewed = self._repeat(operand, stale, node)
                    operand.replace_all_uses_with(renewed, delete_user_cb=lambda user: not _is_plain_view(user))
                    stale[operand] = True
            if _is_plain_view(node) and (node.args[0] in stale or self._is_written(node.args[0])):
                stale[node] = False
        for node in reversed(stale):
            self._graph.erase_node(node)

    def last(self) -> dict[Node, Node]:
        """Return the last result that stands for each buffer that is written, in the order of the inputs."""
        origins, found = {buffer: buffer for buffer in self._buffers}, dict[Node, Node]()
        for node in self._graph.nodes:
            before = self._overwritten(node)
            if before in origins:
                origins[node] = origins[before]
                if node in self._written:
                    found[origins[node]] = node
        return {buffer: found[buffer] for buffer in self._graph.find_nodes(op="placeholder") if buffer in found}

    def _make_functional(self, node: Node) -> None:
        """Replace a call of an operator of users that writes into one operand, and returns a new tensor."""
        target: Any = node.target
        arguments = operators.list_arguments(target)
        values = (value for _, value in operators.bind(target, node.args, node.kwargs))
        given = dict(zip((one.name for one in arguments), values, strict=True))
        written = [one.name for one in arguments if one.written]
        returned = [str(each.type) for each in target._schema.returns]
        if len(written) != 1 or returned != ["Tensor"] or not can_auto_functionalize(target):
            return
        before = given.pop(written[0])
        if not isinstance(before, Node):
            return
        found: tuple[Any, Any] = node.meta["val"], renew(before.meta["val"], self._mode, gradients=False)
        meta = {**node.meta, "val": found, "from_node": [source_of(node, self._step)]}
        more = {f"_{written[0]}_base_index": 0, "_all_bases": [before]}
        call: Node = insert_call(node, FUNCTIONALIZED, (target,), {**given, **more}, meta=meta)
        elements = [(index, one) for index, one in enumerate(found) if index or node.users]
        nodes = [insert_call(node, operator.getitem, (call, i), meta={**meta, "val": one}) for i, one in elements]
        self.described.add(call)
        self._results.add(nodes[-1])
        replace_call(node, nodes[0])

    def _repeat(self, view: Node, views: Container[Node], reader: Node) -> Node:
        """Return what a view becomes in front of a node that reads it; torch ascribes it to that."""
        chain: list[Any] = [view]
        while chain[-1].args[0] in views:
            chain.append(chain[-1].args[0])
        made: Node = chain[-1].args[0]
        meta = {name: reader.meta[name] for name in COPIED_META if name in reader.meta}
        if reader not in self.described:
            meta["from_node"] = [source_of(reader, self._step)]
        meta |= {name: view.meta[name] for name in ("stack_trace", "custom") if name in view.meta}
        for one in reversed(chain):
            described = {**meta, "val": one.meta["val"]}
            made = insert_call(reader, one.target, (made, *one.args[1:]), one.kwargs, meta=described)
            self.described.add(made)
        return made

    def _is_write(self, node: Any) -> bool:
        return is_mutable(node) or node in self._results

    def _is_written(self, node: Any) -> bool:
        """Return whether a node stands for memory that was written; some in-place operators write nothing."""
        return node in self._written or (self._is_write(node) and self._is_written(self._overwritten(node)))

    def _overwritten(self, node: Node) -> Any:
        """Return the operand that a node overwrites whole and returns; None if it does anything else."""
        if node in self._results:
            return node.args[0].kwargs["_all_bases"][0]  # type: ignore[union-attr, index]
        if not is_mutable(node):
            return None
        overwrites = [argument.written for argument in operators.list_arguments(node.target)]
        target: Any = node.target
        returned = [each.alias_info is not None and each.alias_info.is_write for each in target._schema.returns]
        whole = overwrites == [True] + [False] * (len(overwrites) - 1) and returned == [True]
        return node.args[0] if whole and node.args else None

    def _list_versions(self, node: Node) -> list[Node]:
        """Return the nodes that stand for what is overwritten: what made it, and the writes in between.

        Empty if an operator does not overwrite and return one operand, or that is an input, but no buffer.
        """
        versions = [self._overwritten(node)]
        while isinstance(versions[-1], Node) and self._is_write(versions[-1]):
            versions.append(self._overwritten(versions[-1]))
        first = versions[-1]
        known = isinstance(first, Node) and (first.op == "call_function" or first in self._buffers)
        return versions if known else []

    def _shared(self, node: Node) -> Iterator[Node]:
        """Yield the operands whose memory a node's result may be in."""
        if node in self._results:
            yield self._overwritten(node)
        elif node.op == "call_function" and node.target is not FUNCTIONALIZED:
            shared = list(_list_shared(node))
            may_copy = operators.is_composite(node.target) and not is_mutable(node)  # such as `reshape`
            if shared and not (may_copy and not shares_memory(node, self._mode)):
                yield from shared

    def _is_new(self, node: Node) -> bool:
        """Return whether a node's result is in separate memory."""
        return not any(True for _ in self._shared(node))


def _list_shared(node: Node) -> Iterator[Node]:
    if not operators.is_overload(node.target):
        yield from node.all_input_nodes
        return
    for argument in operators.list_arguments(node.target):
        if argument.aliased:
            given = pytree.tree_leaves(graphs.argument(node, argument.name))
            yield from (each for each in given if isinstance(each, Node))


def _is_plain_view(node: Node) -> bool:
    return node.op == "call_function" and node.target in _PLAIN_VIEWS


def _writes_nothing(node: Node, mode: FakeTensorMode) -> bool:
    """Return whether an in-place operator writes nothing, such as dropout in inference, which is composite."""
    if not operators.is_composite(node.target):
        return False
    call = CallKeys().call(node, node.target, [one.meta.get("val") for one in node.all_input_nodes], None)
    key = ("writes nothing", call.key)
    known: tuple[bool] | None = None if call.local else MEMORY.find(key)
    if known is None:
        own = [renew(value, mode, gradients=False) for value in call.values]
        before = [version(tensor) for tensor in tensors(own)]
        known = (False,)
        with ignoring_errors():
            evaluate(node, node.target, dict(zip(call.operands, own, strict=True)).__getitem__, mode, gradients=False)
            known = (before == [version(tensor) for tensor in tensors(own)],)
        if not call.local:
            MEMORY.put(key, known)
    return known[0]


def is_mutable(node: Node) -> bool:
    """Return whether a node's operator writes into an operand."""
    return node.op == "call_function" and operators.mutates_arguments(node.target)
