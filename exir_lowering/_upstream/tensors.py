"""What torch records about tensors; read at each delegate call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # has no memory; `fakes` imports sympy
from torch.utils import _pytree  # takes results apart; `programs` imports sympy

pytree = _pytree
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)  # numbers that may be symbolic

KINDS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)  # whose memory is all that there is to them


def is_readable(value: Any) -> bool:
    """Return whether a value is a tensor with memory that can be read as it is: not fake, sparse or of a subclass."""
    return type(value) in KINDS and value.layout is torch.strided and bool(value.device.type == "cpu")


def is_dense(value: Any) -> bool:
    """Return whether a value is a tensor whose memory has numbers: readable, and not quantized."""
    return is_readable(value) and not value.is_quantized


def is_plain(value: Any) -> bool:
    """Return whether a value is a dense tensor whose memory has its elements as they are."""
    return is_dense(value) and not (value.is_neg() or value.is_conj())


def version(tensor: torch.Tensor) -> int:
    """Return how often torch has written to a tensor's memory; 0 if it does not count."""
    return 0 if tensor.is_inference() else int(tensor._version)


def versions(tensors: Sequence[Any]) -> list[int]:
    """Return how often torch has written to the memory of each tensor among values; read twice per delegate call."""
    try:
        return [tensor._version for tensor in tensors if type(tensor) is torch.Tensor]
    except RuntimeError:  # tensors of inference mode have no count
        return []
