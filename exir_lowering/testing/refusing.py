"""Distinguish a backend's refusal from its failure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering.errors import BackendFailure, InvariantError, LoweringError
from exir_lowering.graphs import measures


def describe_refusal(error: BackendFailure, programs: Mapping[str, ExportedProgram]) -> str:
    """Return how a backend refused a program; "" when it failed otherwise.

    A refusal is a NotImplementedError or a LoweringError that names what is refused: an operator, a value, a weight or
    an element type of the program. Other exceptions are failures, a KeyError of a table of operators too: whoever gets
    it cannot tell a gap in the backend from a defect, nor what to leave on the host.
    """
    cause = error.__cause__
    if not isinstance(cause, (NotImplementedError, LoweringError)) or isinstance(cause, InvariantError):
        return ""
    text = str(cause)
    names = {name for program in programs.values() for name in _list_names(program) if name}
    named = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names)
    return text if named else ""


def _list_names(program: ExportedProgram) -> Iterator[str]:
    signature = program.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        yield from (str(spec.target or ""), spec.kind.name)
    for _, module in graphs.walk(program.graph_module):
        for node in module.graph.nodes:
            yield node.name
            if node.op == "call_function":
                operator = graphs.operator_name(node)
                yield from (operator, operator.rpartition(".")[0], operator.split(".")[min(1, operator.count("."))])
            for held in measures.tensors(node.meta.get("val")):
                yield from _list_tensor_names(held)


def _list_tensor_names(held: torch.Tensor) -> Iterator[str]:
    yield str(held.dtype).removeprefix("torch.")
    if not all(isinstance(size, int) for size in held.shape):
        yield from ("dynamic shape", "dynamic shapes")
