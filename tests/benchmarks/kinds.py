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
    """Return the kind of a row of a profile by operator."""
    if row.kind == "instruction":
        return next((kind for kind, start in _KINDS.items() if re.match(start, row.name)), "elementwise")
    return "host kernels" if row.kind == "kernel" else "delegates' set-up"


def by_kind(profile: Profile) -> dict[str, float]:
    """Return milliseconds of one call by kind; what the runtime takes beside all of them is one, too."""
    whole, *rows = profile.by_operator().rows
    found = Counter({"runtime": whole.milliseconds})
    for row in rows:
        found[kind_of(row)] += row.milliseconds
        found["runtime"] -= row.milliseconds
    return {kind: found[kind] / profile.runs for kind in KINDS if kind in found}


def by_operator(profile: Profile) -> dict[str, float]:
    """Return milliseconds of one call by operator and the number of its calls, the slowest first."""
    whole, *rows = profile.by_operator().rows
    found = {f"{row.name} x {row.calls // profile.runs}": row.milliseconds / profile.runs for row in rows}
    return found | {"runtime": whole.milliseconds / profile.runs - sum(found.values())}


PARTS = {"kind": by_kind, "operator": by_operator}
"""What the comparisons show of a profile."""
