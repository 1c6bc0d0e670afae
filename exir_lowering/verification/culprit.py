"""What `bisect` found: the operator that goes wrong in a backend."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.text import Text

from exir_lowering.errors import InputError
from exir_lowering.plans.formatting import many
from exir_lowering.plans.planned import PlannedNode
from exir_lowering.pte.printing import Shown, render
from exir_lowering.verification.results import Verification, as_json, summary

if TYPE_CHECKING:
    from exir_lowering.verification.repro import Repro

VERSION = 1
"""Incremented when a field of the JSON changes its meaning or is removed."""

Kind = Literal["", "off", "fails", "hangs", "crashes"]
Where = Literal["", "backend", "host", "unsteady"]

QUANTIZED = "quantized_decomposed."
_LISTED = 6

_WORDS = {"": "is right", "off": "is wrong", "fails": "fails", "hangs": "hangs", "crashes": "ends the process"}
_WITHOUT = {True: "it still {}: there is another culprit", False: "it {} not", None: "it cannot be tried"}


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
        where: "backend"; "host" if it goes wrong without any backend too; "unsteady" if it was right when lowered or
            run again; "" if nothing is wrong.
        operators: The operators that are enough for a backend to go wrong, the culprit first; () if `where` is not
            "backend". There are several where one is right alone, as in a fusion, or where none can be tried alone.
        others: Whether it goes wrong too with all others in backends, or without any: there is another culprit. None if
            not known.
        error: What is wrong with `operators` in backends, and in which call.
        lowerings: How often the programs were lowered.
        verification: What was found about the whole file, until it failed; None if it cannot be opened.
    """

    kind: Kind
    where: Where
    operators: tuple[Suspect, ...]
    others: bool | None
    error: str
    lowerings: int
    verification: Verification | None
    _repro: Repro | None = field(default=None, compare=False)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.kind

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write a repro of the error, without the rest of the model: `partition.pt2`, `inputs.pt` and `repro.py`.

        Args:
            folder: Where to write; created if missing.

        Returns:
            The path of the script, which lowers, runs, times and compares; its exit code is 2 when the result is off.

        Raises:
            InputError: No operator was found, its partition cannot be saved alone, or nothing can be written there.
        """
        if self._repro is None:
            raise InputError("Culprit.save: there is nothing to save, as no culprit was found.")
        return self._repro.save(Path(folder), self.operators)

    def to_text(self, *, width: int = 120) -> str:
        """Return what was found in words, with a number of characters that a line may have."""
        return render(map(Text, self._lines()), width)

    def to_json(self) -> str:
        """Return it as JSON: "version" (1), "ok", and the attributes; "verification" as `Verification.to_json`."""
        names = ("ok", "kind", "where", "others", "error", "lowerings")
        tree = None if self.verification is None else json.loads(self.verification.to_json())
        operators = [asdict(operator) for operator in self.operators]
        fields = {"version": VERSION, **{name: getattr(self, name) for name in names}, "operators": operators}
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
        for one in named[:_LISTED]:
            yield f"\n  operator   {one.node.name} ({one.node.operator}) of {one.method}"
            yield f"  partition  {one.node.partition}, {one.backend_id}"
            yield f"  module     {one.node.module or 'not known'}\n  source     {one.node.source or 'not known'}"
        if left := len(self.operators) - len(named[:_LISTED]):
            yield f"\n  and {left} more"
        only = "these operators" if several else "this operator"
        without = _WITHOUT[self.others].format("is" if self.kind == "off" else "does")
        yield f"\nWith only {only} in a backend the file {does}; without, {without}. {tries}"
        yield f"Next: --deny method={first.method},name={first.node.name} keeps it on the host. --save-repro FOLDER, or"
        yield f"save(folder), writes a script for the authors of {first.backend_id}."

    def __repr__(self) -> str:
        named = f"{self.operators[0].node.name} of {self.operators[0].method}" if self.operators else self.where
        return f"Culprit({named + ' ' if named else ''}{_WORDS[self.kind]})"
