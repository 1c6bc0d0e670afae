"""A call that does not run is replaced by a fragment, a traced graph that computes the same; it is inlined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

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
from exir_lowering.steps.legalizing.faults import find_fault
from exir_lowering.steps.legalizing.kernels import refuse
from exir_lowering.steps.legalizing.registry import in_dtype
from exir_lowering.steps.legalizing.rules import RULES

_OWN = frozenset({"val", "tensor_meta", graphs.DELEGATION_TAG})  # keys of node.meta that describe one node only
_DEPTH = 4  # how often what a fragment consists of is replaced again
UNCHECKED = EdgeCompileConfig(_check_ir_validity=False)
_WIDER = (
    ((torch.float16, torch.bfloat16), torch.float32),
    ((torch.uint8, torch.int8, torch.int16, torch.int32), torch.int64),  # equal modulo the width of the narrow type
)


class Failed(Exception):
    """No fragment is known that runs; its text is a clause about the last one that was tried."""


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
        key = node if known is None else (known, depth == 0)
        if key not in self._known:
            try:
                self._known[key] = self._make(node, depth)
            except Failed as failed:
                self._known[key] = failed
        made = self._known[key]
        if isinstance(made, Failed):
            raise made
        return made

    def _make(self, node: Node, depth: int) -> GraphModule:
        if depth == _DEPTH:
            raise Failed("what would replace it consists of such operators again")
        if draws_numbers(node.target):
            raise Failed("other operators would draw other random numbers")
        why = ""
        for function in _candidates(node):
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
        wanted = list(tensors(node.meta["val"]))
        if any(known_size(size) is None for value in wanted for size in value.shape):
            raise Failed("the size of its result depends on data")
        free, values = self.relaid and depth == 0, [operand.meta["val"] for operand in node.all_input_nodes]

        def compute(*values: Any) -> tuple[Any, ...]:
            made = calling(node, function)(*values)
            if made[0] is NotImplemented:
                raise Failed("its rule does not cover these arguments")
            return tuple(_laid_out(one, like, values, free) for one, like in zip(made, wanted, strict=True))

        before = decided(self.mode.shape_env)
        try:
            graph_module = trace(compute, values, self.mode, UNCHECKED)
        finally:
            narrowed = undecide(self.mode.shape_env, before)
        if narrowed:
            raise Failed("its decomposition would hold for some sizes only")
        _check(graph_module, wanted)
        for inner in list(graph_module.graph.nodes):
            if inner.op == "call_function" and runs_not(inner, self.target) is not None:
                if inner.target is node.target and _read_types(inner) == _read_types(node):
                    raise Failed("its decomposition consists of itself")
                inline(inner, self.find(inner, depth + 1), attributes_of(graph_module, inner))
        graph_module.graph.eliminate_dead_code()
        return graph_module


def runs_not(node: Node, target: Target) -> str | None:
    """Return why a call does not run, or not right, on the host; None if nothing is known against it."""
    if not graphs.is_operator(node):
        return None
    why = refuse(node, target)
    if why is None and (fault := find_fault(node)) is not None:
        why = fault.says
    return why


def _candidates(node: Node) -> Iterator[Callable[..., Any]]:
    """Yield functions that compute what a call does, the best first."""
    results = list(tensors(node.meta["val"]))
    if all(0 in [n for n in value.shape if type(n) is int] and not value.is_complex() for value in results):
        yield lambda *_, **__: [torch.zeros(value.shape, dtype=value.dtype) for value in results]
    fault = find_fault(node)
    if fault is not None:
        yield fault.cure(node)
    rule = RULES.get(graphs.operator_name(node))
    if rule is not None:
        yield rule
    decomposition = own_decomposition(node.target)
    if decomposition is not None:
        yield decomposition
    read = set(_read_types(node))
    for narrow, wide in _WIDER:
        if read.intersection(narrow):
            yield in_dtype(wrapped_operator(node.target), narrow, wide, node)


def calling(node: Node, function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Return a function of a call's operands that gives another function its arguments, and returns a tuple."""

    def compute(*values: Any) -> tuple[Any, ...]:
        given = dict(zip(node.all_input_nodes, values, strict=True))
        args, kwargs = map_arg((node.args, dict(node.kwargs)), given.__getitem__)
        made = function(*args, **kwargs)
        return tuple(made) if isinstance(made, (list, tuple)) else (made,)

    return compute


def _laid_out(value: torch.Tensor, like: torch.Tensor, given: Any, free: bool) -> torch.Tensor:
    """Return a value with its elements in the order of another one's if a kernel makes that; an input is copied."""
    order = dim_order(like)
    if dim_order(value) != order:
        formats = {(0, 2, 3, 1): torch.channels_last, tuple(range(value.dim())): torch.contiguous_format}
        if order not in formats:
            if free:
                return value.contiguous()
            raise Failed("its result lies in memory in an order that no kernel makes")
        return value.clone(memory_format=formats[order])
    return value.clone() if any(value is one for one in given) else value


def _check(graph_module: GraphModule, wanted: list[torch.Tensor]) -> None:
    """Check that a fragment makes what the call did."""
    made = [one.meta["val"] for one in _results(graph_module)]
    for value, like in zip(made, wanted, strict=True):
        if value.dtype is not like.dtype or not measures.same_sizes(value.shape, like.shape):
            raise Failed(f"its decomposition makes {value.dtype} {list(value.shape)}")


def _results(fragment: GraphModule) -> Sequence[Node]:
    results: Any = fragment.graph.output_node().args[0]
    return cast(Sequence[Node], results)


def _read_types(node: Node) -> list[torch.dtype]:
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
    results = [env[one] for one in _results(fragment)]
    if isinstance(node.meta["val"], (list, tuple)):
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
    else:
        node.replace_all_uses_with(results[0])
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
