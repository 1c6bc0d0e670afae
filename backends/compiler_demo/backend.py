"""The demo compiler: aten add, sub, mul and constants; it refuses everything else, naming the line of the model."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from exir_lowering import Backend, CompileSpec, InputError, PreprocessResult, graphs
from exir_lowering.backends.compiler_demo import delegate
from exir_lowering.backends.compiler_demo.delegate import Code, Instruction
from exir_lowering.graphs import measures

_CONVERSIONS = ("aten._to_copy.default", "dim_order_ops._to_dim_order_copy.default")


class CompilerDemoBackend(Backend):
    """Compiles partitions to instructions, as text, for `CompilerDemoDelegate`."""

    backend_id = "compiler_demo"
    version = "1"

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """Compile one partition; InputError, with the model's source line, if something in it is not supported."""
        signature = program.graph_signature
        for spec in signature.output_specs:
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise InputError(f"Writing to {spec.target} is not supported in this compiler: it keeps no state.")
        inputs = graphs.user_inputs(program)
        for node in inputs:
            if not isinstance(node.meta.get("val"), torch.Tensor):
                raise _refusal(next(iter(node.users), node), f"Input {node.name}, which is not a tensor,")
        constants = _constants(program)
        names = {node: f"%{number}" for number, node in enumerate([*inputs, *constants])}
        instructions = []
        for node in program.graph.nodes:
            if node.op == "call_function" and node not in names:
                instructions.append(_instruction(node, names))
                names[node] = f"%{len(names)}"
        results = [names[node] for node in program.graph.output_node().args[0]]
        code = Code(len(inputs), list(constants.values()), instructions, results)
        events = zip(code.events(), instructions, strict=True)
        handles = {event: (i.handle,) for event, i in events if i.handle >= 0}
        return PreprocessResult(delegate.write(code).encode(), debug_handle_map=handles)


def _constants(program: ExportedProgram) -> dict[Node, torch.Tensor]:
    """Return the constants that are used. Edge dialect turns numbers into constants, converted if necessary."""
    known: dict[Node, torch.Tensor] = {}
    for node, spec in graphs.placeholders(program).items():
        if spec.kind is not InputKind.USER_INPUT:
            value = graphs.lifted_value(program, spec.target)
            if not isinstance(value, torch.Tensor) or value.is_complex() or value.is_quantized:
                raise _refusal(next(iter(node.users), node), f"The constant {spec.target}")
            known[node] = value.detach()
    folded: set[Node] = set()
    for node in program.graph.nodes:
        if node.op == "call_function" and graphs.operator_name(node) in _CONVERSIONS and node.args[0] in known:
            known[node] = known[node.args[0]].to(node.meta["val"].dtype)
            folded.add(node)
    return {node: value for node, value in known.items() if not folded.issuperset(node.users)}


def _instruction(node: Node, names: dict[Node, str]) -> Instruction:
    name = graphs.operator_name(node)
    operator = name.rpartition(".")[0] if name.count(".") > 1 else name
    if operator not in delegate.OPERATORS or len(list(measures.tensors(node.meta.get("val")))) != 1:
        raise _refusal(node, operator)
    operands = []
    for value in node.args[:2]:
        if not isinstance(value, (int, float)) and (not isinstance(value, Node) or value not in names):
            raise _refusal(node, f"{name} of {value!r}")
        operands.append(names[value] if isinstance(value, Node) else json.dumps(value))
    alpha: Any = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
    if isinstance(alpha, Node):
        raise _refusal(node, f"{operator} with a computed alpha")
    left, right = operands
    return Instruction(operator, left, right, alpha, int(node.meta.get("debug_handle", -1)))


def _refusal(node: Node, what: str) -> InputError:
    return InputError(f"{what} is not supported in this compiler. {graphs.source_code(node)}")
