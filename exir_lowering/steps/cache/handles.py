"""Debug handles, kept apart from the key: a partition is lowered with handles 1 to n, and its own are put back.

An operator that is inserted early in a model shifts the handles of all operators after it, and they are in payloads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from executorch.exir.backend.backend_details import PreprocessResult
from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering.graphs import debug_handles
from exir_lowering.plugins.payload import PayloadChecks

_MOST = 65_534
"""Backends use 65535 for operators that they make themselves."""


def number_handles(program: ExportedProgram) -> dict[int, int] | None:
    """Return a number for each debug handle of a partition: 1 to n, in the order in which they first occur.

    Return None if an operator has no handle, or there are too many.
    """
    numbers: dict[int, int] = {}
    for _, module in graphs.walk(program.graph_module):
        for node in module.graph.nodes:
            handle = debug_handles.handle(node)
            if handle is not None:
                numbers.setdefault(handle, len(numbers) + 1)
            elif node.op == "call_function":
                return None
    return numbers if len(numbers) <= _MOST and max(numbers, default=0) < 1 << 32 else None


def with_handles(program: ExportedProgram, handles: Mapping[int, int]) -> ExportedProgram:
    """Copy a program, with other debug handles."""
    copied = graphs.copy_program(program, kind=type(program))
    for _, module in graphs.walk(copied.graph_module):
        for node in module.graph.nodes:
            handle = debug_handles.handle(node)
            if handle is not None:
                node.meta[debug_handles.KEY] = handles[handle]
    return copied


def put_back(
    result: PreprocessResult, numbers: Mapping[int, int], payloads: PayloadChecks | None = None
) -> PreprocessResult:
    """Return the result of a partition that was lowered with handles 1 to n, with its own handles.

    Without `payloads`, those in the payload stay numbers. Raise CorruptError if the payload is damaged.
    """
    handles = {number: handle for handle, number in numbers.items()}
    table = result.debug_handle_map
    if isinstance(table, Mapping):
        table = {key: renumber(named, handles) for key, named in table.items()}
    payload = result.processed_bytes
    if payloads is not None:
        payload = payloads.replace_handles(payload, handles)
    return replace(result, processed_bytes=payload, debug_handle_map=table)


def renumber(named: Any, handles: Mapping[int, int]) -> Any:
    """Return the handle, or handles, that an entry of a debug handle map names, each replaced if it is known."""
    if isinstance(named, (tuple, list)):
        return type(named)(handles.get(handle, handle) for handle in named)
    return handles.get(named, named)
