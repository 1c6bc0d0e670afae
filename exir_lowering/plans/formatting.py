"""How the views write numbers, shorten long texts, and name operators, modules and places in the source."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from exir_lowering.plans.planned import PlannedNode


def size(count: int) -> str:
    """Write a number of bytes: 17 B, 4.1 kB, 2.0 MB."""
    return _scale(count, ("B", "kB", "MB", "GB", "TB"))


def operations(count: int) -> str:
    """Write a number of floating-point operations: 17, 4.1 k, 2.0 M."""
    return _scale(count, ("", "k", "M", "G", "T", "P")).rstrip()


def many(count: int, noun: str) -> str:
    """Write a count and its noun: 1 operator, 2,000 operators."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


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


_OPERATOR = re.compile(r"\w+\.(\w+)\.\w+")
_SOURCE = re.compile(r'File "(.+?)", line (\d+), in ([^:\s]+)(?:: (.*))?', re.DOTALL)

_ALMOST_ALL = 0.8  # the share of operators that gives the others its name


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operator came from."""

    short: str  # the file and the line, such as "modeling_bert.py:451", "" if not known
    full: str  # the whole path with the line, the function and the code


def place(source: str) -> Place:
    """Return the place that a source line names; what has another form is kept as it is."""
    found = _SOURCE.fullmatch(source)
    if found is None:
        return Place(source, source)
    file, line, function, code = found.groups()
    short = re.split(r"[/\\]", file)[-1]
    return Place(f"{short}:{line}", f"{file}:{line}, in {function}" + (f": {code}" if code else ""))


def short_operator(name: str) -> str:
    """Return `linear` for `aten.linear.default`."""
    found = _OPERATOR.fullmatch(name)
    return found[1] if found else name


def count_operators(nodes: Iterable[PlannedNode], most: int = 3) -> str:
    """Write what some nodes do, what computes most first: linear x4, gelu, 12 more."""
    counts: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    for node in nodes:
        name = short_operator(node.operator)
        counts[name] += 1
        flops[name] += node.flops
    ordered = sorted(counts, key=lambda name: (-flops[name], -counts[name], name))
    words = [name if counts[name] == 1 else f"{name} x{counts[name]:,}" for name in ordered[:most]]
    left = sum(counts[name] for name in ordered[most:])
    return ", ".join([*words, f"{left:,} more"] if left else words)


def name_modules(modules: Iterable[str]) -> str:
    """Name some operators' modules together: the one that holds almost all, or the first and the last in it.

    "encoder.layer.0-11" for numbered ones, "encoder.layer.3.intermediate … output" for others, "" if none is known.
    """
    paths = [path.split(".") for path in modules if path]
    shared: list[str] = []
    while True:
        inner = Counter(path[len(shared)] for path in paths if len(path) > len(shared))
        if not inner:
            return ".".join(shared)
        (name, count), *_ = inner.most_common(1)
        if count < len(paths) * _ALMOST_ALL:
            break
        shared.append(name)
        paths = [path for path in paths if path[: len(shared)] == shared]
    if all(name.isdecimal() for name in inner):
        return ".".join([*shared, "-".join(dict.fromkeys((min(inner, key=int), max(inner, key=int))))])
    names = list(inner)
    if len(names) == 1:
        return ".".join(shared or names)
    return f"{'.'.join([*shared, names[0]])} … {names[-1]}"


def name_nodes(nodes: Sequence[PlannedNode]) -> str:
    """Name some operators by their modules, or by what they are where no module is known."""
    return name_modules(node.module for node in nodes) or count_operators(nodes) or many(0, "operator")
