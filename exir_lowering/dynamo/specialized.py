"""Graphs with symbolic sizes, for backends that need to know them: compiled for each set of sizes when it occurs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node, map_arg
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from exir_lowering import graphs
from exir_lowering._upstream import locks
from exir_lowering._upstream.fakes import FakeTensor, FakeTensorMode, size_hint
from exir_lowering._upstream.likeness import SYMBOLS
from exir_lowering._upstream.trees import pytree
from exir_lowering.dynamo.compiled import Boxed
from exir_lowering.graphs import measures

MOST = 16
"""For how many sets of sizes a graph is kept; the one that was not used for the longest time goes."""


class Specialized:
    """A function that is compiled for the sizes of the inputs that it gets."""

    def __init__(
        self,
        module: GraphModule,
        compile_for: Callable[[Sequence[Any], bool], Boxed],  # the second argument: whether it is the first time
        weights: Mapping[int, torch.Tensor],  # by the numbers of the inputs
    ) -> None:
        self._compile = compile_for
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._symbolic = [position for position, node in enumerate(placeholders) if _is_symbolic(node.meta.get("val"))]
        self._known: OrderedDict[tuple[Any, ...], Boxed] = OrderedDict()
        self._lock = threading.RLock()
        # Compiled for the sizes with which the graph was traced at once, what cannot be compiled shows now.
        traced = [weights.get(number, _example(node.meta.get("val"))) for number, node in enumerate(placeholders)]
        self._add(self._key(traced), traced)

    def __call__(self, args: list[Any]) -> Any:
        """Execute the graph, compiled for the sizes of these inputs."""
        key = self._key(args)
        function = self._known.get(key)
        if function is None:
            return self._add(key, args)(args)
        with suppress(KeyError):  # another thread may have let it go
            self._known.move_to_end(key)
        return function(args)

    def _key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(_sizes(args[position]) for position in self._symbolic)

    def _add(self, key: tuple[Any, ...], args: Sequence[Any]) -> Boxed:
        with self._lock:
            if key not in self._known:
                self._known[key] = self._compile(args, not self._known)
            self._known.move_to_end(key)
            while len(self._known) > MOST:
                self._known.popitem(last=False)
            return self._known[key]


def specialize(module: GraphModule, args: Sequence[Any]) -> GraphModule:
    """Return a graph with the sizes of some inputs; numbers have placeholders too, and are constants in it."""
    # Without nested graphs, it is made without torch's tracer: while that runs, torch lets no other thread call a
    # compiled function.
    if any(isinstance(inner, GraphModule) for inner in module.children()):
        with locks.conversion(), torch.no_grad(), preserve_node_meta():
            args = [value.detach() if isinstance(value, torch.Tensor) else value for value in args]
            traced: GraphModule = make_fx(Interpreter(module).run, tracing_mode="fake")(*args)
        return traced
    with torch.no_grad():
        return _Specializer(module).run(args)


class _Specializer:
    """Copies a graph, with the values that its nodes have for the sizes of some inputs."""

    def __init__(self, module: GraphModule) -> None:
        self._module, self._mode, self._graph = module, FakeTensorMode(), Graph()
        self._values: dict[Node, Any] = {}
        self._copies: dict[Node, Any] = {}

    def run(self, args: Sequence[Any]) -> GraphModule:
        inputs = iter(args)
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                given = next(inputs)
                self._add(node, self._fake(given))
                if not isinstance(given, torch.Tensor):
                    self._copies[node] = given
            elif node.op == "get_attr":
                self._add(node, self._fake(graphs.attribute(self._module, str(node.target))))
            elif node.op == "output":
                self._graph.output(map_arg(node.args[0], self._copies.__getitem__))
            else:
                self._call(node)
        return GraphModule(self._module, self._graph)

    def _fake(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        return self._mode.from_tensor(value.detach())

    def _add(self, node: Node, value: Any) -> None:
        self._values[node] = value
        copied = self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)
        copied.meta["val"] = value

    def _call(self, node: Node) -> None:
        """Copy a call, unless what it returns is a number now."""
        args, kwargs = map_arg((node.args, node.kwargs), self._values.__getitem__)
        with self._mode:
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        value = pytree.tree_map(self._fake, value)  # the state of a random generator is none
        made = any(True for _ in measures.tensors(value))
        if made or (value is None and any(isinstance(self._copies[operand], Node) for operand in node.all_input_nodes)):
            self._add(node, value)
        else:
            self._values[node] = self._copies[node] = value


def has_symbolic_sizes(module: GraphModule) -> bool:
    """Return whether a graph takes values whose sizes are not known."""
    return any(_is_symbolic(node.meta.get("val")) for node in module.graph.nodes if node.op == "placeholder")


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not all(isinstance(size, int) for size in (*value.shape, *value.stride()))
    return isinstance(value, SYMBOLS)


def _example(value: Any) -> Any:
    """Return a value of the sizes with which a graph was traced; what is in it does not matter."""
    if isinstance(value, torch.Tensor):
        sizes, strides = ([size_hint(number) for number in numbers] for numbers in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype)
    return size_hint(value) if isinstance(value, torch.SymInt) else value


def _sizes(value: Any) -> Any:
    return (tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else value
