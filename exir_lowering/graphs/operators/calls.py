"""What operators take and return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, such as a node's `meta["val"]`."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
