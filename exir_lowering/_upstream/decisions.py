"""Branches on symbolic sizes in copies of a shape environment, repeated in the original."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_KEY = "exir_lowering_decisions"


class Decisions:
    """What symbolic sizes decide in copies of a shape environment of Dynamo's, which does not see their guards."""

    def __init__(self, original: Any, copied: Any) -> None:
        self._original = original
        self._copies = Copies()
        self._copies.add(copied)
        vars(copied)[_KEY] = self._copies  # copies of the copy have it too

    def repeat(self) -> str:
        """Decide the same in the original, so that it holds for these sizes only; return "", or a clause why not."""
        found = {guard.expr: None for guard in self._copies.guards()}
        fixed = self._copies.fixed(self._original)
        self._copies.clear()
        new = [fact for fact in found if not _is_known(self._original, fact)]
        if not new:
            return ""
        text = ", ".join(sorted(map(str, new)))
        if any(not fact.free_symbols <= set(self._original.backed_var_to_val) for fact in new):
            return f"its lowering branches on sizes that it introduced: {text}"
        if self._original.frozen:
            return f"its lowering branches on sizes, too late to recompile it for other sizes: {text}"
        if fixed & _marked(self._original):
            return f"its lowering fixes a size that was marked as dynamic: {text}"
        for fact in new:
            self._original.evaluate_expr(fact)
        return ""


class Copies:
    """Copies of a shape environment, with the number of guards that each had at first."""

    def __init__(self) -> None:
        self._copies: list[tuple[Any, int]] = []

    def add(self, environment: Any) -> None:
        """Add a copy that has just been made."""
        self._copies.append((environment, len(environment.guards)))

    def clear(self) -> None:
        """Forget the copies, which may live shorter than the programs that have them."""
        self._copies.clear()

    def guards(self) -> Iterator[Any]:
        """Yield the guards that have been added to the copies."""
        for environment, before in list(self._copies):
            yield from environment.guards[before:]

    def fixed(self, original: Any) -> set[Any]:
        """Return the symbols that have one value in a copy, and none in the original."""
        return {
            symbol
            for environment, _ in list(self._copies)
            for symbol, value in environment.replacements.items()
            if value.is_number and symbol not in original.replacements
        }


def note_copy(environment: Any) -> None:
    """Note a copy of a shape environment if the original is one of `Decisions`."""
    copies = vars(environment).get(_KEY)
    if copies is not None:
        copies.add(environment)


def _is_known(environment: Any, fact: Any) -> bool:
    known = environment._maybe_evaluate_static(fact)
    return known is not None and bool(known)


def _marked(environment: Any) -> set[Any]:
    """Return the symbols of sizes that the user has marked as dynamic, for which one value is an error."""
    found: set[Any] = set()
    for tracked in environment.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for size, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            if isinstance(size, torch.SymInt) and constraint is not None and not getattr(constraint, "warn_only", True):
                found |= size.node.expr.free_symbols
    return found
