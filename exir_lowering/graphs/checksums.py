"""Checksums of weights, to detect writes into them."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def digest_weights(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return checksums of the memory of tensors by name, each storage once; those without readable memory have none."""
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
_FACTORS = bytearray(np.random.default_rng(0).bytes(8 * _BLOCK))
"""The factor of each word of a block. No tensor, as this may be imported while only fake ones are made."""


def checksum(storage: torch.UntypedStorage) -> int:
    """Return a checksum of a storage's memory.

    Blocks of 64-bit words are summed up at memory speed, each word times a factor, with a CRC over the sums. Of the
    words' highest bits, which are signs of numbers, such a sum only has whether an even number of them is set. So there
    is another sum, of the words that start in the middle of these.

    The factors are odd and random, so that no change of a single word, and hardly any other, goes unnoticed.
    """
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    count = memory.numel() // (8 * _BLOCK) if storage.data_ptr() % 8 == 0 else 0
    found = 0
    if count:
        factors = torch.frombuffer(_FACTORS, dtype=torch.int64) | 1
        for start, blocks in ((0, count), (4, (memory.numel() - 4) // (8 * _BLOCK))):
            if blocks:
                words = torch.frombuffer(memory.numpy().data, dtype=torch.int64, offset=start, count=blocks * _BLOCK)
                found = zlib.crc32((words.view(-1, _BLOCK) @ factors).numpy().data, found)
    rest = memory[max(count - 1, 0) * 8 * _BLOCK :]  # with the last block, whose middle words may have no block
    return zlib.crc32(rest.numpy().data, found)


def hash_storage(storage: torch.UntypedStorage) -> str:
    """Return the SHA-256 digest of a storage's memory, which is not copied."""
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    return hashlib.sha256(memory.numpy().data).hexdigest()
