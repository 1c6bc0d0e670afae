"""The demo compiler: aten add, sub, mul and constants, everything else refused with the line of the model."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from exir_lowering import Backend, CompileSpec, InputError, PreprocessResult, graphs, measures
from exir_lowering.backends.compiler_demo import instructions
from exir_lowering.backends.compiler_demo.instructions import Code, Instruction

__all__ = ["CompilerDemoBackend"]


class CompilerDemoBackend(Backend):
    """Compiles partitions to a text of instructions for `CompilerDemoDelegate`."""

    backend_id = "compiler_demo"
    version = "1"

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        """Compile one partition.

        Raises:
            InputError: It has something that the compiler does not know; the message has the model's source line.
        """
        signature = program.graph_signature
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        pairs = list(zip(placeholders, signature.input_specs, strict=True))
        inputs = [node for node, spec in pairs if spec.kind is InputKind.USER_INPUT]
        lifted = [(node, spec.target) for node, spec in pairs if spec.kind is not InputKind.USER_INPUT]
        names = {node: f"%{number}" for number, node in enumerate([*inputs, *(node for node, _ in lifted)])}
        for node in inputs:
            if not isinstance(node.meta.get("val"), torch.Tensor):
                raise _refusal(next(iter(node.users), node), f"Input {node.name}, which is no tensor,")
        for spec in signature.output_specs:
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise InputError(f"Writing to {spec.target} is not supported in this compiler: it keeps no state.")
        constants = [_constant(program, node, str(target)) for node, target in lifted]
        code = []
        for node in program.graph.nodes:
            if node.op == "call_function":
                code.append(_instruction(node, names))
                names[node] = f"%{len(names)}"
        results = [names[node] for node in program.graph.output_node().args[0]]
        text = instructions.write(Code(len(inputs), constants, code, results))
        handles = {i.handle: (i.handle,) for i in code if i.handle >= 0}
        return PreprocessResult(text.encode(), debug_handle_map=handles)


def _constant(program: ExportedProgram, node: Node, target: str) -> torch.Tensor:
    value = program.state_dict.get(target, program.constants.get(target))
    if not isinstance(value, torch.Tensor) or value.is_complex() or value.is_quantized:
        raise _refusal(next(iter(node.users), node), f"The constant {target}")
    return value.detach()


def _instruction(node: Node, names: dict[Node, str]) -> Instruction:
    name = graphs.operator_name(node)
    operator = name.rpartition(".")[0] if name.count(".") > 1 else name
    if operator not in instructions.OPERATORS or len(list(measures.tensors(node.meta.get("val")))) != 1:
        raise _refusal(node, operator)
    left, right = (_argument(node, value, names) for value in node.args[:2])
    alpha: Any = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
    if isinstance(alpha, Node):
        raise _refusal(node, f"{operator} with a computed alpha")
    return Instruction(operator, left, right, alpha, int(node.meta.get("debug_handle", -1)))


def _argument(node: Node, value: Any, names: dict[Node, str]) -> str:
    if isinstance(value, Node) and value in names:
        return names[value]
    if isinstance(value, (int, float)):
        return json.dumps(value)
    raise _refusal(node, f"{graphs.operator_name(node)} of {value!r}")


def _refusal(node: Node, what: str) -> InputError:
    source = graphs.source_line(node)
    return InputError(
        f"{what} is not supported in this compiler. "
        + (f"Source code: {source}" if source else f"Node {node.name}; its source line is not known.")
    )
