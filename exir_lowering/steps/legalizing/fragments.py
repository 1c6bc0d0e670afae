"""A call that does not run is replaced by a fragment, a traced graph that computes the same; it is inlined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from exir_lowering import graphs
from exir_lowering._upstream.fakes import FakeTensorMode, decided, dim_order, known_size, undecide
from exir_lowering._upstream.legalizing import own_decomposition, trace
from exir_lowering._upstream.operators import draws_numbers, wrapped_operator
from exir_lowering._upstream.value_keys import call_key, renew
from exir_lowering.graphs import measures
from exir_lowering.graphs.measures import tensors
from exir_lowering.pte.releases import Target
from exir_lowering.steps.legalizing import complex_numbers, elements, linear, order, special, windows  # noqa: F401  each adds its rules
from exir_lowering.steps.legalizing.faults import find_fault
from exir_lowering.steps.legalizing.kernels import refuse
from exir_lowering.steps.legalizing.registry import HALF, RULES, WHOLE, Failed, in_dtype, require

_OWN = frozenset({"val", "tensor_meta", graphs.DELEGATION_TAG})  # keys of node.meta that describe one node only
_DEPTH = 4  # how often what a fragment consists of is replaced again
UNCHECKED = EdgeCompileConfig(_check_ir_validity=False)


@dataclass
class Fragments:
    """The fragments of one method, each traced once for equal calls."""

    mode: FakeTensorMode
    target: Target
    relaid: bool = False  # whether results may lie in memory in another order, which is up to the caller then
    _known: dict[Any, GraphModule | Failed] = field(default_factory=dict)

    def find(self, node: Node, depth: int = 0) -> GraphModule:
        """Return a graph that computes what a call does, and runs; Failed if there is none."""
        known = call_key(node)
        key = node if known is None else (known, depth == 0, frozenset(_read_results(node)))
        if key not in self._known:
            try:
                self._known[key] = self._make(node, depth)
            except Failed as failed:
                self._known[key] = failed
        if isinstance(made := self._known[key], Failed):
            raise made
        return made

    def _make(self, node: Node, depth: int) -> GraphModule:
        if depth == _DEPTH:
            raise Failed("what would replace it consists of such operators again")
        why, functions = "", _candidates(node)
        if draws_numbers(node.target):
            why = "other operators would draw other random numbers"
            functions = filter(None, [RULES.get(graphs.operator_name(node))])  # for arguments with which none are drawn
        for function in functions:
            try:
                return self._try(node, function, depth)
            except Failed as failed:
                why = str(failed)
            except MemoryError:
                raise
            except Exception as error:  # of a decomposition, for these arguments
                why = f"its decomposition failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise Failed(why)

    def _try(self, node: Node, function: Callable[..., Any], depth: int) -> GraphModule:
        wanted, read = list(tensors(node.meta["val"])), _read_results(node)
        if any(known_size(size) is None for value in wanted for size in value.shape):
            raise Failed("the size of its result depends on data")
        free, values = self.relaid and depth == 0, [operand.meta["val"] for operand in node.all_input_nodes]

        def compute(*values: Any) -> tuple[Any, ...]:
            made = list(calling(node, function)(*values))
            for number, (value, like) in enumerate(zip(made, wanted, strict=True)):
                if value is None:
                    require(number not in read)
                    made[number] = torch.zeros(like.shape, dtype=like.dtype)
                else:
                    made[number] = _as(like, value, values, free)
            return tuple(made)

        before = decided(self.mode.shape_env)
        try:
            fragment = trace(compute, values, self.mode, UNCHECKED)
        finally:
            narrowed = undecide(self.mode.shape_env, before)
        if narrowed:
            raise Failed("its decomposition would hold for some sizes only")
        results: Any = fragment.graph.output_node().args[0]
        for value, like in zip([one.meta["val"] for one in results], wanted, strict=True):
            if value.dtype is not like.dtype or not measures.same_sizes(value.shape, like.shape):
                raise Failed(f"its decomposition makes {value.dtype} {list(value.shape)}")
        for inner in list(fragment.graph.nodes):
            if inner.op == "call_function" and runs_not(inner, self.target) is not None:
                if inner.target is node.target and _types(inner) == _types(node):
                    raise Failed("its decomposition consists of itself")
                inline(inner, self.find(inner, depth + 1), attributes_of(fragment, inner))
        fragment.graph.eliminate_dead_code()
        return fragment


def runs_not(node: Node, target: Target) -> str | None:
    """Return why a call does not run, or not right, on the host; None if nothing is known against it."""
    if not graphs.is_operator(node):
        return None
    return refuse(node, target) or (fault.says if (fault := find_fault(node)) is not None else None)


def _candidates(node: Node) -> Iterator[Callable[..., Any]]:
    """Yield functions that compute what a call does, the best first."""
    results = list(tensors(node.meta["val"]))
    if all(0 in [n for n in value.shape if type(n) is int] and not value.is_complex() for value in results):
        yield lambda *_, **__: [torch.zeros(value.shape, dtype=value.dtype) for value in results]
    fault, operator = find_fault(node), wrapped_operator(node.target)
    if fault is not None and (fault.cure is not None or fault.wide):
        cure = fault.cure or operator
        yield in_dtype(cure, HALF, torch.float32) if fault.wide else cure
    if (rule := RULES.get(graphs.operator_name(node))) is not None:
        yield rule
    if (decomposition := own_decomposition(node.target)) is not None:
        yield decomposition
    for narrow, wide in ((HALF, torch.float32), (WHOLE, torch.int64)):  # integers: equal modulo the narrow type's width
        if not {*narrow}.isdisjoint(_types(node)):
            yield in_dtype(operator, narrow, wide)


def calling(node: Node, function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Return a function of a call's operands that gives another function its arguments, and returns a tuple."""

    def compute(*values: Any) -> tuple[Any, ...]:
        given = dict(zip(node.all_input_nodes, values, strict=True))
        args, kwargs = map_arg((node.args, dict(node.kwargs)), given.__getitem__)
        made = function(*args, **kwargs)
        require(made is not NotImplemented)
        return tuple(made) if isinstance(made, (list, tuple)) else (made,)

    return compute


def _as(like: torch.Tensor, value: torch.Tensor, given: Any, free: bool) -> torch.Tensor:
    """Return a value in a type of the same kind and an order in memory that kernels make; an input is copied."""
    integers = {value.dtype, like.dtype} <= {*WHOLE, torch.int64}
    if integers or (value.is_floating_point() and like.is_floating_point()):
        value = value.to(like.dtype)
    layout = dim_order(like)
    if dim_order(value) == layout:
        return value.clone() if any(value is one for one in given) else value
    formats = {(0, 2, 3, 1): torch.channels_last, tuple(range(value.dim())): torch.contiguous_format}
    if layout in formats:
        return value.clone(memory_format=formats[layout])
    if not free:
        raise Failed("its result lies in memory in an order that no kernel makes")
    return value.contiguous()


def _read_results(node: Node) -> set[Any]:
    """Return the numbers of the results of a call that something reads."""
    if not isinstance(node.meta["val"], (list, tuple)):
        return {0}
    return {user.args[1] for user in node.users if user.users}


def _types(node: Node) -> list[torch.dtype]:
    return [value.dtype for value in tensors([operand.meta.get("val") for operand in node.all_input_nodes])]


Constants = Callable[[torch.Tensor], Node]
"""Gives a graph a constant, before the node that is replaced."""


def inline(node: Node, fragment: GraphModule, constant: Constants) -> list[Node]:
    """Put a fragment in the place of a call, which is not used any more then; return the nodes that were added."""
    made: list[Node] = []
    env = dict(zip(fragment.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    inherited = {key: value for key, value in node.meta.items() if key not in _OWN}
    for inner in fragment.graph.nodes:
        if inner.op == "get_attr":
            env[inner] = constant(graphs.attribute(fragment, str(inner.target)))
        elif inner.op == "call_function":
            with node.graph.inserting_before(node):
                env[inner] = node.graph.node_copy(inner, env.__getitem__)
            env[inner].meta = {**inherited, "val": renew(inner.meta["val"], None)}
            made.append(env[inner])
    results: Any = fragment.graph.output_node().args[0]
    if isinstance(node.meta["val"], (list, tuple)):
        for user in list(node.users):
            user.replace_all_uses_with(env[results[user.args[1]]])
    else:
        node.replace_all_uses_with(env[results[0]])
    return made


def attributes_of(root: GraphModule, node: Node) -> Constants:
    """Return what keeps constants as attributes of a graph module, for a node of it."""

    def constant(tensor: torch.Tensor) -> Node:
        number = 0
        while hasattr(root, name := f"_fragment_constant{number}"):
            number += 1
        root.register_buffer(name, tensor)
        with node.graph.inserting_before(node):
            made = node.graph.get_attr(name)
        made.meta["val"] = tensor
        return made

    return constant
