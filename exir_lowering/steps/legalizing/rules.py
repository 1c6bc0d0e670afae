"""Rules: what computes an operator by other ones."""

from collections.abc import Callable, Mapping
from typing import Any

import torch


def _remainder(a, b):
    r = torch.fmod(a, b)
    return torch.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


RULES: Mapping[str, Callable[..., Any]] = {"aten.remainder.Tensor": _remainder, "aten.remainder.Scalar": _remainder}
