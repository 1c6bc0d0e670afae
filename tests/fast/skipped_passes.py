"""Proof that a pass of XNNPACK that is left out would have changed nothing: it is run all the same, on a copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from executorch.backends.xnnpack._passes.xnnpack_pass import XNNPACKPass
from executorch.exir.program._program import _transform
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from exir_lowering import graphs
from exir_lowering.fast import accelerated, xnnpack_passes

_IGNORED = frozenset({"from_node", "seq_nr", "tensor_meta", "val"})
"""Where a node comes from, its number in autograd, and torch's older form of `val`: XNNPACK reads none of them. Values
are compared apart."""


@contextmanager
def proving() -> Iterator[Counter[str]]:
    """Run each pass that is left out, in any thread, and raise an AssertionError if it changes its graph.

    Yields:
        How often each pass was left out.
    """
    decide, counted = xnnpack_passes._is_traced, Counter[str]()

    def prove(kind: Any, program: ExportedProgram, work: Any) -> bool:
        traced = decide(kind, program, work)
        if traced:
            counted[kind.__name__] += 1
            before = describe(program)
            with accelerated(False):
                copied = graphs.copy_program(program)
                made = kind(copied) if issubclass(kind, XNNPACKPass) else kind()
                after = describe(_transform(copied, made))
            assert describe(program) == before, f"{kind.__name__}: the copy shares the graph"
            assert after == before, f"{kind.__name__} is not idle:\n" + "\n".join(_differences(before, after))
        return traced

    xnnpack_passes._is_traced = prove
    try:
        yield counted
    finally:
        xnnpack_passes._is_traced = decide


def _differences(before: list[Any], after: list[Any]) -> list[str]:
    pairs = zip(before, after, strict=False)
    return [f"{one}\n  {other}" for one, other in pairs if one != other][:3] or [f"{len(before)}, {len(after)} nodes"]


def describe(program: ExportedProgram) -> list[Any]:
    """Return what later passes and XNNPACK's own code read of a program."""
    described: list[Any] = []
    for path, module in graphs.walk(program.graph_module):
        numbers = {node: number for number, node in enumerate(module.graph.nodes)}
        described += [(path, *_node(node, numbers)) for node in module.graph.nodes]
    signature = program.graph_signature
    described += [
        (spec.kind, type(spec.arg), spec.target) for spec in (*signature.input_specs, *signature.output_specs)
    ]
    described += [sorted((str(key), str(value)) for key, value in program.range_constraints.items())]
    described += [
        [(name, id(value)) for name, value in table.items()] for table in (program.state_dict, program.constants)
    ]
    return described


def _node(node: Node, numbers: dict[Node, int]) -> Any:
    arguments = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda each: f"%{numbers[each]}")
    meta = sorted((str(key), repr(value)) for key, value in node.meta.items() if key not in _IGNORED)
    name = node.name if node.op in ("placeholder", "get_attr") else ""
    return node.op, str(node.target), name, repr(arguments), meta, describe_value(node.meta.get("val"))


def describe_value(value: Any) -> Any:
    """Return what a fake tensor, or a structure of them, says about a value."""
    return [_leaf(leaf) for leaf in pytree.tree_leaves(value)], str(pytree.tree_structure(value))


def _leaf(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return str(leaf)
    sizes = str(tuple(leaf.size())), str(leaf.stride()), str(leaf.storage_offset())
    return type(leaf).__name__, *sizes, leaf.dtype, str(leaf.device), leaf.requires_grad
