"""What arguments of a pattern's operators may be, besides one value, and what differs where it nearly matches."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from exir_lowering import InputError, PartitionerContractError


class _Wildcard:
    def __repr__(self) -> str:
        return "ANY"


ANY: Any = _Wildcard()
"""As an argument in a pattern: matches any node, number or list, or an omitted argument."""


@dataclass(frozen=True, slots=True, eq=False)
class Attribute:
    """What an argument may be: one of several values, or what a function takes."""

    pattern: str  # in messages
    name: str
    options: tuple[Any, ...]
    accepts: Callable[[Any], Any] | None = None

    def fits(self, value: Any) -> bool:
        """Return whether a value may be the argument; PartitionerContractError if the function raises."""
        if isinstance(value, Node) or value is inspect.Parameter.empty:
            return False
        if self.accepts is None:
            return any(_stands_for(option, value) for option in self.options)
        try:
            return bool(self.accepts(value))
        except MemoryError:
            raise
        except Exception as error:
            raise PartitionerContractError(
                f"What pattern {self.pattern} asks of {self.name} raised {type(error).__name__} for {value!r}: {error}",
                violation="raised",
                details={"pattern": self.pattern, "node": ""},
            ) from error

    def __str__(self) -> str:
        if self.accepts is not None:
            return f"what {getattr(self.accepts, '__name__', self.accepts)} takes"
        return " or ".join(map(repr, self.options))


def _stands_for(option: Any, value: Any) -> bool:
    """Return whether a value is the one that is meant: a number also stands for a list of it."""
    if isinstance(value, (list, tuple)):
        if not isinstance(option, (list, tuple)):
            return bool(value) and all(_stands_for(option, item) for item in value)
        return len(option) == len(value) and all(map(_stands_for, option, value))
    return isinstance(option, bool) == isinstance(value, bool) and not isinstance(value, Node) and bool(option == value)


def read_attributes(pattern: str, given: Any) -> dict[str, Any]:
    """Return what each named argument has to match; InputError if it is no mapping from names."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        raise InputError(
            f"Pattern {pattern}: attributes={given!r}: expected a mapping from names of arguments, such as "
            '{"stride": ANY}.'
        )
    found: dict[str, Any] = {}
    for name, value in given.items():
        if value is ANY:
            found[name] = ANY
        elif callable(value):
            found[name] = Attribute(pattern, name, (), value)
        else:
            options = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else [value]
            found[name] = Attribute(pattern, name, tuple(options))
    return found


def suggest(wanted: str, known: Collection[str], otherwise: str = "") -> str:
    """Return the end of a message: the names that are close to one, or another end."""
    close = difflib.get_close_matches(wanted, known, n=3)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else otherwise


def describe_miss(names: Sequence[str], number: int, node: Node, wanted: Any, got: Any) -> str:
    """Say how an argument of a node differs from what a pattern says."""
    name = names[number] if number < len(names) else f"argument {number}"
    shown = "omitted" if got is inspect.Parameter.empty else got.name if isinstance(got, Node) else repr(got)
    expected = str(wanted) if isinstance(wanted, Attribute) else repr(wanted)
    return f"{name} of {node.name} is {shown}, the pattern says {expected}"
