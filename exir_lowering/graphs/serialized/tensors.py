"""Tensors apart from the graph: pieces of memory, each once, and how tensors lie in them.

Tensors that share memory are written as views of one piece, and share memory again when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from exir_lowering.graphs.serialized.plain import NotSerialisableError
from exir_lowering.graphs.weights import extent_of

DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}
"""torch's dtypes by name, except those of its own quantised tensors."""

_ALIGNMENT = 64
"""Where pieces may start in a storage: the elements of a piece stay aligned when it is stored elsewhere."""

_MOST = 1 << 62


def name_dtype(dtype: torch.dtype) -> str:
    """Return a dtype's name; NotSerialisableError if it is not one of `DTYPES`."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise NotSerialisableError(f"the dtype {dtype}")
    return name


class TensorWriter:
    """Collects the tensors of a program."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []

    def write(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor; NotSerialisableError unless plain, dense, and in this process's memory."""
        number = self._numbers.get(id(tensor))
        if number is None:
            _require_plain(tensor)
            number = self._numbers[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
        return number

    def finish(self) -> tuple[list[Any], tuple[torch.Tensor, ...]]:
        """Return the description of each tensor, and the pieces of memory: bytes that are shared with the tensors."""
        storages: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
        for tensor in self._tensors:
            if tensor.numel():
                storage, start, end = _span(tensor)
                known = storages.get(storage.data_ptr())
                if known is not None:
                    storage = storage if storage.nbytes() > known[0].nbytes() else known[0]
                    start, end = min(start, known[1]), max(end, known[2])
                storages[storage.data_ptr()] = (storage, start // _ALIGNMENT * _ALIGNMENT, end)
        numbers = {address: number for number, address in enumerate(storages)}
        pieces = tuple(
            torch.empty(0, dtype=torch.uint8).set_(storage, start, (end - start,), (1,))
            for storage, start, end in storages.values()
        )
        described = []
        for tensor in self._tensors:
            number, offset = -1, 0
            if tensor.numel():
                address = tensor.untyped_storage().data_ptr()
                number = numbers[address]
                offset = int(tensor.storage_offset()) * tensor.element_size() - storages[address][1]
            layout = [name_dtype(tensor.dtype), list(tensor.shape), list(tensor.stride()), offset]
            described.append([number, *layout, isinstance(tensor, torch.nn.Parameter), tensor.requires_grad])
        return described, pieces


def _require_plain(tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise NotSerialisableError(f"a tensor of the class {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise NotSerialisableError(f"a tensor of layout {tensor.layout}{', quantised' * tensor.is_quantized}")
    if tensor.device.type != "cpu":
        raise NotSerialisableError(f"a tensor on the device {tensor.device}")
    if tensor.is_conj() or tensor.is_neg():
        raise NotSerialisableError("a tensor that is a conjugate or negative view")
    name_dtype(tensor.dtype)


def _span(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int, int]:
    """Return a tensor's storage, and its first and last byte in it."""
    item = tensor.element_size()
    start = int(tensor.storage_offset()) * item
    return tensor.untyped_storage(), start, start + extent_of(tensor.shape, tensor.stride()) * item


class TensorReader:
    """Makes tensors from what `TensorWriter.finish` returned, on the same pieces of memory, which are not copied."""

    def __init__(self, described: Sequence[Any], pieces: Sequence[torch.Tensor]) -> None:
        self._described, self._pieces = described, pieces
        self._made: dict[int, torch.Tensor] = {}
        for piece in pieces:
            plain = type(piece) is torch.Tensor and piece.dtype is torch.uint8 and piece.dim() == 1
            if not plain or not piece.is_contiguous() or piece.device.type != "cpu":
                raise ValueError("a piece of memory is a one-dimensional tensor of bytes on the CPU")
        needed = {fields[0] for fields in described} - {-1}
        if needed != set(range(len(pieces))):
            raise ValueError(f"got {len(pieces)} pieces of memory, expected those that the tensors are in: {needed}")

    def read(self, number: int) -> torch.Tensor:
        """Return a tensor, the same object each time; ValueError if it does not lie in its piece."""
        if number not in self._made:
            if not 0 <= number < len(self._described):
                raise ValueError(f"no tensor has the number {number}")
            self._made[number] = self._make(*self._described[number])
        return self._made[number]

    def _make(
        self, piece: int, dtype: str, shape: list[int], stride: list[int], offset: int, parameter: bool, gradient: bool
    ) -> torch.Tensor:
        numbers = (*shape, *stride, offset)
        if len(shape) != len(stride) or not all(type(one) is int and 0 <= one < _MOST for one in numbers):
            raise ValueError("the shape of a tensor is invalid")
        kind = DTYPES[dtype]
        if piece == -1:
            if 0 not in shape:
                raise ValueError("a tensor with elements has no memory")
            made = torch.empty_strided(shape, stride, dtype=kind)
        else:
            memory = self._pieces[piece]
            if offset + extent_of(shape, stride) * kind.itemsize > memory.numel() or 0 in shape:
                raise ValueError("a tensor is not inside its piece of memory")
            start = int(memory.storage_offset()) + offset
            if start % kind.itemsize or memory.data_ptr() % kind.itemsize:
                raise ValueError(f"a piece of memory is not aligned for {kind}")
            made = torch.empty(0, dtype=kind).set_(memory.untyped_storage(), start // kind.itemsize, shape, stride)
        if parameter is True:
            return torch.nn.Parameter(made, requires_grad=gradient is True)
        return made.requires_grad_(gradient is True)
