"""How two files differ: by method, delegate, kernel, weight and byte."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from exir_lowering.inspection import text
from exir_lowering.inspection.report import FileReport, MethodReport, as_data
from exir_lowering.plans.views import plain
from exir_lowering.pte.printing import Shown, printable, render


@dataclass(frozen=True, slots=True)
class Change:
    """Something that is not the same in two files.

    Attributes:
        what: "method", "signature", "delegate", "operators", "kernel", "memory", "weight", "bytes" or "provenance".
        name: Of what, with the method that it is in.
        before: What the first file has; "" for nothing.
        after: What the second one has.
    """

    what: str
    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Difference(Shown):
    """The differences between two files.

    Attributes:
        before: The name of the first file.
        after: The name of the second one.
        changes: The differences, () if the reports agree.
    """

    before: str
    after: str
    changes: tuple[Change, ...]

    def to_text(self, *, width: int = 120) -> str:
        """Return it as plain text."""
        if not self.changes:
            return printable(f"{self.before} and {self.after} have the same methods, weights and sizes.") + "\n"
        rows = [(one.what, one.name, one.before or "-", one.after or "-") for one in self.changes]
        title = f"{self.before} -> {self.after}"
        return render(text.section(title, ("what", "of", "before", "after"), rows, len(rows)), width)

    def to_json(self) -> str:
        """Return it as JSON: `{"version": 1, "before", "after", "changes": [{"what", "name", "before", "after"}]}`."""
        return json.dumps(as_data(self), indent=2)


def compare(before: FileReport, after: FileReport) -> Difference:
    """Return the differences between two files.

    Args:
        before: The report of the first file.
        after: The report of the second one.
    """
    return Difference(before.name, after.name, tuple(_changes(before, after)))


def _changes(before: FileReport, after: FileReport) -> Iterator[Change]:
    old, new = ({method.name: method for method in report.methods} for report in (before, after))
    for name in sorted(old.keys() | new.keys()):
        if name in old and name in new:
            yield from _method_changes(name, old[name], new[name])
        else:
            before_after = (repr(found[name].signature) if name in found else "" for found in (old, new))
            yield Change("method", name, *before_after)
    yield from _differ("weight", "", _weights(before), _weights(after))
    sizes = ({"size": report.size, **report.bytes_by_kind()} for report in (before, after))
    yield from _differ("bytes", "", *map(_shown, sizes))
    yield from _differ("provenance", "", _facts(before), _facts(after))


def _method_changes(name: str, old: MethodReport, new: MethodReport) -> Iterator[Change]:
    if repr(old.signature) != repr(new.signature):
        yield Change("signature", name, repr(old.signature), repr(new.signature))
    yield from _differ("delegate", f"{name}/", _delegates(old), _delegates(new))
    yield from _differ("operators", f"{name}/", _operators(old), _operators(new))
    yield from _differ("kernel", f"{name}: ", _shown(old.kernels), _shown(new.kernels))
    yield from _differ("memory", f"{name}: ", _shown(old.memory.heap), _shown(new.memory.heap))


def _differ(what: str, where: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield Change(what, f"{where}{key}", old.get(key, ""), new.get(key, ""))


def _shown(counts: Mapping[str, int]) -> dict[str, str]:
    return {name: f"{count:,}" for name, count in counts.items()}


def _delegates(method: MethodReport) -> dict[str, str]:
    return {str(one.number): f"{one.backend}, {one.payload_bytes:,} bytes" for one in method.delegates}


def _operators(method: MethodReport) -> dict[str, str]:
    found = {}
    for one in method.delegates:
        found[str(one.number)] = ", ".join(f"{each.name} {' '.join(each.outputs)}" for each in one.operators)
    return found


def _weights(report: FileReport) -> dict[str, str]:
    """Return the weights by name; those without a name are counted by their size."""
    found: dict[str, list[int]] = {}
    for one in report.stored:
        if one.kind != "payload":
            found.setdefault(one.name or f"{one.kind} without a name, {one.bytes:,} bytes", []).append(one.bytes)
    return {name: f"{len(sizes)} x {sizes[0]:,} bytes" for name, sizes in found.items()}


def _facts(report: FileReport) -> dict[str, str]:
    known: Any = plain(report.provenance) or {}
    facts = {key: json.dumps(known[key]) for key in ("options", "plan") if key in known}
    for table in ("versions", "backends"):
        facts.update({name: str(value) for name, value in known.get(table, {}).items()})
    for name, method in known.get("methods", {}).items():
        facts.update({f"{name}: {key}": json.dumps(method[key]) for key in ("partitioners", "rewrites")})
    return facts
