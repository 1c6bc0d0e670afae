"""Edits of one graph: new nodes with their values, new constants, and removal of what nothing needs any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node
from torch.fx.node import map_arg

from exir_lowering import graphs
from exir_lowering._upstream.edge import edge_operator
from exir_lowering._upstream.fakes import FakeTensorMode
from exir_lowering._upstream.value_keys import MEMORY, call_key, evaluate, renew, without_program
from exir_lowering.graphs import measures
from exir_lowering.graphs.operators.purity import only_computes
from exir_lowering.graphs.ranges import ValueRanges

_OWN = frozenset({"val", "tensor_meta", graphs.DELEGATION_TAG})  # keys of node.meta that describe one node only

_INPUTS = (InputKind.USER_INPUT, InputKind.CUSTOM_OBJ)

_SHARED_BYTES = 1 << 16  # up to this size, constants are compared by content


class Editor:
    """A private copy of a program that is being rewritten; at the current node it is the `Scope` of a rewrite."""

    def __init__(
        self, program: ExportedProgram, mode: FakeTensorMode, assume: Mapping[str, str], volatile: Collection[str]
    ) -> None:
        """Begin to edit; `assume` is about inputs, `volatile` are buffers that other methods write, and may share."""
        self.program, self.graph, self.mode = program, program.graph, mode
        self.ranges = ValueRanges(program, assume, volatile)  # what is known about values
        self.gone: set[Node] = set()  # the nodes that were removed
        self.made: list[Node] = []  # those that were added for the current node
        self._memories: dict[str, dict[Any, Any]] = {}
        self._constants: dict[Any, Node] = {}
        self._lifted: dict[Node, InputSpec] = {}
        self._anchor, self._rewrite = next(iter(self.graph.nodes)), ""
        self._given = graphs.lifted_inputs(program)
        written = graphs.written_state(program)
        self._used = [node for node, spec in self._given.items() if node.users and spec.target not in written]
        self._returned = Counter(self.graph.output_node().all_input_nodes)
        kinds = [spec.kind in _INPUTS for spec in program.graph_signature.input_specs]
        self._before_inputs = [*self.graph.find_nodes(op="placeholder")][: [*kinds, True].index(True)]

    # -- what a rewrite sees -------------------------------------------------------------------------------------------

    def at(self, node: Node, rewrite: str) -> Editor:
        """Begin with a node and a rewrite; what the last one made and did not use was discarded or kept."""
        self._anchor, self._rewrite, self.made = node, rewrite, []
        return self

    @property
    def memory(self) -> dict[Any, Any]:
        """The dictionary of the current rewrite."""
        return self._memories.setdefault(self._rewrite, {})

    def call(self, operator: str, *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
        """Add a call before the current node, see `Scope.call`; ValueError for an operand that is not known there."""

        def check(operand: Node) -> Node:
            known = operand.graph is self.graph and operand not in self.gone
            if not known or not (operand is self._anchor or operand < self._anchor):
                raise ValueError(f"{operator} reads {operand.name}, which is not computed before {self._anchor.name}")
            return operand

        map_arg((args, kwargs), check)
        with self.graph.inserting_before(self._anchor):
            node: Node = self.graph.call_function(edge_operator(operator), args, kwargs)
        node.meta = {key: value for key, value in self._anchor.meta.items() if key not in _OWN}
        node.meta["val"] = renew(like.meta["val"], self.mode) if like is not None else self.compute(node)
        self.made.append(node)
        return node

    def constant(self, tensor: torch.Tensor) -> Node:
        """Add a lifted constant, see `Scope.constant`, with a name by which ExecuTorch keeps it out of data files."""
        key = _content(tensor)
        if key not in self._constants:
            table = self.program.constants
            number = len(self._constants)
            while (name := f"_lifted_tensor_rewritten{number}") in table or name in self.program.state_dict:
                number += 1
            behind = self._before_inputs
            with self.graph.inserting_after(behind[-1]) if behind else self.graph.inserting_before():
                node: Node = self.graph.placeholder(name)
            node.meta = {"val": self.mode.from_tensor(tensor, static_shapes=True)}
            table[name] = tensor
            self._constants[key] = node
            self._lifted[node] = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name)
            self.program.graph_signature.input_specs.insert(len(behind), self._lifted[node])
            behind.append(node)
        return self._constants[key]

    def exists(self, node: Node) -> bool:
        """Return whether a node is still in the graph."""
        return node not in self.gone

    def is_returned(self, node: Node) -> bool:
        """Return whether the output node has a node among its arguments."""
        return self._returned[node] > 0

    def compute(self, node: Node) -> Any:
        """Return the value of a node, from an equal call that the process knows, if there is one."""
        key = call_key(node)
        template = MEMORY.find(("rewrite", key)) if key is not None else None
        if template is not None:
            return renew(template, self.mode)
        operator = edge_operator(graphs.operator_name(node))
        value = evaluate(node, operator, lambda operand: operand.meta["val"], self.mode, gradients=False)
        if key is not None:
            MEMORY.put(("rewrite", key), without_program(value))
        return value

    @property
    def lifted(self) -> dict[Node, InputSpec]:
        """The parameters, buffers and constants, those that were added included."""
        return {**self._given, **self._lifted}

    # -- what the walk does --------------------------------------------------------------------------------------------

    def discard(self, made: Sequence[Node] | None = None) -> None:
        """Remove what was made, for the current node if nothing else is said."""
        for node in reversed(self.made if made is None else made):
            if not node.users and node not in self.gone:
                self.erase(node)
        self.made = []

    def may_replace(self, node: Node, new: Node) -> bool:
        """Return whether a value can be taken from another node; results stay separate, in their memory order."""
        if self.is_returned(node) and new.op in ("placeholder", "get_attr"):
            return False
        return self._returned_parts(node).isdisjoint(self._returned_parts(new)) and _layout(node) == _layout(new)

    def _returned_parts(self, node: Node) -> set[Any]:
        """Return which results of a node the method returns: None for its only one."""
        parts = {user.args[1] for user in node.users if graphs.is_getitem(user) and self.is_returned(user)}
        return {*parts, None} if self.is_returned(node) else parts

    def replace(self, node: Node, new: Node) -> list[Node]:
        """Let another node have a node's value; return the nodes that are not needed any more, which are removed."""
        removed = would_remove(node, (*self.made, new))
        node.replace_all_uses_with(new)
        self._returned[new] += self._returned.pop(node, 0)
        for dead in removed:
            self.erase(dead)
        return removed

    def erase(self, node: Node) -> None:
        """Remove a node that nothing uses."""
        node.graph.erase_node(node)
        self.gone.add(node)

    def finish(self) -> None:
        """Bring the signature up to date, without constants and weights that nothing uses any more."""
        for node in self.graph.nodes:  # users in the graph's order, as in a copy
            for operand in node.all_input_nodes:
                del operand.users[node]
                operand.users[node] = None
        signature, unused = self.program.graph_signature, set[str]()
        for node in (*self._lifted, *self._used):
            if not node.users:
                unused.add(node.name)
                self.graph.erase_node(node)
                if node in self._lifted:
                    del self.program.constants[str(self._lifted[node].target)]
        signature.input_specs = [one for one in signature.input_specs if getattr(one.arg, "name", None) not in unused]
        for value, spec in zip(self.graph.output_node().args[0], signature.output_specs, strict=True):
            if isinstance(value, Node):
                spec.arg.name = value.name


def would_remove(node: Node, kept: Collection[Node]) -> list[Node]:
    """Return a node and what nothing but that needs, and is not to be kept, each behind those that use it."""
    removed, pending = dict[Node, None](), [node]
    while pending:
        dead = pending.pop()
        free = dead is node or (only_computes(dead) and dead not in kept and removed.keys() >= dead.users.keys())
        if free and dead not in removed:  # of the node itself, the rewrite knows what it computes
            removed[dead] = None
            pending += dead.all_input_nodes
    return list(removed)


def _content(tensor: torch.Tensor) -> Any:
    """Return what identifies a constant: its content if it is small."""
    if tensor.nbytes > _SHARED_BYTES or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return id(tensor)
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), content


def _layout(node: Node) -> Any:
    """Return the dtype, the shape and the memory order of a value; sizes of 1 have no order."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return type(value), str(value)
    sizes, strides = (list(map(measures.expression, numbers)) for numbers in (value.shape, value.stride()))
    return value.dtype, sizes, [stride for size, stride in zip(sizes, strides, strict=True) if size != 1]
