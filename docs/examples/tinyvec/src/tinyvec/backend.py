"""Ahead of time: what the machine takes, and its instructions."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from exir_lowering import Backend, BackendContext, CompileSpec, PreprocessResult
from exir_lowering.partitioners import OperatorTable, SupportPartitioner, dtypes, where
from exir_lowering.plugins import PROVENANCE
from tinyvec import MAGIC, VERSION


def _of_tensors(node: torch.fx.Node) -> bool:
    computed = [isinstance(argument, torch.fx.Node) for argument in (*node.args, *node.kwargs.values())]
    return computed[:2] == [True, True] and not any(computed[2:])


TENSORS = where(_of_tensors, "the machine takes two tensors, and an alpha that is not computed")

TABLE = OperatorTable(
    "tinyvec",
    {
        "aten.add.Tensor": ("ADD", TENSORS),
        "aten.sub.Tensor": ("SUB", TENSORS),
        "aten.mul.Tensor": ("MUL", TENSORS),
        "aten.relu.default": "RELU",
        "aten.mm.default": "MM",
        "aten.linear.default": "LINEAR",
    },
    check=dtypes(torch.float32),
)
"""The Edge operators that the machine has: for each its opcode, or its opcode and what it has to be like."""


class TinyvecBackend(Backend):
    """Compiles partitions of the operators in `TABLE`."""

    backend_id = "tinyvec"
    version = str(VERSION)
    unread = PROVENANCE

    def preprocess(
        self, program: ExportedProgram, compile_specs: list[CompileSpec], context: BackendContext
    ) -> PreprocessResult:
        """Compile one partition."""
        code = TABLE.compile(program, context)
        return PreprocessResult(
            code.to_bytes(MAGIC, VERSION),
            debug_handle_map=code.debug_handle_map,
            data_store_output=context.weights.named_data(code.weights),
        )


def tinyvec_partitioner() -> SupportPartitioner:
    """Return a partitioner that gives the machine every operator that it has."""
    return TABLE.partitioner()
