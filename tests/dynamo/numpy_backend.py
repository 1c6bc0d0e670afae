"""A backend as an outsider would write it: some operators in float32, computed with numpy."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from exir_lowering import (
    Backend,
    BackendContext,
    CompileSpec,
    Delegate,
    DelegateContext,
    PreprocessResult,
    WeightRef,
    WeightStore,
)
from exir_lowering.graphs import operator_name
from exir_lowering.partitioners import SupportPartitioner, dtypes, ops, where

Array = Any


def _product(x: Array, y: Array) -> Array:
    return np.matmul(x, y)


def _affine(bias: Array, x: Array, y: Array) -> Array:
    return bias + np.matmul(x, y)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


OPERATORS: dict[str, Callable[..., Array]] = {
    "aten.add.Tensor": np.add,
    "aten.sub.Tensor": np.subtract,
    "aten.mul.Tensor": np.multiply,
    "aten.div.Tensor": np.divide,
    "aten.mm.default": _product,
    "aten.bmm.default": _product,
    "aten.addmm.default": _affine,
    "aten.relu.default": lambda x: np.maximum(x, 0),
    "aten.clamp.default": lambda x, low, high: np.clip(x, low, high),
    "aten.hardtanh.default": lambda x, low=-1.0, high=1.0: np.clip(x, low, high),
    "aten.sigmoid.default": _sigmoid,
    "aten.tanh.default": np.tanh,
    "aten.exp.default": np.exp,
    "aten.rsqrt.default": lambda x: 1 / np.sqrt(x),
}


class NumpyBackend(Backend):
    """Writes a partition as JSON, its weights as named data."""

    backend_id = "numpy"

    def preprocess(
        self, program: ExportedProgram, compile_specs: list[CompileSpec], context: BackendContext | None = None
    ) -> PreprocessResult:
        store = context.weights if context is not None else WeightStore()
        inputs: list[str] = []
        weights: dict[str, WeightRef] = {}
        for spec in program.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                inputs.append(spec.arg.name)
            else:
                tensors = {**program.state_dict, **program.constants}
                weights[spec.arg.name] = store.ref(tensors[str(spec.target)])
        code = [
            [node.name, operator_name(node), [arg.name if isinstance(arg, Node) else arg for arg in node.args]]
            for node in program.graph.nodes
            if node.op == "call_function"
        ]
        results = [node.name for node in program.graph.output_node().args[0]]
        named = {name: ref.to_json() for name, ref in weights.items()}
        text = json.dumps([inputs, named, code, results])
        return PreprocessResult(text.encode(), data_store_output=store.named_data(weights.values()))


class NumpyDelegate(Delegate):
    """Computes a partition; counts what it is asked for."""

    delegate_id = "numpy"

    def __init__(self) -> None:
        self.runs = 0

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> Any:
        inputs, named, code, results = json.loads(processed)
        weights = {name: WeightRef.from_json(ref).load(context.named_data).numpy() for name, ref in named.items()}
        return inputs, weights, code, results

    def execute(self, handle: Any, inputs: list[Any]) -> Sequence[Any]:
        self.runs += 1
        names, weights, code, results = handle
        values = {**weights, **{name: value.numpy() for name, value in zip(names, inputs, strict=True)}}
        for name, operator, args in code:
            given = [values[arg] if isinstance(arg, str) else arg for arg in args]
            values[name] = np.asarray(OPERATORS[operator](*given), np.float32)
        return [torch.from_numpy(values[name]) for name in results]


def _has_plain_arguments(node: Node) -> bool:
    return not node.kwargs and all(isinstance(arg, (Node, int, float)) for arg in node.args)


def numpy_partitioner() -> SupportPartitioner:
    """Return a partitioner that gives numpy every operator that it has, in float32."""
    plain = where(_has_plain_arguments, "it has options, or arguments that are neither tensors nor numbers")
    return SupportPartitioner({NumpyBackend.backend_id: ops(*OPERATORS) & dtypes(torch.float32) & plain})
