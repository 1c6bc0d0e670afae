"""Random changes of programs in Edge dialect: a conversion takes a second, a changed copy a few milliseconds.

What is changed keeps its shape, dtype and strides, so that the rest of the graph stays valid: patterns that rewrites
look for become almost such patterns, and chains of views, equal calls and odd outputs appear in odd places.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.fx import Node

from exir_lowering._upstream.edge import edge_operator
from exir_lowering._upstream.programs import fake_mode_of
from exir_lowering.graphs import is_getitem, operator_name
from exir_lowering.graphs.copies import private_copy

INF = float("inf")


def mutate(program: ExportedProgram, r: random.Random) -> ExportedProgram:
    """Return a changed copy of a program in Edge dialect."""
    copied = private_copy(program, handles=True)
    mutant = _Mutant(copied, r)
    for _ in range(r.choice([1, 1, 2, 3, 5])):
        r.choice(_CHANGES)(mutant)
    return copied


class _Mutant:
    """A program that is being changed."""

    def __init__(self, program: ExportedProgram, r: random.Random) -> None:
        self.program, self.graph, self.r = program, program.graph, r
        self.mode = fake_mode_of(program.graph_module)

    def calls(self, *names: str) -> list[Node]:
        """Return the calls of operators with a tensor as result; of all if none are named."""
        found = [node for node in self.graph.nodes if node.op == "call_function" and _tensor(node) is not None]
        return [node for node in found if not names or operator_name(node) in names]

    def values(self) -> list[Node]:
        return [
            node
            for node in self.graph.nodes
            if node.op in ("placeholder", "call_function") and _tensor(node) is not None
        ]

    def add(self, after: Node, name: str, *args: Any, **kwargs: Any) -> Node:
        """Add a call behind a node."""
        place = after
        while place.op == "placeholder" and place.next.op == "placeholder":
            place = place.next
        with self.graph.inserting_after(place):
            node: Node = self.graph.call_function(edge_operator(name), args, kwargs)
        node.meta = {key: value for key, value in after.meta.items() if key not in ("val", "tensor_meta")}
        fakes = torch.fx.node.map_arg((args, kwargs), lambda one: one.meta["val"])
        with self.mode:  # type: ignore[union-attr]
            node.meta["val"] = node.target(*fakes[0], **fakes[1])  # type: ignore[operator]
        return node

    def give(self, old: Node, new: Node) -> None:
        """Let some users of a value take another one of the same form."""
        made = _ancestors(new)
        users = [user for user in old.users if user is not new and user not in made]
        if not users or not _same(old, new):
            return
        chosen = users if self.r.random() < 0.5 else [self.r.choice(users)]
        for user in chosen:
            if new < user and (user.op != "output" or new.op != "placeholder"):
                user.replace_input_with(old, new)
                if user.op == "output":
                    for value, spec in zip(user.args[0], self.program.graph_signature.output_specs, strict=True):  # type: ignore[arg-type]
                        spec.arg.name = getattr(value, "name", spec.arg.name)


def _tensor(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _same(one: Node, other: Node) -> bool:
    return _form(one) == _form(other)


def _form(node: Node) -> Any:
    value = node.meta["val"]
    return value.dtype, str(list(value.shape)), str(list(value.stride()))


def _ancestors(node: Node) -> set[Node]:
    found, pending = {node}, [node]
    while pending and len(found) < 30:
        new = [each for each in pending.pop().all_input_nodes if each not in found]
        found.update(new)
        pending += new
    return found


def _exchange(m: _Mutant) -> None:
    """Take another value of the same form as operand."""
    users = [node for node in m.calls() if not is_getitem(node)]
    if not users:
        return
    user = m.r.choice(users)
    if not user.all_input_nodes:
        return
    operand = m.r.choice(user.all_input_nodes)
    if _tensor(operand) is None:
        return
    others = [one for one in m.values() if one is not operand and one < user and _same(one, operand)]
    if others:
        user.replace_input_with(operand, m.r.choice(others[-6:]))


def _insert(m: _Mutant) -> None:
    """Insert a chain of views and copies that comes back to the same form."""
    node = m.r.choice(m.values())
    value = _tensor(node)
    if value is None or not all(isinstance(size, int) for size in value.shape) or not value.is_contiguous():
        return
    r, shape, current = m.r, list(value.shape), node
    for _ in range(r.choice([1, 1, 2, 3])):
        rank = len(shape)
        kind = r.choice(["flat", "permute", "clone", "scale", "slice", "expand", "unsqueeze", "cast", "flip", "add"])
        if kind == "flat":
            current = m.add(current, "aten.view_copy.default", current, r.choice([[-1], [1, *shape], [*shape, 1]]))
            current = m.add(current, "aten.view_copy.default", current, shape)
        elif kind == "permute" and rank:
            order = r.sample(range(rank), rank)
            back = [order.index(dim) for dim in range(rank)]
            again = order if r.random() < 0.3 and [shape[order[dim]] for dim in order] == shape else back
            current = m.add(current, "aten.permute_copy.default", current, order)
            current = m.add(current, "aten.permute_copy.default", current, again)
        elif kind == "clone":
            current = m.add(current, "dim_order_ops._clone_dim_order.default", current, dim_order=list(range(rank)))
        elif kind == "scale" and value.is_floating_point():
            current = m.add(current, "aten.mul.Scalar", current, r.choice([1, 1.0, -1.0, 0.0, 0.5]))
        elif kind == "add" and value.is_floating_point():
            current = m.add(current, "aten.add.Scalar", current, r.choice([0, 0.0, -0.0, 1]))
        elif kind == "slice" and rank:
            current = m.add(
                current, "aten.slice_copy.Tensor", current, r.randrange(rank), 0, r.choice([shape[0], 1 << 62])
            )
            if list(current.meta["val"].shape) != shape:
                return
        elif kind == "expand":
            current = m.add(current, "aten.expand_copy.default", current, shape)
        elif kind == "unsqueeze":
            current = m.add(current, "aten.unsqueeze_copy.default", current, r.randint(0, rank))
            current = m.add(current, "aten.view_copy.default", current, shape)
        elif kind == "cast":
            through = r.choice([torch.float32, torch.float16, torch.float64])
            options = {"dim_order": list(range(rank))}
            current = m.add(current, "dim_order_ops._to_dim_order_copy.default", current, dtype=through, **options)
            current = m.add(current, "dim_order_ops._to_dim_order_copy.default", current, dtype=value.dtype, **options)
        elif kind == "flip" and rank:
            current = m.add(current, "aten.flip.default", current, [r.randrange(rank)])
    if current is not node:
        m.give(node, current)


def _duplicate(m: _Mutant) -> None:
    """Compute something a second time, exactly or almost."""
    nodes = [node for node in m.calls() if not is_getitem(node)]
    if not nodes:
        return
    node = m.r.choice(nodes)
    with m.graph.inserting_after(node):
        copied = m.graph.node_copy(node)
    copied.meta = dict(node.meta)
    users = list(node.users)
    if users:
        chosen = m.r.choice(users)
        if chosen.op != "output":
            chosen.replace_input_with(node, copied)


def _renumber(m: _Mutant) -> None:
    """Replace a number among the arguments."""
    nodes = [node for node in m.calls() if any(type(one) is float or type(one) is bool for one in node.args)]
    scalars = m.calls(
        "aten.eq.Scalar", "aten.mul.Scalar", "aten.add.Scalar", "aten.full_like.default", "aten.full.default"
    )
    nodes = [
        node
        for node in nodes + scalars
        if operator_name(node) not in ("aten.any.dim", "aten.mean.dim", "aten._softmax.default")
    ]
    if not nodes:
        return
    node = m.r.choice(nodes)
    places = [place for place, one in enumerate(node.args) if type(one) is float]
    if places and operator_name(node) not in ("aten.native_layer_norm.default", "aten.native_group_norm.default"):
        number = m.r.choice([-INF, INF, 0.0, -0.0, 1.0, float("nan"), -3.4028234663852886e38, 1e-30, 2.0])
        node.update_arg(m.r.choice(places), number)


_SWAPS = {
    "aten.add.Tensor": ("aten.sub.Tensor", "aten.mul.Tensor", "aten.maximum.default"),
    "aten.mul.Tensor": ("aten.add.Tensor", "aten.div.Tensor", "aten.minimum.default"),
    "aten.eq.Scalar": ("aten.ne.Scalar", "aten.le.Scalar", "aten.lt.Scalar"),
    "aten.tanh.default": ("aten.exp.default", "aten.sigmoid.default", "aten.relu.default"),
    "aten.logical_and.default": ("aten.logical_or.default",),
    "aten.logical_or.default": ("aten.logical_and.default",),
    "aten.le.Tensor": ("aten.lt.Tensor", "aten.gt.Tensor", "aten.ge.Tensor"),
    "aten.any.dim": ("aten.all.dim",),
}


def _swap(m: _Mutant) -> None:
    """Call another operator."""
    nodes = m.calls(*_SWAPS)
    if nodes:
        node = m.r.choice(nodes)
        if len(node.args) == 2 or operator_name(node) in ("aten.tanh.default", "aten.any.dim"):
            node.target = edge_operator(m.r.choice(_SWAPS[operator_name(node)]))


def _return(m: _Mutant) -> None:
    """Return one more value."""
    values = m.calls()
    if not values:
        return
    node = m.r.choice(values)
    output = m.graph.output_node()
    if _tensor(node) is not None and node not in output.args[0]:  # type: ignore[operator]
        output.args = ((*output.args[0], node),)  # type: ignore[misc]
        m.program.graph_signature.output_specs.append(
            OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None)
        )


_CHANGES: Sequence[Callable[[_Mutant], None]] = (
    *(_exchange,) * 4,
    *(_insert,) * 4,
    *(_duplicate,) * 2,
    *(_renumber,) * 2,
    *(_swap, _swap, _return),
)
