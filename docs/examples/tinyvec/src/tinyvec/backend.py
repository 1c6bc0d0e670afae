"""Ahead of time: compiles a partition to instructions."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from exir_lowering import (
    Backend,
    BackendContext,
    BackendFailure,
    CompileSpec,
    InputError,
    PreprocessResult,
    WeightStore,
    graphs,
)
from tinyvec import payload
from tinyvec.payload import Instruction, Program

OPERATORS = ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.relu.default", "aten.mm.default",
             "aten.linear.default")  # fmt: skip
PRECISIONS = {"float32": torch.float32, "float16": torch.float16}


class TinyvecBackend(Backend):
    """Compiles float32 partitions of six operators.

    The compile spec "precision" says how weights are stored: b"float32" (the default), or b"float16" in half the bytes.
    """

    backend_id = "tinyvec"
    version = str(payload.VERSION)

    def preprocess(
        self, program: ExportedProgram, compile_specs: list[CompileSpec], context: BackendContext | None = None
    ) -> PreprocessResult:
        """Compile one partition.

        Raises:
            InputError: A compile spec is unknown, or the partition keeps state.
            BackendFailure: It has an operator that the machine lacks.
        """
        store = context.weights if context is not None else WeightStore()
        precision = _precision(compile_specs)
        for spec in program.graph_signature.output_specs:
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise InputError(f"tinyvec keeps no state, and {spec.target} is written. Leave the write on the host.")
        inputs, tensors = _placeholders(program)
        refs = [store.ref(tensor.detach().to(precision)) for tensor in tensors.values()]
        numbers = {node: number for number, node in enumerate([*inputs, *tensors])}
        code = []
        for node in program.graph.nodes:
            if node.op == "call_function":
                code.append(_instruction(node, numbers))
                numbers[node] = len(numbers)
        outputs = [numbers[node] for node in program.graph.output_node().args[0]]
        compiled = Program(len(inputs), refs, code, outputs)
        events = zip(compiled.events, code, strict=True)
        return PreprocessResult(
            payload.dump(compiled),
            debug_handle_map={event: (i.handle,) for event, i in events if i.handle >= 0},
            data_store_output=store.named_data(refs),
        )


def _precision(compile_specs: list[CompileSpec]) -> torch.dtype:
    precision = "float32"
    for spec in compile_specs:
        precision = bytes(spec.value).decode(errors="replace")
        if spec.key != "precision" or precision not in PRECISIONS:
            raise InputError(
                f"tinyvec: got the compile spec {spec.key}={precision!r}, expected precision={' or '.join(PRECISIONS)}."
            )
    return PRECISIONS[precision]


def _placeholders(program: ExportedProgram) -> tuple[list[Node], dict[Node, torch.Tensor]]:
    """Return the inputs of a call, and the placeholders of weights, buffers and constants with their tensors."""
    for node in graphs.placeholders(program):
        if not _is_float(node):
            _refuse(next(iter(node.users)), f"of {node.name}, which is no float32 tensor")
    lifted = graphs.lifted_inputs(program).items()
    return list(graphs.user_inputs(program)), {node: graphs.lifted_value(program, spec.target) for node, spec in lifted}


def _instruction(node: Node, numbers: dict[Node, int]) -> Instruction:
    if _operator(node) not in OPERATORS or not _is_float(node):
        _refuse(node)
    arguments = [argument for argument in node.args if argument is not None]  # a linear without bias
    if not all(isinstance(argument, Node) for argument in arguments):
        _refuse(node, f"with the arguments {node.args}")
    if not all(isinstance(option, (int, float)) for option in node.kwargs.values()):
        _refuse(node, f"with the options {dict(node.kwargs)}")
    numbered = [numbers[argument] for argument in arguments]
    return Instruction(_operator(node), numbered, dict(node.kwargs), node.meta.get("debug_handle", -1))


def _is_float(node: Node) -> bool:
    value: Any = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def _refuse(node: Node, what: str = "") -> NoReturn:
    """Name the operator, and its debug handle: the engine adds the line of the model."""
    raise BackendFailure(
        f"tinyvec does not have {_operator(node)} {what}".rstrip() + ".", debug_handle=node.meta.get("debug_handle")
    )


def _operator(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target))
