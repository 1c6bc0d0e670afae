"""Inputs and outputs as bytes: descriptions in JSON, and the content of the tensors, in their order in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def write(values: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Return descriptions of values, and the content of the tensors among them; it is copied where it has gaps."""
    described: list[Any] = []
    contents: list[Any] = []
    for value in values:
        if not isinstance(value, torch.Tensor):
            described.append({"value": value})
            continue
        order = sorted(range(value.dim()), key=tuple(value.stride()).__getitem__, reverse=True)
        name = str(value.dtype).removeprefix("torch.")
        described.append({"dtype": name, "shape": list(value.shape), "order": order})
        plain = value.detach().permute(order).contiguous().flatten()
        contents.append(plain.view(torch.uint8).numpy().data)
    return described, contents


def read(described: Sequence[Any], contents: Iterable[bytes]) -> list[Any]:
    """Return values from what `write` returned, tensors in separate memory."""
    rest = iter(contents)
    return [_tensor(one, next(rest)) if "dtype" in one else one["value"] for one in described]


def _tensor(described: Any, content: bytes) -> torch.Tensor:
    dtype, order = getattr(torch, described["dtype"]), described["order"]
    shape = [described["shape"][dim] for dim in order]
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.view(shape).permute([order.index(dim) for dim in range(len(order))])
