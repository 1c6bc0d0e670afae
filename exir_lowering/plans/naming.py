"""What the views call things: modules, operators and source lines by the names that the model's author knows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from exir_lowering.plans import formatting
from exir_lowering.plans.planned import PlannedNode

_OPERATOR = re.compile(r"\w+\.(\w+)\.\w+")
_SOURCE = re.compile(r'File "(.+?)", line (\d+), in ([^:\s]+)(?:: (.*))?', re.DOTALL)

_ALMOST_ALL = 0.8
"""The share of operators that gives the others its name."""


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
    return name_modules(node.module for node in nodes) or count_operators(nodes) or formatting.many(0, "operator")
