"""How the views write numbers and shorten long texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def size(count: int) -> str:
    """Write a number of bytes: 17 B, 4.1 kB, 2.0 MB."""
    return _scale(count, ("B", "kB", "MB", "GB", "TB"))


def operations(count: int) -> str:
    """Write a number of floating-point operations: 17, 4.1 k, 2.0 M."""
    return _scale(count, ("", "k", "M", "G", "T", "P")).rstrip()


def duration(seconds: float) -> str:
    """Write a time: 0 s, 17.0 us, 4.1 ms, 2.0 s."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 0.9995:
            return f"{seconds * factor:,.1f} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0 s"


def many(count: int, noun: str) -> str:
    """Write a count and its noun: 1 operator, 2,000 operators."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def middle(text: str, width: int) -> str:
    """Shorten a text in the middle."""
    if len(text) <= width:
        return text
    kept = width - 1
    return f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"


def head(text: str, width: int) -> str:
    """Shorten a text at its end."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def tail(text: str, width: int) -> str:
    """Shorten a text at its start."""
    return text if len(text) <= width else f"…{text[len(text) - width + 1 :]}"


def path(names: Sequence[str], most: int = 6) -> str:
    """Write a path; a long one is shortened in the middle."""
    if len(names) <= most:
        return " -> ".join(names)
    front, back = most - most // 2, most // 2
    return " -> ".join([*names[:front], f"({len(names) - most:,} more)", *names[len(names) - back :]])


def span(names: Sequence[str]) -> str:
    """Name the nodes that something is about: one node, or their number with the first and the last."""
    if len(names) < 2:
        return "".join(names) or "nothing"
    return f"{len(names):,} nodes from {names[0]} to {names[-1]}"


def format_count(counts: Mapping[str, int], most: int = 2) -> str:
    """Write the most frequent names with their counts: 4 x add, 2 x mul, 3 more."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{count:,} x {name}" for name, count in ordered[:most]]
    left = sum(count for _, count in ordered[most:])
    return ", ".join([*shown, f"{left:,} more"] if left else shown)


def _scale(count: int, units: Sequence[str]) -> str:
    value = float(count)
    for unit in units[:-1]:
        if abs(value) < 999.95 or (unit == units[0] and abs(value) < 1000):
            return f"{count:,} {unit}" if unit == units[0] else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} {units[-1]}"
