"""What torch keeps of tensors and of what calls on them go through, asked for at each call of a delegate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["function_modes", "version", "versions"]


def function_modes() -> int:
    """Return how many modes there are that torch functions go through: a default device is one."""
    return int(torch._C._len_torch_function_stack())


def version(tensor: torch.Tensor) -> int:
    """Return how often torch has written to a tensor's memory; 0 where it does not count."""
    return 0 if tensor.is_inference() else int(tensor._version)


def versions(tensors: Sequence[Any]) -> list[int]:
    """Return how often torch has written to each of some tensors' memory; what is no tensor is left out.

    It is called twice for each call of a delegate.
    """
    try:
        return [tensor._version for tensor in tensors if type(tensor) is torch.Tensor]
    except RuntimeError:  # tensors of inference mode have no count
        return []
