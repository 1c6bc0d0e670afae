"""Checksums of weights, to detect writes into them."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch


def digest_weights(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Compute checksums of the memory of tensors, each storage once, without copying it.

    Args:
        tensors: Tensors by name.

    Returns:
        A value that identifies the content, for each name except those of tensors without readable memory (fake, meta,
        sparse).
    """
    storages: dict[int, tuple[int, ...]] = {}
    digests: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        if not is_readable(tensor):
            continue
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in storages:
            storages[key] = (key, storage.nbytes(), checksum(storage))
        digests[name] = storages[key]
    return digests


def is_readable(tensor: Any) -> bool:
    """Return whether a tensor has memory that can be read as it is: not fake, sparse or of a subclass."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)  # subclasses may not have their own memory
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
    )


_BLOCK = 512


def checksum(storage: torch.UntypedStorage) -> int:
    """Return a checksum of a storage's memory.

    Blocks of 64-bit words are summed up at memory speed, each word times a factor, with a CRC over the sums.

    The factors are odd and differ, so that no change of a single word, and hardly any exchange of two, goes unnoticed.
    """
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    words = memory[: memory.numel() // 8 * 8].view(torch.int64) if storage.data_ptr() % 8 == 0 else memory[:0]
    blocks = words[: words.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK) @ torch.arange(1, 2 * _BLOCK, 2)
    rest = memory[blocks.numel() * _BLOCK * 8 :] if words.numel() else memory
    return zlib.crc32(rest.numpy().data, zlib.crc32(blocks.numpy().data))


def hash_storage(storage: torch.UntypedStorage) -> str:
    """Return the SHA-256 digest of a storage's memory, which is not copied."""
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    return hashlib.sha256(memory.numpy().data).hexdigest()


def find_changed(before: Mapping[str, tuple[int, ...]], after: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    """Return the names whose digest changed."""
    return [name for name, digest in before.items() if after.get(name) != digest]
