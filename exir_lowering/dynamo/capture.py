"""A graph of AOTAutograd as an exported program, which is what the compiler's line takes.

The program computes the *roots*: the values that the graph returns and that are neither inputs, nor numbers, nor views.
Views at the end of a graph stay PyTorch's, as AOTAutograd relies on which outputs share memory, and a delegate's
results share none.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.export import ExportedProgram, ExportGraphSignature
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from exir_lowering import graphs
from exir_lowering._upstream.fakes import Decisions, FakeCopies, FakeTensor, shape_env_of
from exir_lowering._upstream.operators import higher_order_name, returns_view
from exir_lowering._upstream.programs import ATEN_VERIFIER, assemble_program, lazy_graph_module, pytree
from exir_lowering._upstream.tensors import SYMBOLS
from exir_lowering.dynamo.in_pytorch import LOWERED, replace_calls
from exir_lowering.dynamo.logs import NotLowered
from exir_lowering.steps.partition_builder import argument_of

_RESHAPES = ("aten.view.default", "aten._unsafe_view.default")


def is_view(node: Node) -> bool:
    """Return whether a node's value shares memory with an argument, or is one value of such an operator."""
    if node.op != "call_function":
        return False
    if graphs.is_getitem(node):
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    return returns_view(node.target)


def is_same_memory(node: Node) -> bool:
    """Return whether a node is an `as_strided` that changes nothing but the strides of dimensions of one element."""
    # PyTorch's pooling to one pixel ends so, if its input is in channels last.
    if graphs.operator_name(node) != "aten.as_strided.default" or not isinstance(node.args[0], Node):
        return False
    value, source = node.meta.get("val"), node.args[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    strides = [
        pair
        for size, *pair in zip(value.shape, value.stride(), source.stride(), strict=False)
        if not (isinstance(size, int) and size == 1)
    ]
    pairs = [*zip(value.shape, source.shape, strict=False), *strides, (value.storage_offset(), source.storage_offset())]
    # Nothing is decided by symbolic sizes: their formulas have to be the same.
    return value.dim() == source.dim() and all(str(one) == str(other) for one, other in pairs)


def sole_views(results: Sequence[Any]) -> list[Node]:
    """Return the views among results that no other result shares memory with; PyTorch lets nobody write into them."""
    bases: dict[Node, list[Node]] = {}
    for value in dict.fromkeys(value for value in results if isinstance(value, Node)):
        bases.setdefault(base_of(value), []).append(value)
    return [
        found[0] for base, found in bases.items() if found != [base] and len(found) == 1 and base.op != "placeholder"
    ]


def base_of(value: Node) -> Node:
    """Return what a view is a view of, down to what is none; the value itself if it is none."""
    *_, base = _chain(value)
    return base


def last_reshape(view: Node) -> Node | None:
    """Return the last view on the way to a view's base that only changes the shape; None if there is none."""
    views = (node for node in _chain(view) if node.op == "call_function")
    return next((node for node in views if graphs.operator_name(node) in _RESHAPES), None)


def _chain(value: Node) -> Iterator[Node]:
    """Yield a view, and what it is a view of, down to what is none."""
    yield value
    while is_view(value):
        value = value.args[0]  # type: ignore[assignment]
        yield value


_BY_STRIDE = ("aten.as_strided", "aten.set_", "aten.sym_stride", "aten.sym_storage_offset", "aten._reshape_alias")
"""The beginnings of the names of operators that see how a tensor lies in memory, which may be otherwise here."""


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A graph of AOTAutograd, and the program that is lowered for it."""

    name: str  # the method: "forward", also without gradients, or "backward"
    module: GraphModule
    program: ExportedProgram | None  # what is lowered; None if nothing is computed
    inputs: tuple[Node, ...]  # the graph's placeholder for each of the program's user inputs
    baked: Mapping[str, Node]  # the graph's placeholders whose tensors are weights of the program, by their name in it
    roots: tuple[Node, ...]  # the nodes of the graph that the program returns, in its order
    decisions: Decisions | None  # what symbolic sizes decide during the lowering; None if all are known

    def with_weights_as_inputs(self) -> Captured:
        """Return the same graph, whose program takes what was baked in as inputs, before the others."""
        if self.program is None or not self.baked:
            return self
        program = graphs.copy_program(self.program)
        given = list(graphs.placeholders(program).items())
        # Constants, then what was baked in, then inputs.
        given.sort(key=lambda one: 1 if one[1].target in self.baked else 2 * (one[1].kind is InputKind.USER_INPUT))
        baked = [str(spec.target) for _, spec in given if spec.target in self.baked]
        first = next(node for node in program.graph.nodes if node.op != "placeholder")
        for node, _ in given:
            first.prepend(node)
        specs = [
            InputSpec(InputKind.USER_INPUT, spec.arg, None) if spec.target in self.baked else spec for _, spec in given
        ]
        changed = assemble_program(
            graph_module=program.graph_module,
            signature=ExportGraphSignature(specs, program.graph_signature.output_specs),
            state_dict={name: value for name, value in program.state_dict.items() if name not in self.baked},
            constants=program.constants,
            range_constraints=program.range_constraints,
            verifiers=program.verifiers,
        )
        return replace(self, program=changed, inputs=(*map(self.baked.__getitem__, baked), *self.inputs), baked={})


def capture(name: str, module: GraphModule, weights: Mapping[int, torch.Tensor]) -> Captured:
    """Make a graph's program, with weights by number of input; NotLowered if that is not safe."""
    module = replace_calls(module)
    roots = _find_roots(module.graph)
    _check(module, _needed(roots))
    if not roots:
        return Captured(name, module, None, (), {}, (), None)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    builder = _Builder(module, {placeholders[position]: tensor for position, tensor in weights.items()})
    builder.add(roots)
    program, users = builder.program(roots), tuple(builder.users)
    return Captured(name, module, program, users, builder.baked, tuple(roots), builder.decisions)


def results_of(graph: Graph) -> tuple[Any, ...]:
    """Return what a graph returns, flat: nodes, numbers and None."""
    returned = graph.output_node().args[0]
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def is_host_value(node: Node) -> bool:
    """Return whether a value is made after the program, or without it: an input, a view, or a number from sizes."""
    if node.op == "placeholder":
        return True
    return node.op == "call_function" and (is_view(node) or _is_size(node))


def _is_size(node: Node) -> bool:
    """Return whether a value is a symbolic number that is computed from sizes and numbers alone."""
    if not isinstance(node.meta.get("val"), (*SYMBOLS, int, float, bool)):
        return False
    if node.op == "placeholder":
        return True
    if graphs.operator_name(node).startswith(("aten.sym_size", "aten.sym_numel")):
        return all(source.op == "placeholder" for source in node.all_input_nodes)
    return node.op == "call_function" and all(_is_size(source) for source in node.all_input_nodes)


def _find_roots(graph: Graph) -> list[Node]:
    """Return what the program returns; a last reshape of its own is a part of it, as it may end a linear layer."""
    roots: dict[Node, None] = {}
    results = results_of(graph)
    reshapes = {last_reshape(view) for view in sole_views(results)}
    pending = [value for value in results if isinstance(value, Node)]
    seen = set(pending)
    while pending:
        node = pending.pop(0)
        if node in reshapes or not is_host_value(node):
            roots[node] = None
            continue
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                pending.append(source)
    return list(roots)


@dataclass
class _Builder:
    """Builds the program of a graph, with fake tensors and a shape environment of its own."""

    module: GraphModule
    weights: Mapping[Node, torch.Tensor]
    graph: Graph = field(default_factory=Graph)
    env: dict[Node, Node] = field(default_factory=dict)
    root: dict[str, Any] = field(default_factory=dict)
    users: list[Node] = field(default_factory=list)
    baked: dict[str, Node] = field(default_factory=dict)
    specs: list[InputSpec] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    clones: dict[Any, Node] = field(default_factory=dict)
    copies: FakeCopies = field(default_factory=FakeCopies)
    environment: Any = None
    decisions: Decisions | None = None

    def add(self, roots: Sequence[Node]) -> None:
        """Add what the roots are computed from: parameters, buffers, constants, user inputs, then the operators."""
        needed = _needed(roots)
        placeholders = [node for node in self.module.graph.nodes if node.op == "placeholder" and node in needed]
        baked = [node for node in placeholders if node in self.weights]
        for kind in (InputKind.PARAMETER, InputKind.BUFFER):
            for node in baked:
                if (kind is InputKind.PARAMETER) == isinstance(self.weights[node], torch.nn.Parameter):
                    self._bake(node, kind)
        for node in self.module.graph.nodes:
            if node.op == "get_attr" and node in needed:
                self._constant(node)
        for node in placeholders:
            if node not in self.weights:
                self.users.append(node)
                self.specs.append(InputSpec(InputKind.USER_INPUT, _argument(self._placeholder(node)), None))
        for node in self.module.graph.nodes:
            if node in needed and node not in self.env:
                self.env[node] = self._copy(node)

    def program(self, roots: Sequence[Node]) -> ExportedProgram:
        """Return the program that returns the roots."""
        made = [self.env[node] for node in roots]
        self.graph.output(tuple(made)).meta = {"val": tuple(node.meta["val"] for node in made)}
        outputs = [OutputSpec(OutputKind.USER_OUTPUT, _argument(node), None) for node in made]
        environment = self.copies.copied_environment(self.environment)
        if environment is not None:
            self.decisions = Decisions(self.environment, environment)
        return assemble_program(
            graph_module=lazy_graph_module(self.root, self.graph),
            signature=ExportGraphSignature(input_specs=self.specs, output_specs=outputs),
            state_dict=self.state,
            constants=self.constants,
            range_constraints=dict(environment.var_to_range) if environment is not None else {},
            verifiers=[ATEN_VERIFIER],
        )

    def _bake(self, node: Node, kind: InputKind) -> None:
        target = f"baked_{len(self.baked)}"
        self.state[target] = self.weights[node]
        self.baked[target] = node
        persistent = True if kind is InputKind.BUFFER else None
        self.specs.append(InputSpec(kind, TensorArgument(self._placeholder(node).name), target, persistent))

    def _constant(self, node: Node) -> None:
        value = graphs.attribute(self.module, str(node.target))
        if isinstance(value, torch.Tensor):
            target = str(node.target)
            self.constants[target] = value
            placeholder = self._placeholder(node)
            if "val" not in placeholder.meta:
                modes = (getattr(each.meta.get("val"), "fake_mode", None) for each in self.graph.nodes)
                mode = next(filter(None, modes), None)
                if mode is None:
                    raise NotLowered("it computes from constants only")
                placeholder.meta["val"] = mode.from_tensor(value, static_shapes=True)
            self.specs.append(InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(placeholder.name), target))

    def _placeholder(self, node: Node) -> Node:
        placeholder = self.graph.placeholder(node.name)
        placeholder.target = placeholder.name
        placeholder.meta = self._meta(node)
        self.env[node] = placeholder
        return placeholder

    def _copy(self, node: Node) -> Node:
        if node.op == "get_attr":
            target = str(node.target)
            self.root[target] = self._nested(graphs.attribute(self.module, target))
        if node.target is torch.ops.aten.clone.default:
            return self._clone(node)
        if is_same_memory(node):
            return self.env[node.args[0]]  # type: ignore[index]
        copied = self.graph.node_copy(node, self.env.__getitem__)
        copied.meta = self._meta(node)
        return copied

    def _clone(self, node: Node) -> Node:
        """Copy a clone, unless a value is equal to it: backends that drop clones would return that value twice."""
        source: Any = node.args[0]
        if source.op == "call_function" and _layout(source) is not None and _layout(source) == _layout(node):
            return self.env[source]
        key = (self.env[source], *node.kwargs.items())
        if key not in self.clones:
            self.clones[key] = self.graph.node_copy(node, self.env.__getitem__)
            self.clones[key].meta = self._meta(node)
        return self.clones[key]

    def _nested(self, module: Any) -> Any:
        """Copy the graph of a branch or a body, with values of its own."""
        if not isinstance(module, GraphModule):
            return module
        copied = graphs.copy_graph_module(module)
        for _, node in graphs.every_node(copied):
            node.meta = self._meta(node)
        return copied

    def _meta(self, node: Node) -> dict[str, Any]:
        meta = {key: value for key, value in node.meta.items() if key not in _LEFT_OUT}
        if "nn_module_stack" in meta:
            meta["nn_module_stack"] = as_exported(meta["nn_module_stack"])
        if "val" in meta:
            for leaf in pytree.tree_leaves(meta["val"]):
                self.environment = shape_env_of(leaf) or self.environment
            meta["val"] = pytree.tree_map(self.copies.copy, meta["val"])
        return meta


_LEFT_OUT = frozenset({"tensor_meta", "tensor_dict", "grapharg", "desc", "example_value", "partitioner_tag"})
"""What Dynamo and AOTAutograd keep in the metadata for themselves; some of it holds real tensors."""


def as_exported(stack: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return a stack of modules as `torch.export` writes it: their paths in the model, and their classes' names."""
    found = {}
    for source, kind in stack.values():
        inside = re.sub(r"^[LG]\['\w+'\]\.?", "", source)  # of, for example, L['self'].layers[0]
        path = re.sub(r"\['?(\w+)'?\]", r".\1", inside).lstrip(".")
        found[path] = path, f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)
    return found


def _layout(node: Node) -> tuple[int, ...] | None:
    """Return how a value lies in memory; None if that is not known now."""
    value = node.meta.get("val")
    layout = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (None,)
    return layout if all(isinstance(number, int) for number in layout) else None


def _needed(roots: Sequence[Node]) -> set[Node]:
    needed, pending = set(roots), list(roots)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in needed:
                needed.add(source)
                pending.append(source)
    return needed


def _argument(node: Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, (torch.Tensor, *SYMBOLS)):
        return argument_of(node)
    if isinstance(value, (bool, int, float, str, type(None))):
        return ConstantArgument(name=node.name, value=value)
    raise NotLowered(f"{node.name} is a {type(value).__name__}", node)


def _check(module: GraphModule, entering: Container[Node]) -> None:
    """Raise NotLowered if a graph cannot be lowered."""
    # The nodes that are not entering its program are views, which PyTorch makes, or are not used.
    for node in module.graph.nodes:
        if node in entering and is_same_memory(node):
            continue  # the program has its argument instead
        if node in entering:
            _check_node(module, node)
            for nested in graphs.nested_graphs(module, node):
                for _, inner in graphs.walk(nested.module):
                    for one in inner.graph.nodes:
                        _check_node(inner, one)
        elif node.op in ("call_module", "call_method") or (node.op == "call_function" and node.is_impure()):
            raise NotLowered(f"{graphs.operator_name(node)} has side effects, but no result that is used", node)


def _check_node(module: GraphModule, node: Node) -> None:
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            if type(value) is not FakeTensor:
                raise NotLowered(f"{node.name} is a {type(value).__name__}, a tensor subclass", node)
            if value.device.type != "cpu":
                raise NotLowered(f"{node.name} is on the device {value.device}, not on the CPU", node)
            if value.layout is not torch.strided:
                raise NotLowered(f"{node.name} has the layout {value.layout}", node)
            if value.is_quantized or value.dtype.is_complex:
                raise NotLowered(f"{node.name} has the dtype {value.dtype}", node)
        if isinstance(value, (torch.Tensor, *SYMBOLS)) and free_unbacked_symbols(value):
            raise NotLowered("it has sizes that depend on data", node)
    if node.op == "get_attr":
        value = graphs.attribute(module, str(node.target))
        if not isinstance(value, (torch.Tensor, GraphModule)):
            raise NotLowered(f"it holds a {type(value).__name__}, which a program cannot contain", node)
        if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise NotLowered(f"it holds a {type(value).__name__}, a tensor subclass", node)
    if node.op in ("call_module", "call_method"):
        raise NotLowered(f"it has a {node.op}", node)
    if node.op != "call_function":
        return
    name = graphs.operator_name(node)
    nested = higher_order_name(node.target)
    if nested is not None:
        if nested not in LOWERED:
            raise NotLowered(f"the higher-order operator {nested} is not lowered", node)
        return
    if graphs.is_mutating(node):
        raise NotLowered(f"{name} writes into its arguments", node)
    if name.startswith(_BY_STRIDE):
        raise NotLowered(f"{name} depends on a tensor's memory layout", node)
