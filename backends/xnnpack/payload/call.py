"""Check the arguments of a payload of XNNPACK, which reads and writes the memory of these tensors unchecked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from exir_lowering.backends.xnnpack.payload import graph
from exir_lowering.backends.xnnpack.payload.graph import BACKEND, Graph, GraphValue
from exir_lowering.backends.xnnpack.payload.shapes import infer
from exir_lowering.plugins.payload import KINDS, CorruptError, Tensor, ValueSpec

_DTYPES: Mapping[int, frozenset[torch.dtype]] = MappingProxyType(
    {
        graph.FP32: frozenset({torch.float32}),
        graph.FP16: frozenset({torch.float16}),
        graph.BF16: frozenset({torch.bfloat16}),
        graph.QINT8: frozenset({torch.int8}),
        graph.QUINT8: frozenset({torch.uint8}),
        graph.QINT32: frozenset({torch.int32}),
        graph.INT32: frozenset({torch.int32, torch.int64}),
    }
)
"""The dtypes that a value's tensor can have; ExecuTorch converts indices to int64 in place."""


def check_call(found: Graph, arguments: Sequence[ValueSpec]) -> None:
    """Check the values that a payload is called with, given the graph in it.

    Raises CorruptError if one is not a tensor, or lacks the type or shape that the graph reads or makes.
    """
    try:
        _check(found, arguments)
    except CorruptError as error:
        raise CorruptError(f"a payload of {BACKEND!r}: {error}") from None


def _check(found: Graph, arguments: Sequence[ValueSpec]) -> None:
    tensors: dict[int, Tensor] = {}
    for value in found.values.values():
        if value.external is None:
            continue
        if value.external >= len(arguments):
            raise CorruptError(f"it is called with {len(arguments)} values, but needs number {value.external}")
        argument = arguments[value.external]
        tensor = argument.content
        if not isinstance(tensor, Tensor):
            raise CorruptError(f"it is called with {KINDS[argument.kind]} as value {value.external}")
        if tensor.dtype not in _DTYPES.get(value.datatype, ()):
            raise CorruptError(
                f"value {value.external} is {tensor}, but its datatype in the payload is {value.datatype}"
            )
        if value.returned and tensor.constant:
            raise CorruptError(f"it writes into value {value.external}, which is a constant")
        tensors[value.id] = tensor
    given = {id_: _dims(tensor) for id_, tensor in tensors.items() if found.values[id_].given}
    shapes = infer(found.values, found.nodes, given)
    for id_, tensor in tensors.items():
        if not found.values[id_].given:
            _check_output(found.values[id_], tensor, shapes[id_])


def _dims(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions in XNNPACK's order."""
    if tensor.dim_order == (0, 2, 3, 1):
        return tuple(tensor.sizes[dim] for dim in tensor.dim_order)
    return tensor.sizes


def _check_output(value: GraphValue, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if shape != _dims(tensor):
        raise CorruptError(f"it makes a result of shape {list(shape)}, but value {value.external} is {tensor}")
