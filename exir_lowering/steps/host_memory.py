"""Values on the host whose memory ExecuTorch's runtime would read wrongly.

Memory order: most kernels take their operands' memory as contiguous, and so do views. So the host computes in
contiguous order. Values keep theirs where operators treat each element alone, and get it back where something was
compiled for it: delegates, branches, and the method's results.

What branches return: the runtime points the value of `cond` at the memory of what a branch returns, which nothing else
may use (see the planning of memory): so a branch returns a copy of what it is given, or returns twice; and so does a
method whose results have no memory, since its caller provides it. ExecuTorch declares the rows that `map` and `scan`
return as dynamic while it emits them, but not views of them, and fails.

What ExecuTorch's emitter does not take gets another form when nothing is traced again. It emits comparisons of sizes,
but not how they are joined; False is less than True, so `a and b` is `a > not b`. Maps over several tensors, or to
several: it emits those as a scan that carries nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.fx.node import map_arg

from exir_lowering import graphs
from exir_lowering._upstream.edge import CLONE, CLONE_IN_ORDER, TRUTHS, VIEWS
from exir_lowering._upstream.fakes import magnitude, size_hint
from exir_lowering._upstream.operators import wrapped_operator
from exir_lowering._upstream.programs import fake_mode_of, pytree
from exir_lowering._upstream.value_keys import evaluate
from exir_lowering.errors import InputError
from exir_lowering.graphs import measures
from exir_lowering.graphs.inlining import insert_call

_COND = torch.ops.higher_order.cond
_MAP, _SCAN = torch.ops.higher_order.map_impl, torch.ops.higher_order.scan
_STACKING, _RETURNING = (_MAP, _SCAN), (_COND, _SCAN, torch.ops.higher_order.while_loop)
_CHANNELS_LAST = [0, 2, 3, 1]  # the one order beside the contiguous one that ExecuTorch's operators can make

_MAKES_SIZES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def check_inputs(method: str, program: ExportedProgram) -> None:
    """Refuse inputs that are neither contiguous nor channels last: the runtime takes no others, in whatever order."""
    for node in odd_inputs(program):
        shape, strides = node.meta["val"].shape, node.meta["val"].stride()
        raise InputError(
            f"Method {method!r} was exported with an example input {node.name!r} of shape {[*shape]} and strides "
            f"{[*strides]}. ExecuTorch's runtime takes contiguous inputs and, of 4 or 5 dimensions, those in channels "
            "last. Export the model with contiguous() ones."
        )


def make_inputs_contiguous(program: ExportedProgram) -> None:
    """Describe the odd inputs of a private copy as contiguous ones, and what is computed of them."""
    odd, mode = set(odd_inputs(program)), fake_mode_of(program.graph_module)
    if not odd or mode is None:
        return
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node in odd:
            with mode, torch.no_grad():
                node.meta["val"] = value.new_empty(value.shape).requires_grad_(value.requires_grad)
        elif node.op == "call_function" and not odd.isdisjoint(node.all_input_nodes):
            # A value is known from those of its operands if the node calls no graph, and no data decide it.
            decided = _MAKES_SIZES & set(getattr(node.target, "tags", ()))
            if not decided and all("val" in operand.meta for operand in node.all_input_nodes):
                values = (node, node.target, lambda operand: operand.meta["val"], mode)
                node.meta["val"] = evaluate(*values, gradients=True)
                odd.add(node)


def odd_inputs(program: ExportedProgram) -> Iterator[Node]:
    """Yield the inputs whose example was transposed or expanded."""
    given = set(program.graph_signature.user_inputs)
    for node in program.graph.find_nodes(op="placeholder"):
        value: Any = node.meta.get("val") if node.name in given else None
        if not isinstance(value, torch.Tensor):
            continue
        order = _order(value)
        placed = [dim for dim in order if size_hint(value.shape[dim]) != 1]  # the others may lie anywhere
        last = [dim for dim in (0, 2, 3, 4, 1) if dim in placed and len(order) in (4, 5)]
        if placed not in (sorted(placed), last) or 0 in map(size_hint, value.stride()):
            yield node


def copy_where_misread(program: ExportedProgram, *, planned_results: bool = True) -> None:
    """Let a private copy read, and return, copies where the runtime would misread values."""
    for _, module in graphs.walk(program.graph_module):
        for node in module.graph.nodes:
            for nested in graphs.nested_graphs(module, node) if node.target in _RETURNING else ():
                _copy_returned(nested.module, lambda value: value.op != "call_function" or graphs.is_mutating(value))
            for nested in graphs.nested_graphs(module, node) if node.target in _STACKING else ():
                _return_rows(nested.module)
        _copy_viewed(module)
        if any(map(_has_other_order, module.graph.nodes)):
            _Contiguous(module).run()
    if not planned_results:
        _copy_returned(program.graph_module, lambda value: _call(value).target is _COND)


def _copy_returned(module: GraphModule, has_other_memory: Callable[[Node], bool]) -> None:
    """Let a graph return copies of values that have the memory of others, or that it returns twice."""
    output, seen = module.graph.output_node(), set[Node]()

    def own(value: Node) -> Node:
        if value in seen or has_other_memory(value):
            value = _copy(value, output, CLONE, value.meta["val"])
        seen.add(value)
        return value

    output.args = map_arg(output.args, own)


def _return_rows(module: GraphModule) -> None:
    """Let a graph return contiguous values: the kernel that stacks them copies their memory as it is."""
    output, mode = module.graph.output_node(), fake_mode_of(module)

    def in_order(value: Node) -> Node:
        if not _has_other_order(value):
            return value
        with mode:  # type: ignore[union-attr]
            contiguous = value.meta["val"].contiguous()
        return _copy(value, output, CLONE_IN_ORDER, contiguous, dim_order=[*range(contiguous.dim())])

    output.args = map_arg(output.args, in_order)


def _copy_viewed(module: GraphModule) -> None:
    copies: dict[Node, Node] = {}
    for node in list(module.graph.nodes):
        base = node.args[0] if node.target in VIEWS else None
        if isinstance(base, Node) and (call := _call(base)).target is not _COND and graphs.calls_graphs(module, call):
            if base not in copies:
                copies[base] = _copy(base, node, CLONE, base.meta["val"])
            node.update_arg(0, copies[base])


def _call(value: Node) -> Node:
    call = value.args[0] if graphs.is_getitem(value) else value
    return call if isinstance(call, Node) else value


class _Contiguous:
    """A graph whose host is made to compute in contiguous order."""

    def __init__(self, module: GraphModule) -> None:
        self._module = module
        self._mode: Any = fake_mode_of(module)
        self._given: dict[Node, Any] = {}
        """What the values were that have another order now."""
        self._copies: dict[tuple[Node, tuple[int, ...]], Node] = {}

    def run(self) -> None:
        """Change the graph."""
        for node in list(self._module.graph.nodes):
            if node.op == "output" or (node.op == "call_function" and not self._is_computed(node)):
                for operand in list(node.all_input_nodes):
                    if operand in self._given:
                        order = _order(self._given[operand])
                        if order in (_CHANNELS_LAST, sorted(order)):
                            node.replace_input_with(operand, self._in_order(operand, node, order))
                    elif _writes_rows(operand):
                        node.replace_input_with(operand, self._in_order(operand, node, [0, 1]))
            elif graphs.is_getitem(node):
                self._set(node, node.args[0].meta["val"][node.args[1]])
            elif node.op == "call_function" and [*measures.tensors(node.meta.get("val"))]:
                self._compute(node)

    def _is_computed(self, node: Node) -> bool:
        """Return whether a kernel of ExecuTorch's computes a node, or it is a result of one."""
        if graphs.is_getitem(node):
            return isinstance(node.args[0], Node) and self._is_computed(node.args[0])
        known = graphs.operator_name(node).startswith(("aten.", "dim_order_ops.", "quantized_decomposed."))
        by_memory = graphs.is_mutating(node) or graphs.operator_name(node) == "aten.as_strided_copy.default"
        return known and not by_memory and not graphs.calls_graphs(self._module, node)

    def _compute(self, node: Node) -> None:
        changed = any(operand in self._given for operand in node.all_input_nodes)
        requested: Any = node.kwargs.get("dim_order")
        if requested is not None and requested != _order(node.meta["val"]):
            # Channels last with one channel: ExecuTorch plans another order, which its kernel refuses.
            node.update_kwarg("dim_order", sorted(requested))
            changed = True
        if not _is_elementwise(node):
            for operand in filter(_has_other_order, list(node.all_input_nodes)):
                contiguous = list(range(operand.meta["val"].dim()))
                node.replace_input_with(operand, self._in_order(operand, node, contiguous))
                changed = True
        if not changed:
            return
        made = _MAKES_SIZES & set(wrapped_operator(node.target).tags)  # computed again, it makes other symbols
        if made or (requested is None and any(map(has_free_unbacked_symbols, measures.tensors(node.meta["val"])))):
            self._set(node, pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, node.meta["val"]))
            return
        args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
        with self._mode:
            self._set(node, node.target(*args, **kwargs))  # type: ignore[operator]

    def _set(self, node: Node, value: Any) -> None:
        if list(map(_order, measures.tensors(value))) != list(map(_order, measures.tensors(node.meta["val"]))):
            self._given[node] = node.meta["val"]
            node.meta["val"] = value

    def _in_order(self, operand: Node, before: Node, order: list[int]) -> Node:
        """Return a copy of a value in another order, which is made once."""
        key = operand, tuple(order)
        if key not in self._copies:
            with self._mode:
                value = CLONE_IN_ORDER(operand.meta["val"], dim_order=order)
            self._copies[key] = _copy(operand, before, CLONE_IN_ORDER, value, dim_order=order)
        return self._copies[key]


def _copy(base: Node, before: Node, operator: Any, value: Any, **options: Any) -> Node:
    return insert_call(before, operator, (base,), options, meta={**before.meta, "val": value})


def _is_elementwise(node: Node) -> bool:
    """Return whether a kernel takes any order: it treats each element alone, and all values have the same one."""
    operator = wrapped_operator(node.target)
    if operator.namespace == "dim_order_ops":
        return True
    if any(_writes_rows(operand) for operand in node.all_input_nodes):
        return False
    values = [*measures.tensors([operand.meta.get("val") for operand in node.all_input_nodes])]
    alike = all(
        _order(value) == _order(values[0]) and measures.same_sizes(value.shape, values[0].shape) for value in values
    )
    return alike and torch.Tag.pointwise in operator.tags


def _writes_rows(node: Node) -> bool:
    return graphs.operator_name(node) == "aten.nonzero.default"


def _has_other_order(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and _order(value) != sorted(_order(value))


def _order(value: torch.Tensor) -> list[int]:
    """Return the order that ExecuTorch gives a value: dimensions of equal strides as they come."""
    strides = [magnitude(stride) for stride in value.stride()]
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def make_emittable(out_variants: Callable[[GraphModule], Any]) -> Callable[[GraphModule], Any]:
    """Let ExecuTorch's pass find what its emitter takes; rows of `nonzero` are planned as its kernel writes them."""

    def run(module: GraphModule) -> Any:
        for _, node in [*graphs.every_node(module)]:
            node.meta.setdefault("tensor_meta", None)  # a copy to a device takes it from its operand, and needs it here
            if _writes_rows(node):
                spec = node.meta["spec"]
                spec.stride, spec.dim_order = (spec.shape[1], 1), (0, 1)
            elif isinstance(node.meta.get("val"), (bool, torch.SymBool)):
                _join(node)
            elif node.target is _MAP and max(len(node.args[1]), len(node.meta["val"])) > 1:  # type: ignore[arg-type]
                node.target, node.args = _SCAN, (node.args[0], [], *node.args[1:])
        return out_variants(module)

    return run


def _join(node: Node) -> None:
    joined = {operator.and_: "gt", operator.or_: "ge"}.get(node.target)  # type: ignore[arg-type]
    if joined is not None:
        one, other = node.args
        opposite = insert_call(node, TRUTHS["sym_not"], (other,), meta=dict(node.meta))
        node.target, node.args = TRUTHS[joined], (one, opposite)
    elif node.target in (operator.ne, operator.xor):
        equal = insert_call(node, TRUTHS["eq"], node.args, meta=dict(node.meta))
        node.target, node.args = TRUTHS["sym_not"], (equal,)
