"""A store that keeps every weight once, across all partitions and methods that backends lower."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exir_lowering._upstream.tensors import version
from exir_lowering.errors import InputError
from exir_lowering.graphs.operators.pure import DTYPES

_ALIGNMENT = 16


def extent_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie between a tensor's first and last one, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@dataclass(frozen=True, slots=True)
class WeightRef:
    """Where the elements of a tensor are in the named data, and how they are laid out.

    Attributes:
        key: The key of the named data; "" if all elements are zero and nothing is stored.
        offset: The offset of the first element, in bytes.
        dtype: The type of the elements.
        shape: The sizes.
        strides: The strides, in elements.
    """

    key: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def to_json(self) -> list[Any]:
        """Return the reference as a list that JSON can hold, for a payload; `from_json` reads it."""
        return [self.key, self.offset, str(self.dtype).removeprefix("torch."), list(self.shape), list(self.strides)]

    @classmethod
    def from_json(cls, fields: Any) -> WeightRef:
        """Make a reference from what `to_json` returned; InputError if it is something else."""
        try:
            key, offset, dtype, shape, strides = fields
            kind = DTYPES[dtype]
            numbers = (offset, *shape, *strides)
            sound = isinstance(key, str) and len(shape) == len(strides)
            if sound and all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
                return cls(key, offset, kind, tuple(shape), tuple(strides))
        except (TypeError, ValueError, KeyError):
            pass
        raise InputError(f"A reference to a weight is damaged: {str(fields)[:200]}. Lower the model again.")

    def load(self, named_data: Callable[[str], bytes | None]) -> torch.Tensor:
        """Load the tensor into its own memory.

        Args:
            named_data: Returns named data by key, such as `DelegateContext.named_data`.

        Returns:
            The tensor.

        Raises:
            InputError: The data is missing, or too short.
        """
        extent = extent_of(self.shape, self.strides) * self.dtype.itemsize
        if not self.key:
            try:
                zeros = torch.zeros(extent // self.dtype.itemsize, dtype=self.dtype)
            except (RuntimeError, MemoryError) as error:
                raise InputError(
                    f"A weight of zeros, {self.dtype}{list(self.shape)}, cannot be made: {error}."
                ) from None
            return zeros.as_strided(self.shape, self.strides)
        data = named_data(self.key)
        if data is None:
            raise InputError(
                f"The file has no named data {self.key!r}: load it with the data files it was saved with. If it was "
                "saved without any, its backend did not return the data (data_store_output)."
            )
        if len(data) < self.offset + extent:
            raise InputError(
                f"Named data {self.key!r} has {len(data)} bytes, expected at least {self.offset + extent}: the file or "
                f"one of its data files is damaged. Save it again."
            )
        # A copy: the runtime may free its data after loading, and need not align it as the elements are.
        memory = torch.empty(extent, dtype=torch.uint8)
        memory.numpy().data[:] = memoryview(data)[self.offset : self.offset + extent]
        return memory.view(self.dtype).as_strided(self.shape, self.strides)


class WeightStore:
    """Refers to tensors by their content.

    Tensors that share memory are stored as one piece, and so are tensors with the same content; the reference says how
    a tensor is laid out in the piece. All-zero pieces are not stored.

    Args:
        tensors: Tensors that `ref` may be called with, so that overlapping ones become one piece. They are read on its
            first call, are not changed, and stay alive as long as the store.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._announced: Iterable[torch.Tensor] = tensors
        self._data: dict[str, bytes] = {}
        self._referred: set[str] = set()
        self._pieces: dict[int, list[_Piece]] = {}  # by the address of the storage, which each piece keeps alive

    def ref(self, tensor: torch.Tensor) -> WeightRef:
        """Return a reference to a tensor, which is added if the store does not have it.

        Args:
            tensor: A dense tensor on the CPU. A view of a stored one, such as its `detach()`, is found by its memory.
                If torch has written to it since it was stored, it is stored again.

        Raises:
            InputError: The tensor is sparse, quantised, or not on the CPU.
        """
        self._add_announced()
        memory, start, end = span = _span(tensor)
        if tensor.numel() == 0:
            return WeightRef("", 0, tensor.dtype, tuple(memory.shape), memory.stride())
        pieces = self._pieces.setdefault(_address(memory), [])
        piece = next((piece for piece in pieces if piece.has(memory, start, end)), None)
        if piece is None:
            piece = self._store([span])  # or it was written to since it was stored
            pieces.append(piece)
        if piece.key:
            self._referred.add(piece.key)
        offset = start - piece.start if piece.key else 0
        return WeightRef(piece.key, offset, tensor.dtype, tuple(memory.shape), piece.strides or memory.stride())

    def named_data(self, refs: Iterable[WeightRef]) -> Any:
        """Return the data of some references, each key once, for `PreprocessResult.data_store_output`."""
        from exir_lowering._upstream import delegates  # not at the top: reading references needs no compiler

        keys = dict.fromkeys(ref.key for ref in refs if ref.key)
        return delegates.named_data({key: self._data[key] for key in keys}, _ALIGNMENT)

    @property
    def referred(self) -> frozenset[str]:
        """The keys that `ref` has returned."""
        return frozenset(self._referred)

    @property
    def sizes(self) -> dict[str, int]:
        """The size in bytes of each key that is stored so far."""
        return {key: len(data) for key, data in self._data.items()}

    def _add_announced(self) -> None:
        announced, self._announced = self._announced, ()
        by_storage: dict[int, list[_Span]] = {}
        for tensor in announced:
            if _plain(tensor) and tensor.numel() > 0:
                span = _span(tensor)
                by_storage.setdefault(_address(span[0]), []).append(span)
        for address, spans in by_storage.items():
            groups: list[list[_Span]] = []  # overlapping spans share a piece
            reached = 0
            for span in sorted(spans, key=lambda span: span[1:]):
                if span[1] >= reached:
                    groups.append([])
                groups[-1].append(span)
                reached = max(reached, span[2])
            self._pieces[address] = list(map(self._store, groups))

    def _store(self, spans: Sequence[_Span]) -> _Piece:
        """Store overlapping spans of a storage as one piece; one with holes is packed if it is alone."""
        # Storages at the same address may differ in length: that of the span which reaches farthest is long enough.
        memory, _, end = max(spans, key=lambda span: span[2])
        start = min(span[1] for span in spans)
        places = {(begin, other.shape, other.stride()) for other, begin, _ in spans}
        packed = len(places) == 1 and memory.numel() * memory.element_size() < end - start
        strides = torch.empty(memory.shape, device="meta").stride() if packed else ()
        whole = memory.contiguous() if packed else memory
        place, size = (0, whole.numel() * whole.element_size()) if packed else (start, end - start)
        raw = torch.empty(0, dtype=torch.uint8).set_(whole.untyped_storage(), place, (size,), (1,))
        data, key = raw.numpy().tobytes(), ""
        if data.count(0) != len(data):
            key = hashlib.sha256(data).hexdigest()[:32]
            self._data.setdefault(key, data)
        return _Piece(memory, start, end, strides, version(memory), key)


_Span = tuple[torch.Tensor, int, int]  # A tensor's memory, and the bytes of its storage that it covers


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"


def _address(memory: torch.Tensor) -> int:
    return memory.untyped_storage().data_ptr()


def _span(tensor: torch.Tensor) -> _Span:
    if not _plain(tensor):
        raise InputError(
            f"A weight of shape {list(tensor.shape)} cannot be stored: got layout {tensor.layout}, device "
            f"{tensor.device}{', quantised' if tensor.is_quantized else ''}; expected a dense tensor on the CPU."
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    start = int(plain.storage_offset()) * plain.element_size()
    return plain, start, start + extent_of(plain.shape, plain.stride()) * plain.element_size()


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range of a storage that is stored as one."""

    memory: torch.Tensor  # the tensor that reaches farthest
    start: int  # the first byte
    end: int  # the byte after the last one
    strides: tuple[int, ...]  # after packing, if the piece is one tensor with holes; () if it is stored unchanged
    version: int  # how often the memory had been written to
    key: str  # of its data, "" if all bytes are zero

    def has(self, memory: torch.Tensor, start: int, end: int) -> bool:
        """Return whether the piece stores the current content of a tensor of the same storage."""
        if self.version != version(self.memory):
            return False
        if self.strides:
            own = (self.start, self.memory.shape, self.memory.stride(), self.memory.dtype)
            return own == (start, memory.shape, memory.stride(), memory.dtype)
        return self.start <= start and end <= self.end
