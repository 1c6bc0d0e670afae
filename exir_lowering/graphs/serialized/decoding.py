"""Reading a program from bytes. The bytes are data: nothing that they say is imported, executed or evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from exir_lowering._upstream.programs import DelegatedProgram, assemble_program, lazy_graph_module
from exir_lowering._upstream.serializing import make_verifier
from exir_lowering.errors import InputError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.graphs.serialized import signatures
from exir_lowering.graphs.serialized.arguments import ValueReader
from exir_lowering.graphs.serialized.container import DEEPEST, PROGRAM, pick
from exir_lowering.graphs.serialized.encoding import KINDS
from exir_lowering.graphs.serialized.fake_values import FakeReader
from exir_lowering.graphs.serialized.grammar import check_attribute, check_guard, check_identifier, check_path
from exir_lowering.graphs.serialized.metadata import MetadataReader
from exir_lowering.graphs.serialized.tensors import TensorReader


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
    except Exception as error:
        let_through(error)
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
        signature = signatures.read_signature(tree["signature"], self.values)
        _check_signature(module, signature)
        return assemble_program(
            graph_module=module,
            signature=signature,
            state_dict={check_path(name): read(value) for name, value in tree["state"]},
            constants={check_path(name): read(value) for name, value in tree["constants"]},
            range_constraints={read(key): read(bounds) for key, bounds in tree["ranges"]},
            module_call_graph=signatures.read_calls(tree["calls"], self.values),
            example_inputs=read(tree["examples"]),
            verifiers=[make_verifier(dialect, read(options)) for dialect, options in tree["verifiers"]],
            guards_code=[check_guard(guard) for guard in tree["guards"]],
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


def _check_signature(module: GraphModule, signature: Any) -> None:
    inputs = sum(node.op == "placeholder" for node in module.graph.nodes)
    results = next(iter(reversed(module.graph.nodes))).args[0]
    count = len(results) if isinstance(results, (list, tuple)) else 1
    if inputs != len(signature.input_specs) or count != len(signature.output_specs):
        raise ValueError("the signature does not fit the graph")
