"""The operator graph that a pattern stands for, and the arguments of operators in the order of their schemas."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.fx.operator_schemas import get_signature_for_torch_op

GETITEM = "getitem"


class _Wildcard:
    """Matches anything."""

    def __repr__(self) -> str:
        return "ANY"


ANY: Any = _Wildcard()
"""As an argument in a pattern: matches any node, number or list, or an omitted argument."""


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """A parameter of a pattern: a node or value from outside of the match; `constant` and `wildcard` say which."""

    name: str
    constant: bool = False
    wildcard: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class HeldNumber:
    """A number that export turned into a constant tensor: matches a constant with the same value."""

    value: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TemplateOperator:
    """An operator of a pattern.

    For each name that it may have, `arguments` has the arguments in the order of the schema: a `TemplateOperator`, a
    `TemplateInput`, a `HeldNumber`, `ANY`, a sequence of these, or a plain value.
    """

    arguments: Mapping[str, tuple[Any, ...]]

    def read(self) -> Iterator[TemplateOperator | TemplateInput]:
        """Yield the operators and inputs among the arguments."""
        for terms in self.arguments.values():
            yield from _read(terms)


def _read(term: Any) -> Iterator[TemplateOperator | TemplateInput]:
    if isinstance(term, (TemplateOperator, TemplateInput)):
        yield term
    elif isinstance(term, (list, tuple)):
        for item in term:
            yield from _read(item)


@dataclass(frozen=True, slots=True)
class Template:
    """The graph of a pattern."""

    operators: tuple[TemplateOperator, ...]  # in topological order; the last one is the anchor
    results: tuple[TemplateOperator, ...]  # those whose values may be used outside of a match

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The names that each operator may have."""
        return tuple(tuple(term.arguments) for term in self.operators)


@cache
def _find_signature(name: str) -> inspect.Signature | None:
    """Return the signature of an operator, None if it has no schema."""
    parts = name.split(".")
    if len(parts) != 3:
        return None
    overload: Any = torch.ops
    for part in parts:
        overload = getattr(overload, part, None)
    signatures = get_signature_for_torch_op(overload) if callable(overload) else None
    return signatures[0] if signatures else None


def list_argument_names(name: str) -> tuple[str, ...]:
    """Return the names of an operator's arguments as torch.fx has them (`input` for `self`), () without a schema."""
    signature = _find_signature(name)
    return tuple(signature.parameters) if signature is not None else ()


def has_items(name: str) -> bool:
    """Return whether an operator has several results, or a list of them."""
    signature = _find_signature(name)
    return signature is not None and signature.return_annotation is not torch.Tensor


def order_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call in the order of the schema, with defaults for omitted ones."""
    signature = _find_signature(name)
    if signature is None:
        return (*args, *(kwargs[key] for key in sorted(kwargs)))
    named = {"input" if key == "self" else key: value for key, value in kwargs.items()}
    return tuple(
        args[i] if i < len(args) else named.get(parameter.name, parameter.default)
        for i, parameter in enumerate(signature.parameters.values())
    )


__all__ = [
    "ANY",
    "GETITEM",
    "HeldNumber",
    "Template",
    "TemplateInput",
    "TemplateOperator",
    "has_items",
    "list_argument_names",
    "order_arguments",
]
