"""Programs as bytes: writing one, with its tensors apart, and reading it.

The bytes are data: nothing that they say is imported, executed or evaluated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram, ExportGraphSignature
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
    TokenArgument,
)
from torch.fx import Graph, GraphModule, Node

from exir_lowering._upstream.programs import (
    DelegatedProgram,
    assemble_program,
    guards_code_of,
    lazy_graph_module,
    pytree,
)
from exir_lowering._upstream.serializing import is_flat, make_verifier, verifier_facts
from exir_lowering.errors import InputError
from exir_lowering.graphs import treespecs
from exir_lowering.graphs.serialized.arguments import MetadataReader, MetadataWriter, ValueReader, ValueWriter
from exir_lowering.graphs.serialized.fake_values import FakeReader, FakeWriter
from exir_lowering.graphs.serialized.grammar import check_attribute, check_identifier, check_path, check_text
from exir_lowering.graphs.serialized.plain import DEEPEST, PROGRAM, NotSerialisableError, pick
from exir_lowering.graphs.serialized.tensors import TensorReader, TensorWriter
from exir_lowering.graphs.walking import attribute

_NAMED: dict[str, type[Any]] = {
    "tensor": TensorArgument,
    "int": SymIntArgument,
    "float": SymFloatArgument,
    "bool": SymBoolArgument,
    "token": TokenArgument,
}
_ARGUMENT_KINDS = {kind: name for name, kind in _NAMED.items()}


def _write_structure(spec: Any) -> str:
    try:
        text: str = pytree.treespec_dumps(spec)
        if treespecs.loads(text) == spec:
            return text
    except (NotImplementedError, TypeError, ValueError, InputError) as error:
        raise NotSerialisableError(f"the structure {str(spec)[:200]} ({error})") from error
    raise NotSerialisableError(f"the structure {str(spec)[:200]}: it would be read differently")


KINDS = ("placeholder", "get_attr", "call_function", "output")
"""The kinds of nodes, by number."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A serialised program.

    Attributes:
        graph: Everything but the content of tensors; equal programs have equal bytes.
        pieces: The memory that its tensors are in, shared with the program: one-dimensional tensors of bytes.
    """

    graph: bytes
    pieces: tuple[torch.Tensor, ...]

    def digests(self) -> tuple[str, ...]:
        """Return the SHA-256 of each piece, by which pieces can be stored."""
        return tuple(hashlib.sha256(piece.numpy().data).hexdigest() for piece in self.pieces)


def encode(program: ExportedProgram, *, leave_out: Collection[str] = ()) -> Encoded:
    """Serialise a program of `torch.export`, in Edge dialect, or a partition, exactly; it is not changed.

    Args:
        program: The program.
        leave_out: Keys of `node.meta`. Without "debug_handle", "from_node", "stack_trace" and "nn_module_stack", the
            bytes depend on what a program computes, and not on where that was written. `metadata` lists what is always
            left out.

    Returns:
        The bytes, and the memory of its tensors.

    Raises:
        NotSerialisableError: It has something that cannot be read back exactly: sizes that depend on data, objects of
            scripts, lowered modules, tensors of subclasses, sparse or on other devices, operators without a registered
            name, other objects in `node.meta`.
    """
    return _Encoder(leave_out).encode(program)


class _Encoder:
    def __init__(self, leave_out: Collection[str]) -> None:
        self.tensors = TensorWriter()
        self.fakes = FakeWriter(self.tensors)
        self.values = ValueWriter(self.tensors, self.fakes)
        self.metadata = MetadataWriter(self.values, leave_out)
        self.modules: list[GraphModule] = []
        self.numbers: dict[int, int] = {}

    def encode(self, program: ExportedProgram) -> Encoded:
        if type(program) not in (ExportedProgram, DelegatedProgram):
            raise NotSerialisableError(f"a program of the class {type(program).__name__}")
        write = self.values.write
        self._number(program.graph_module)
        graphs: list[Any] = []
        while len(graphs) < len(self.modules):  # nested graphs are found on the way
            graphs.append(self._graph(self.modules[len(graphs)]))
        self.values.nodes = {}
        tree = {
            "delegated": type(program) is DelegatedProgram,
            "graphs": graphs,
            "signature": self._signature(program.graph_signature),
            "calls": [[entry.fqn, self._call(entry.signature)] for entry in program.module_call_graph],
            "state": [[_named(check_path, name), write(value)] for name, value in program.state_dict.items()],
            "constants": [[_named(check_path, name), write(value)] for name, value in program.constants.items()],
            "ranges": [[write(key), write(bounds)] for key, bounds in program.range_constraints.items()],
            "guards": [_named(lambda text: check_text("guard", text), guard) for guard in guards_code_of(program)],
            "examples": write(program.example_inputs),
            "verifiers": [self._verifier(verifier) for verifier in program.verifiers],
        }
        described, pieces = self.tensors.finish()
        tree |= {
            **self.fakes.finish(),
            **self.metadata.finish(),
            "texts": list(self.values.texts),
            "operators": list(self.values.operators),
            "tensors": described,
        }
        return Encoded(PROGRAM.pack(tree), pieces)

    def _number(self, module: GraphModule) -> int:
        if id(module) not in self.numbers:
            self.numbers[id(module)] = len(self.modules)
            self.modules.append(module)
        return self.numbers[id(module)]

    def _graph(self, module: GraphModule) -> dict[str, Any]:
        if not is_flat(module.graph):
            raise NotSerialisableError("a graph that takes or returns nested structures")
        nodes: dict[Node, int] = {}
        self.values.nodes = nodes
        written = []
        attributes: dict[str, Any] = {}
        for node in module.graph.nodes:
            try:
                written.append(self._node(node, module, attributes))
            except NotSerialisableError as error:
                error.args = (f"{error} (node {node.name!r})",)
                raise
            nodes[node] = len(nodes)
        return {"nodes": written, "attributes": list(attributes.items()), "meta": self._module_meta(module)}

    def _node(self, node: Node, module: GraphModule, attributes: dict[str, Any]) -> list[Any]:
        if node.op not in KINDS:
            raise NotSerialisableError(f"a node of the kind {node.op}")
        target: Any = node.target
        if node.op == "call_function":
            target = self.values.target(target)
        elif node.op == "get_attr":
            if target not in attributes:
                attributes[_named(check_attribute, target)] = self._attribute(attribute(module, target))
        else:
            _named(check_identifier, target)
        write = self.values.write
        for key in node.kwargs:
            _named(check_identifier, key)
        return [
            KINDS.index(node.op),
            _named(check_identifier, node.name),
            target,
            [write(argument) for argument in node.args],
            {key: write(argument) for key, argument in node.kwargs.items()},
            self.metadata.write(node.meta),
        ]

    def _attribute(self, value: Any) -> Any:
        if isinstance(value, GraphModule):
            return {"graph": self._number(value)}
        if isinstance(value, torch.Tensor):
            return self.values.write(value)
        raise NotSerialisableError(f"an attribute of the type {type(value).__name__}")

    def _module_meta(self, module: GraphModule) -> dict[str, Any]:
        """Write what is plain data of a graph's own metadata, which describes its export."""
        written = {}
        for key, value in module.meta.items():
            with suppress(NotSerialisableError):
                written[key] = self.values.write(value)
        return written

    def _signature(self, signature: ExportGraphSignature) -> list[Any]:
        inputs, outputs = signature.input_specs, signature.output_specs
        return [
            [[spec.kind.name, self._argument(spec.arg), spec.target, spec.persistent] for spec in inputs],
            [[spec.kind.name, self._argument(spec.arg), spec.target] for spec in outputs],
        ]

    def _call(self, call: ModuleCallSignature | None) -> Any:
        """Write how a module was called."""
        if call is None:
            return None
        arguments = (list(map(self._argument, given)) for given in (call.inputs, call.outputs))
        return [*arguments, _write_structure(call.in_spec), _write_structure(call.out_spec), call.forward_arg_names]

    def _argument(self, argument: Any) -> list[Any]:
        if type(argument) is ConstantArgument:
            return ["constant", argument.name, self.values.write(argument.value)]
        kind = _ARGUMENT_KINDS.get(type(argument))
        if kind is None:
            raise NotSerialisableError(f"an argument of the type {type(argument).__name__}")
        return [kind, argument.name]

    def _verifier(self, verifier: Any) -> list[Any]:
        facts = verifier_facts(verifier)
        if facts is None:
            raise NotSerialisableError(f"the verifier {verifier}, which no other process would find by its dialect")
        return [facts[0], self.values.write(facts[1])]


def _named(check: Any, name: Any) -> str:
    try:
        checked: str = check(name)
        return checked
    except ValueError as error:
        raise NotSerialisableError(str(error)) from error


def decode(graph: bytes, pieces: Sequence[torch.Tensor]) -> ExportedProgram:
    """Read a program that `encode` wrote.

    Args:
        graph: `Encoded.graph`.
        pieces: `Encoded.pieces`, or tensors with their content.

    Returns:
        The program; its tensors share the memory of the pieces.

    Raises:
        InputError: The bytes are not a serialised program, or are damaged; the program has an operator or a type that
            this process does not know; or the pieces do not fit.
    """
    tree = PROGRAM.unpack(graph)
    try:
        return _Decoder(tree, pieces).decode()
    except MemoryError:
        raise
    except Exception as error:
        raise InputError(
            f"A serialised program cannot be read: {type(error).__name__}: {str(error)[:500]}. It is damaged, or this "
            "process lacks the library that it was written with."
        ) from error


class _Decoder:
    def __init__(self, tree: Mapping[str, Any], pieces: Sequence[torch.Tensor]) -> None:
        self.tree = tree
        tensors = TensorReader(tree["tensors"], pieces)
        self.fakes = FakeReader(tree, tensors)
        self.values = ValueReader(tree, tensors, self.fakes)
        self.metadata = MetadataReader(tree, self.values)
        self.modules: dict[int, GraphModule | None] = {}

    def decode(self) -> ExportedProgram:
        tree, read = self.tree, self.values.read
        module = self._module(0, 0)
        self.values.nodes = []
        signature = self._signature(tree["signature"])
        _check_signature(module, signature)
        return assemble_program(
            graph_module=module,
            signature=signature,
            state_dict={check_path(name): read(value) for name, value in tree["state"]},
            constants={check_path(name): read(value) for name, value in tree["constants"]},
            range_constraints={read(key): read(bounds) for key, bounds in tree["ranges"]},
            module_call_graph=[ModuleCallEntry(check_path(fqn), self._call(call)) for fqn, call in tree["calls"]],
            example_inputs=read(tree["examples"]),
            verifiers=[make_verifier(dialect, read(options)) for dialect, options in tree["verifiers"]],
            guards_code=[check_text("guard", guard) for guard in tree["guards"]],
            kind=DelegatedProgram if tree["delegated"] is True else ExportedProgram,
        )

    def _module(self, number: int, depth: int) -> GraphModule:
        if number in self.modules:
            known = self.modules[number]
            if known is None:
                raise ValueError("a graph is nested in itself")
            return known
        if depth > DEEPEST:
            raise ValueError(f"graphs nest more than {DEEPEST} deep")
        self.modules[number] = None
        fields = pick(self.tree["graphs"], number)
        root = {check_attribute(name): self._attribute(value, depth) for name, value in fields["attributes"]}
        module = lazy_graph_module(root, self._graph(fields["nodes"], root))
        module.meta.update({key: self.values.read(value) for key, value in fields["meta"].items()})
        self.modules[number] = module
        return module

    def _attribute(self, tree: Any, depth: int) -> Any:
        ((kind, content),) = tree.items()
        return self._module(content, depth + 1) if kind == "graph" else self.values.read(tree)

    def _graph(self, nodes: Sequence[Any], root: Mapping[str, Any]) -> Graph:
        graph = Graph()
        self.values.nodes = made = []
        names = set()
        for fields in nodes:
            node = self._node(graph, *fields)
            if node.name in names or (node.op == "get_attr" and node.target not in root):
                raise ValueError(f"the node {node.name!r} occurs twice, or its attribute is missing")
            names.add(node.name)
            made.append(node)
        ends = [node.op == "output" for node in made]
        if ends[-1:] != [True] or any(ends[:-1]):
            raise ValueError("a graph ends with its output")
        return graph

    def _node(
        self, graph: Graph, kind: int, name: str, target: Any, args: list[Any], kwargs: dict[str, Any], meta: Any
    ) -> Node:
        read = self.values.read
        op = pick(KINDS, kind)
        check_identifier(name)
        if op == "call_function":
            target = self.values.target(target)
        elif op == "get_attr":
            check_attribute(target)
        else:
            check_identifier(target)
        node = graph.create_node(
            op,
            target,
            tuple([read(argument) for argument in args]),
            {check_identifier(key): read(argument) for key, argument in kwargs.items()},
            name=name,
        )
        if node.name != name:  # torch avoids names of builtins for new nodes, not for renamed ones
            node.name = name
        node.meta = self.metadata.read(meta)
        return node

    def _signature(self, tree: Any) -> ExportGraphSignature:
        inputs, outputs = tree
        return ExportGraphSignature(
            input_specs=[
                InputSpec(InputKind[kind], self._argument(argument), _optional_path(target), persistent)
                for kind, argument, target, persistent in inputs
            ],
            output_specs=[
                OutputSpec(OutputKind[kind], self._argument(argument), _optional_path(target))
                for kind, argument, target in outputs
            ],
        )

    def _call(self, tree: Any) -> ModuleCallSignature | None:
        """Read how a module was called."""
        if tree is None:
            return None
        inputs, outputs, in_spec, out_spec, names = tree
        return ModuleCallSignature(
            inputs=[self._argument(argument) for argument in inputs],
            outputs=[self._argument(argument) for argument in outputs],
            in_spec=treespecs.loads(in_spec),
            out_spec=treespecs.loads(out_spec),
            forward_arg_names=None if names is None else [check_identifier(name) for name in names],
        )

    def _argument(self, tree: Sequence[Any]) -> Any:
        kind, name, *rest = tree
        if not isinstance(name, str) or (name and kind != "constant" and check_identifier(name) != name):
            raise ValueError("an argument has a name")
        if kind == "constant":
            (value,) = rest
            return ConstantArgument(name, self.values.read(value))
        return _NAMED[kind](name)


def _optional_path(name: Any) -> str | None:
    return None if name is None else check_path(name)


def _check_signature(module: GraphModule, signature: Any) -> None:
    inputs = sum(node.op == "placeholder" for node in module.graph.nodes)
    results = next(iter(reversed(module.graph.nodes))).args[0]
    count = len(results) if isinstance(results, (list, tuple)) else 1
    if inputs != len(signature.input_specs) or count != len(signature.output_specs):
        raise ValueError("the signature does not fit the graph")
