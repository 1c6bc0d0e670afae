"""The checks of XNNPACK's payloads: the entry point of the group `exir_lowering.payloads`."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from exir_lowering.backends.xnnpack.payload import graph
from exir_lowering.backends.xnnpack.payload.graph import BACKEND, Graph, XNNDatatype, XNNGraph, XNode
from exir_lowering.backends.xnnpack.payload.reading import read_graph, split_payload
from exir_lowering.backends.xnnpack.payload.shapes import infer
from exir_lowering.plugins import PROVENANCE
from exir_lowering.plugins.payload import (
    KINDS,
    CheckedPayload,
    CorruptError,
    PayloadChecks,
    PayloadOperator,
    Tensor,
    ValueSpec,
    root,
)

if TYPE_CHECKING:
    from exir_lowering.plugins import ExecutorchBackend

# ConvertToLinearPass looks for linear layers by the source of a node, and in which module it is.
_READ = frozenset({"torch_fn", "source_fn_stack", "nn_module_stack"})

_HANDLE = struct.Struct("<I")
_OWN = 65535
"""The handle of nodes that XNNPACK's passes make."""

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

_NAMES: Mapping[int, str] = MappingProxyType(
    {datatype.value: datatype.name.removeprefix("XNN_DATATYPE_").lower() for datatype in XNNDatatype}
)
"""What messages call the datatypes."""


@contextmanager
def _named() -> Iterator[None]:
    """Name the backend in an error."""
    try:
        yield
    except CorruptError as error:
        raise CorruptError(f"a payload of {BACKEND!r}: {error}") from None


class XnnpackPayloads(PayloadChecks):
    """Checks what XNNPACK trusts, and says what ExecuTorch 1.5's `XnnpackBackend` reads."""

    backend_id = BACKEND
    made_by = "executorch.backends.xnnpack.xnnpack_preprocess.XnnpackBackend"
    unread = PROVENANCE - _READ if metadata.version("executorch").startswith("1.5.") else frozenset()
    replaces_handles = True

    def check(self, payload: memoryview) -> CheckedPayload:
        """Check a payload; see `PayloadChecks`."""
        with _named():
            return _Checked(read_graph(payload))

    def find_backend(self) -> type[ExecutorchBackend]:
        """Return the backend that lowers with the class; see `PayloadChecks`."""
        from exir_lowering.backends.xnnpack.backend import XnnpackBackend  # not to run a file

        return XnnpackBackend

    def replace_handles(self, payload: bytes, handles: Mapping[int, int]) -> bytes:
        """Replace the debug handles of nodes, in place; see `PayloadChecks`."""
        # A handle that is not 0 always takes four bytes in its node's table. ExecuTorch's writer leaves out numbers
        # that are 0, and lays out tables by which fields are present, not by their values.
        changed = bytearray(payload)
        tables, _ = split_payload(memoryview(changed))
        places: dict[int, int] = {}
        for node in root(tables).tables(XNNGraph.XNODES):
            place, handle = node.place(XNode.DEBUG_HANDLE), node.number(XNode.DEBUG_HANDLE, "I")
            if place is None or (handle == _OWN and handle not in handles):
                continue
            if place in places or not 0 < handles.get(handle, 0) < 1 << 32:
                raise CorruptError(f"a node has the debug handle {handle}, which its partition does not have")
            places[place] = handles[handle]
        for place, handle in places.items():
            _HANDLE.pack_into(tables, place, handle)
        return bytes(changed)


@dataclass(frozen=True, slots=True)
class _Checked(CheckedPayload):
    """A payload whose graph is valid."""

    graph: Graph

    @property
    def weights(self) -> Mapping[str, int]:
        """The named data that it reads, and how many bytes of each."""
        return self.graph.weights

    def describe(self) -> Sequence[PayloadOperator]:
        """Return its operators; see `CheckedPayload`."""
        return [
            PayloadOperator(
                node.type.name,
                tuple(self._show(id_) for id_ in node.inputs if id_ != graph.NO_VALUE),
                tuple(map(self._show, node.outputs)),
            )
            for node in self.graph.nodes
        ]

    def _show(self, id_: int) -> str:
        value = self.graph.values[id_]
        kind = _NAMES.get(value.datatype, f"datatype {value.datatype}")
        return f"{'constant ' if value.constant else ''}{kind}{list(value.dims)}"

    @_named()
    def check_call(self, arguments: Sequence[ValueSpec]) -> None:
        """Check the values of a call, whose memory XNNPACK reads and writes unchecked; see `CheckedPayload`."""
        tensors: dict[int, Tensor] = {}
        for value in self.graph.values.values():
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
        values = self.graph.values
        given = {id_: _dims(tensor) for id_, tensor in tensors.items() if values[id_].given}
        dynamic = any(tensor.dynamic for tensor in tensors.values())
        if self.graph.misdeclared and not dynamic:
            raise CorruptError(self.graph.misdeclared)
        shapes = infer(values, self.graph.nodes, given, bounds=dynamic)
        for id_, tensor in tensors.items():
            same = len(shapes[id_]) == len(tensor.sizes) if tensor.dynamic else shapes[id_] == _dims(tensor)
            if not values[id_].given and not same:
                raise CorruptError(
                    f"it makes a result of shape {list(shapes[id_])}, but value {values[id_].external} is {tensor}"
                )


def _dims(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions in XNNPACK's order."""
    if tensor.dim_order == (0, 2, 3, 1):
        return tuple(tensor.sizes[dim] for dim in tensor.dim_order)
    return tensor.sizes
