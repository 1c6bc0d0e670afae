"""A store that keeps every weight once, across the partitions and methods that a backend lowers."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from exir_lowering.errors import InputError

__all__ = ["WeightRef", "WeightStore"]

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class WeightRef:
    """Where a tensor's elements are in the named data, and how they lie there.

    Attributes:
        key: The key of the named data; "" when all elements are zero and nothing is stored.
        offset: Where the first element is, in bytes.
        dtype: The type of the elements.
        shape: The sizes.
        strides: The strides, in elements.
    """

    key: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def load(self, named_data: Callable[[str], bytes | None]) -> torch.Tensor:
        """Make the tensor, in memory of its own.

        Raises:
            InputError: The data is missing, or too short.
        """
        extent = _extent(self.shape, self.strides) * self.dtype.itemsize
        if not self.key:
            return torch.zeros(extent // self.dtype.itemsize, dtype=self.dtype).as_strided(self.shape, self.strides)
        data = named_data(self.key)
        if data is None:
            raise InputError(f"The file has no named data {self.key!r}: load it with the data files it was saved with.")
        if len(data) < self.offset + extent:
            raise InputError(
                f"Named data {self.key!r} has {len(data)} bytes, expected at least {self.offset + extent}: the file or "
                f"one of its data files is damaged. Save it again."
            )
        # A copy: the runtime may free its data after loading, and need not align it as the elements are.
        memory = torch.empty(extent, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            memory.copy_(torch.frombuffer(data, dtype=torch.uint8, count=extent, offset=self.offset))
        return memory.view(self.dtype).as_strided(self.shape, self.strides)


class WeightStore:
    """Refers to tensors by what is in them.

    Tensors that share memory are stored as one piece, tensors of equal content as one piece too; how a tensor lies in
    the piece is a part of its reference. All-zero pieces are not stored.

    Args:
        tensors: All tensors that `ref` will be asked for. They are read, not changed, and kept while the store is.

    Raises:
        InputError: A tensor has no plain memory: it is sparse, quantised, or not on the CPU.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = {id(tensor): tensor for tensor in tensors}
        self._data: dict[str, bytes] = {}
        self._refs: dict[int, WeightRef] = {}
        by_storage: dict[int, list[_View]] = {}
        for tensor in self._tensors.values():
            view = _View.of(tensor)
            if tensor.numel() == 0:
                self._refs[id(tensor)] = WeightRef("", 0, tensor.dtype, view.shape, view.strides)
            else:
                by_storage.setdefault(view.memory.untyped_storage().data_ptr(), []).append(view)
        for views in by_storage.values():
            for piece in _pieces(views):
                self._store(piece)

    def ref(self, tensor: torch.Tensor) -> WeightRef:
        """Refer to one of the tensors that the store was made with.

        Raises:
            InputError: The store was made without it.
        """
        try:
            return self._refs[id(tensor)]
        except KeyError:
            raise InputError(
                "WeightStore.ref: this tensor is not among those that the store was made with. Make the store with the "
                "weights of all programs."
            ) from None

    def named_data(self, refs: Iterable[WeightRef]) -> Any:
        """Make what `PreprocessResult.data_store_output` takes: the data of some references, each key once."""
        from exir_lowering import _upstream  # not at the top: whoever reads references at run time needs no compiler

        keys = dict.fromkeys(ref.key for ref in refs if ref.key)
        return _upstream.named_data({key: self._data[key] for key in keys}, _ALIGNMENT)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each key."""
        return {key: len(data) for key, data in self._data.items()}

    def _store(self, piece: _Piece) -> None:
        data = piece.data()
        key = ""
        if data.count(0) != len(data):
            key = hashlib.sha256(data).hexdigest()[:32]
            self._data.setdefault(key, data)
        for view in piece.views:
            tensor = self._tensors[view.owner]
            self._refs[view.owner] = WeightRef(
                key, view.start - piece.start if key else 0, tensor.dtype, view.shape, piece.strides or view.strides
            )


@dataclass(frozen=True, slots=True)
class _View:
    """The bytes of a storage that a tensor reaches."""

    owner: int
    memory: torch.Tensor
    start: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _View:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise InputError(
                f"A weight of shape {list(tensor.shape)} cannot be stored: got layout {tensor.layout}, device "
                f"{tensor.device}{', quantised' if tensor.is_quantized else ''}; expected a dense tensor on the CPU."
            )
        plain = tensor.detach().resolve_conj().resolve_neg()
        shape, strides, item = tuple(plain.shape), tuple(plain.stride()), plain.element_size()
        start = int(plain.storage_offset()) * item
        return cls(id(tensor), plain, start, start + _extent(shape, strides) * item, shape, strides)


@dataclass(slots=True)
class _Piece:
    """A range of a storage that is stored as one, and the tensors in it."""

    start: int
    end: int
    views: list[_View] = field(default_factory=list)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides after packing, when the piece is one view with holes; () when it is stored as it lies."""
        view = self.views[0]
        alone = all((v.start, v.shape, v.strides) == (view.start, view.shape, view.strides) for v in self.views)
        elements = view.memory.numel() * view.memory.element_size()
        return torch.empty(view.shape, device="meta").stride() if alone and elements < self.end - self.start else ()

    def data(self) -> bytes:
        memory = max(self.views, key=lambda view: view.end).memory  # storages of one address may differ in length
        if self.strides:
            memory = memory.contiguous()
            start, end = 0, memory.numel() * memory.element_size()
        else:
            start, end = self.start, self.end
        raw = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage(), start, (end - start,), (1,))
        return bytes(raw.numpy().tobytes())


def _pieces(views: Sequence[_View]) -> Iterator[_Piece]:
    """Yield the ranges of a storage that views cover; overlapping views are in one."""
    piece: _Piece | None = None
    for view in sorted(views, key=lambda v: (v.start, v.end)):
        if piece is None or view.start >= piece.end:
            if piece is not None:
                yield piece
            piece = _Piece(view.start, view.end)
        piece.end = max(piece.end, view.end)
        piece.views.append(view)
    if piece is not None:
        yield piece


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie between a tensor's first and last one, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
