"""What the parts of a call are for: a profile's rows, added up by kind."""

from __future__ import annotations

import re
from collections import Counter

from exir_lowering.runtime.profiling import Profile, ProfileRow

_KINDS = {
    "depthwise": r"Convolution .*DWConv",
    "products with weights": r"(Fully Connected|Convolution|Deconvolution)",
    "products of two values": r"Batch Matrix Multiply",
    "softmax": r"Softmax",
    "pads": r"Constant Pad",
    "copies and transposes": r"(Transpose|Static Reshape|Static Slice|Copy|Slice|Concatenate|Even Split|Split)",
    "pooling and sums": r"(Average Pooling|Max Pooling|Global|Mean|Sum|Static (Mean|Sum|Reduce)|Reduce|ArgMax)",
    "resizing": r"Resize",
}
"""Kinds by the start of what XNNPACK calls its operators; others are elementwise."""

KINDS = (*_KINDS, "elementwise", "delegates' set-up", "host kernels", "runtime")


def kind_of(row: ProfileRow) -> str:
    """Return the kind of a kernel or of an instruction of XNNPACK."""
    if row.kind == "kernel":
        return "host kernels"
    return next((kind for kind, start in _KINDS.items() if re.match(start, row.name)), "elementwise")


def by_kind(profile: Profile) -> dict[str, float]:
    """Return milliseconds of one call by kind: all of it, so that what is left is the runtime's and delegates' own."""
    found: Counter[str] = Counter()
    for row in profile.rows:
        if row.kind == "method":
            found["runtime"] += row.milliseconds
        elif row.kind == "instruction":
            found[kind_of(row)] += row.milliseconds
            found["delegates' set-up"] -= row.milliseconds
        else:
            found["delegates' set-up" if row.kind == "delegate" else "host kernels"] += row.milliseconds
            found["runtime"] -= row.milliseconds
    return {kind: found[kind] / profile.runs for kind in KINDS if kind in found}


def by_operator(profile: Profile) -> dict[str, float]:
    """Return milliseconds of one call by operator and the number of its calls, the slowest first."""
    calls: Counter[str] = Counter()
    took: Counter[str] = Counter()
    for row in profile.rows:
        if row.kind in ("kernel", "instruction"):
            name = re.sub(r" #\d+$", "", row.name)
            calls[name] += row.calls
            took[name] += row.milliseconds
    return {f"{name} x {calls[name] // profile.runs}": total / profile.runs for name, total in took.most_common()}
