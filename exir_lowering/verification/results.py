"""What `verify` and `bisect` found, as values, JSON and text: what is off in words first, then a table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from exir_lowering.errors import few
from exir_lowering.plans.formatting import many
from exir_lowering.plans.planned import PlannedNode
from exir_lowering.pte.printing import Shown, make_table, render

VERSION = 3
"""Incremented when a field of the JSON changes its meaning or is removed."""

_ROWS, _LISTED = 12, 4  # how many outputs the table has, and how many things a list names before it counts the others


@dataclass(frozen=True, slots=True)
class OutputResult:
    """How far an output is from that of eager PyTorch, over all calls.

    Attributes:
        index: Which output of the file it is, from 0.
        name: What the program calls it.
        dtype: Its element type, such as "float32", or the type of a plain value.
        ok: Whether each call was within the tolerance.
        tolerance: The tolerance in words.
        largest_error: The largest absolute error of the worst call, which is the one furthest beyond its tolerance.
        allowed_error: The absolute error that was allowed in it.
        sqnr: The signal to error ratio in it, in dB; inf for equal outputs.
        cosine: The cosine of the angle between the outputs in it.
        case: The name of its case, such as "constant 0.5".
        call: Which call of the method in the case it is, from 1.
        problem: What is wrong where it is not the size of an error, such as NaN in other places; "" for nothing.
        off: The names of the cases in which it is off, in their order.
    """

    index: int
    name: str
    dtype: str
    ok: bool
    tolerance: str
    largest_error: float
    allowed_error: float
    sqnr: float
    cosine: float
    case: str
    call: int
    problem: str
    off: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MethodResult:
    """What was found about a method.

    Attributes:
        name: The method.
        outputs: Its outputs, in the order of the file.
        cases: The names of the cases that were compared.
        calls: How many calls were compared.
        skipped: How many calls were left out, as eager PyTorch refused their inputs.
        skipped_reason: What PyTorch said to the first of them.
        quantized: Whether the program is quantised.
        stateful: Whether the method has state.
        problem: Why the file failed in a call in which PyTorch did not, with the case; "" if it never did.
        kernel: The first operator that is wrong by itself on the host, if the method is off, with its kernels, module
            and source line; "" if there is none.
    """

    name: str
    outputs: tuple[OutputResult, ...]
    cases: tuple[str, ...]
    calls: int
    skipped: int
    skipped_reason: str
    quantized: bool
    stateful: bool
    problem: str
    kernel: str = ""

    @property
    def ok(self) -> bool:
        """Whether the file gave what eager PyTorch did in each call that was compared."""
        return not self.problem and all(output.ok for output in self.outputs)


@dataclass(frozen=True, slots=True, repr=False)
class Verification(Shown):
    """Whether a file computes what its programs do; `print` shows it.

    Attributes:
        file: What was verified.
        seed: The seed of the inputs that were generated, None where all were given.
        methods: What was found, by method, in the order of the programs.
        unverified: Methods of the file for which no program was given.
        apart: State that is one in eager PyTorch and not in the file, by name, with the methods that use it: none reads
            what the others write.
    """

    file: str
    seed: int | None
    methods: Mapping[str, MethodResult]
    unverified: tuple[str, ...] = ()
    apart: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every method matches eager PyTorch, and reads the state that it reads there."""
        return not self.apart and all(method.ok for method in self.methods.values())

    def to_text(self, *, width: int = 120) -> str:
        """Return what was found, what is off first, in words and as a table.

        Args:
            width: How many characters a line may have.
        """
        return render(_parts(self), width)

    def to_json(self) -> str:
        """Return it as JSON: `{"version": 3, "ok", "file", "seed", "methods": [...], "unverified": [], "apart": {}}`.

        A method has the attributes of `MethodResult` and "ok", outputs those of `OutputResult`. What is infinite, such
        as the SQNR of equal outputs, is null.
        """
        own = {name: getattr(self, name) for name in ("ok", "file", "seed")}
        methods = [{**asdict(method), "ok": method.ok} for method in self.methods.values()]
        return as_json(
            {"version": VERSION, **own, "methods": methods, "unverified": self.unverified, "apart": {**self.apart}}
        )

    def __repr__(self) -> str:
        off = [name for name, method in self.methods.items() if not method.ok]
        return f"Verification({self.file}: {'off in ' + ', '.join(off) if off else 'ok'})"


def as_json(value: Any) -> str:
    """Return a value as JSON, with null for numbers that JSON does not have."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None), indent=2)


def _parts(found: Verification) -> Iterator[RenderableType]:
    yield Text(summary(found))
    for line in describe_apart(found):
        yield Padding(Text(line), (0, 0, 0, 2))
    for method in found.methods.values():
        for line in problems(method):
            yield Padding(Text(line), (0, 0, 0, 2))
    yield Text("")
    yield _table(found)
    for method in found.methods.values():
        why = f", as PyTorch refused the inputs: {method.skipped_reason}"
        skipped = f"; {many(method.skipped, 'call')} left out{why}" if method.skipped else ""
        kind = ", quantised" * method.quantized + ", with state" * method.stateful
        counts = f"{many(len(method.cases), 'case')}, {many(method.calls, 'call')}"
        yield Text(f"{method.name}{kind}: {counts}{skipped}.")
    if found.unverified:
        yield Text(f"Not verified, as no program was given: {few(found.unverified, _LISTED)}.")
    drawn = "" if found.seed is None else f" Inputs were generated with seed {found.seed}."
    yield Text(f"Run in ExecuTorch's runtime and in eager PyTorch.{drawn}")


def summary(found: Verification) -> str:
    """Say in a sentence whether a file matches."""
    off = [name for name, method in found.methods.items() if not method.ok]
    calls = many(sum(method.calls for method in found.methods.values()), "call")
    if found.ok:
        return f"{found.file} matches eager PyTorch in {calls} of {many(len(found.methods), 'method')}."
    which = f"{few(off, _LISTED)} of {many(len(found.methods), 'method')}" if off else "methods do not share state"
    return f"{found.file} differs from eager PyTorch: {which}, in {calls}."


def describe_apart(found: Verification) -> Iterator[str]:
    """Say in sentences which methods do not share their state."""
    for methods in dict.fromkeys(found.apart.values()):
        names = few([name for name, users in found.apart.items() if users == methods], _LISTED)
        yield (
            f"{few(methods, _LISTED)} do not share {names}, which is one state in eager PyTorch: in the file none "
            "reads what the others write. Emit it with share_state=True (--share-state all)."
        )


def problems(method: MethodResult) -> Iterator[str]:
    """Say in sentences what is off in a method, the worst first."""
    if method.problem:
        yield f"{method.name} failed: {method.problem}"
    off = sorted((output for output in method.outputs if not output.ok), key=_badness, reverse=True)
    for output in off[:_LISTED]:
        what = output.problem or f"is off by {output.largest_error:.3g}; allowed: {output.allowed_error:.3g}"
        others = [name for name in output.off if name != output.case]
        more = f"; off too: {few(others, _LISTED)}" if others else ""
        where = f'in "{output.case}", call {output.call}{more}'
        yield f"{method.name}, output {output.index} ({output.name}) {what}: {where}."
    if len(off) > _LISTED:
        yield f"{method.name}: and {many(len(off) - _LISTED, 'more output')}."
    if method.kernel:
        yield f"{method.name}: {method.kernel}."


def _table(found: Verification) -> Table:
    columns = ["output", "", "largest", "allowed", "SQNR", "worst in"]
    rows = [(method, output) for method in found.methods.values() for output in method.outputs]
    rows.sort(key=lambda row: _badness(row[1]), reverse=True)
    lines = [
        (
            f"{method.name} {output.index}",
            "ok" if output.ok else "OFF",
            f"{output.largest_error:.2g}",
            f"{output.allowed_error:.2g}",
            "equal" if output.sqnr == math.inf and output.ok else f"{output.sqnr:.0f} dB",
            f"{output.case}, call {output.call}",
        )
        for method, output in rows[:_ROWS]
    ]
    more = [(f"and {len(rows) - _ROWS:,} more",)] if len(rows) > _ROWS else []
    return make_table(columns, [*lines, *more], columns[2:-1], overflow="ellipsis")


def _badness(output: OutputResult) -> tuple[bool, float]:
    share = output.largest_error / output.allowed_error if output.allowed_error else output.largest_error
    return not output.ok, math.inf if output.problem else share


CULPRIT_VERSION = 2
"""Incremented when a field of the JSON changes its meaning or is removed."""

Kind = Literal["", "off", "fails", "hangs", "crashes"]
Where = Literal["", "backend", "host", "unsteady"]

QUANTIZED = "quantized_decomposed."
_LISTED_OPERATORS = 6

_WORDS = {"": "is right", "off": "is wrong", "fails": "fails", "hangs": "hangs", "crashes": "ends the process"}


@dataclass(frozen=True, slots=True)
class Suspect:
    """An operator in a backend.

    Attributes:
        method: The method.
        backend_id: The backend.
        node: The operator in the plan: its name, partition, module path and source line.
    """

    method: str
    backend_id: str
    node: PlannedNode


@dataclass(frozen=True, slots=True, repr=False)
class Culprit(Shown):
    """Which operator goes wrong in a backend, if any; `print` shows it.

    Attributes:
        kind: What is wrong with the whole file: "off", "fails", "hangs" or "crashes"; "" if nothing is wrong.
        where: "backend"; "host" if it goes wrong without any backend too, or half as wrong; "unsteady" if it was right
            when lowered or run again; "" if nothing is wrong.
        operators: The operators that are enough for a backend to go wrong, the culprit first; () if `where` is not
            "backend". There are several where one is right alone, as in a fusion, or where none can be tried alone.
        error: What is wrong with `operators` in backends, and in which call.
        lowerings: How often the programs were lowered.
        verification: What was found about the whole file, until it failed; None if it cannot be opened.
    """

    kind: Kind
    where: Where
    operators: tuple[Suspect, ...]
    error: str
    lowerings: int
    verification: Verification | None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.kind

    def to_text(self, *, width: int = 120) -> str:
        """Return what was found in words, with a number of characters that a line may have."""
        return render(map(Text, self._lines()), width)

    def to_json(self) -> str:
        """Return it as JSON: "version" (2), "ok", and the attributes; "verification" as `Verification.to_json`."""
        names = ("ok", "kind", "where", "error", "lowerings")
        tree = None if self.verification is None else json.loads(self.verification.to_json())
        operators = [asdict(operator) for operator in self.operators]
        fields = {"version": CULPRIT_VERSION, **{name: getattr(self, name) for name in names}, "operators": operators}
        return as_json({**fields, "verification": tree})

    def _lines(self) -> Iterator[str]:
        does, tries = _WORDS[self.kind], f"Programs were lowered {many(self.lowerings, 'time')}."
        if not self.operators:
            where = {"host": "without any backend too", "unsteady": "but not when it is lowered or runs again"}.get(
                self.where, ""
            )
            right = self.verification is not None and self.ok and summary(self.verification)
            yield right or f"The file {does}, {where}: {self.error}"
            yield tries
            return
        first, several = self.operators[0], len(self.operators) > 1
        more = f" with {many(len(self.operators) - 1, 'other')}" if several else ""
        yield f"{first.node.operator}{more} {does} in {first.backend_id}: {self.error}"
        named = [one for one in self.operators if not one.node.operator.startswith(QUANTIZED)] or self.operators
        for one in named[:_LISTED_OPERATORS]:
            yield f"\n  operator   {one.node.name} ({one.node.operator}) of {one.method}"
            yield f"  partition  {one.node.partition}, {one.backend_id}"
            yield f"  module     {one.node.module or 'not known'}\n  source     {one.node.source or 'not known'}"
        if left := len(self.operators) - len(named[:_LISTED_OPERATORS]):
            yield f"\n  and {left} more"
        only = "these operators" if several else "this operator"
        yield f"\nWith only {only} in a backend the file {does}. {tries}"
        yield f"Next: the rule deny(name={first.node.name!r}) keeps it on the host; bisect again with it."

    def __repr__(self) -> str:
        named = f"{self.operators[0].node.name} of {self.operators[0].method}" if self.operators else self.where
        return f"Culprit({named + ' ' if named else ''}{_WORDS[self.kind]})"
