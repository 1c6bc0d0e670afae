"""Writing a program as bytes, with its tensors apart."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering._upstream.programs import DelegatedProgram, guards_code_of
from exir_lowering._upstream.serializing import is_flat, verifier_facts
from exir_lowering.graphs.serialized import signatures
from exir_lowering.graphs.serialized.arguments import ValueWriter
from exir_lowering.graphs.serialized.container import PROGRAM, NotSerialisableError
from exir_lowering.graphs.serialized.fake_values import FakeWriter
from exir_lowering.graphs.serialized.grammar import check_attribute, check_guard, check_identifier, check_path
from exir_lowering.graphs.serialized.metadata import MetadataWriter
from exir_lowering.graphs.serialized.tensors import TensorWriter
from exir_lowering.graphs.walking import attribute

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
            "signature": signatures.write_signature(program.graph_signature, self.values),
            "calls": signatures.write_calls(program.module_call_graph, self.values),
            "state": [[_named(check_path, name), write(value)] for name, value in program.state_dict.items()],
            "constants": [[_named(check_path, name), write(value)] for name, value in program.constants.items()],
            "ranges": [[write(key), write(bounds)] for key, bounds in program.range_constraints.items()],
            "guards": [_named(check_guard, guard) for guard in guards_code_of(program)],
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
