"""Shapes and strides that can be compared without a decision about sizes that are known only when the program runs.

`size == 4` is a question to torch's shape environment: if the size was 4 at export, the answer is yes, and the program
is noted to be right for that size only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch.fx import Node


def describe_sizes(sizes: Iterable[Any]) -> tuple[Hashable, ...]:
    """Return sizes or strides so that equal ones are equal in every run: numbers, and expressions of symbols."""
    return tuple(size if isinstance(size, int) else str(size.node.expr) for size in sizes)


def describe_layout(node: Node) -> Hashable:
    """Return the dtype, shape and strides of a node's tensor; of a node without one, what identifies only itself."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return node
    return value.dtype, describe_sizes(value.shape), describe_sizes(value.stride())
