"""Calls on which kernels of ExecuTorch 1.5 end the process, though PyTorch's operators return a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_FATAL = frozenset(
    {"aten::_log_softmax", "aten::amax", "aten::amin", "aten::narrow_copy", "aten::sum", "aten::unfold_copy"}
)


def why_fatal(
    own: str, described: Sequence[tuple[int, Any]], sizes: tuple[int, ...] | None, converts: bool
) -> str | None:
    """Return why a kernel ends the process where torch's operator returns a result, as a clause; None if it does not.

    These kernels divide by zero or abort. `described` has the kind and the content of each argument; `sizes` are those
    of the first tensor, None if uncertain; `converts` says whether the result has another type than that tensor.
    """
    if own not in _FATAL:
        return None
    dim = described[1][1]
    if own == "aten::narrow_copy" and isinstance(dim, int):
        return f"its dimension is {dim}, counted from the back" if dim < 0 else None
    if sizes is None:
        return None
    if own in ("aten::amax", "aten::amin"):
        return "its tensor has no elements" if 0 in sizes else None
    if own in ("aten::sum", "aten::unfold_copy"):
        summed_otherwise = own == "aten::sum" and converts  # by other code of the kernel
        given = sizes == () and dim not in (None, ()) and not summed_otherwise
        return "its tensor has no dimension, but it is given one" if given else None
    if own == "aten::_log_softmax" and isinstance(dim, int) and 0 not in sizes[:dim]:
        return "its rows have no elements" if 0 in sizes[dim:] else None
    return None
