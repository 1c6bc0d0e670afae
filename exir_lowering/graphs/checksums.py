"""Checksums of weights, to detect writes into them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from exir_lowering._upstream.tensors import is_readable


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


def checksum(storage: torch.UntypedStorage) -> int:
    """Return a checksum of a storage's memory, which is not copied: XXH3 is as fast as memory is read."""
    return xxhash.xxh3_128_intdigest(_content(storage))


def hash_storage(storage: torch.UntypedStorage) -> str:
    """Return the SHA-256 digest of a storage's memory, which is not copied."""
    return hashlib.sha256(_content(storage)).hexdigest()


def _content(storage: torch.UntypedStorage) -> memoryview:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data
