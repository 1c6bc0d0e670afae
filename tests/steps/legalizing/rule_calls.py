"""The calls of operators that rules compute, taken from samples, and how a rule's results differ from theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import operator_database
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from exir_lowering.steps.legalizing.fragments import RULES
from exir_lowering.steps.legalizing.registry import Failed


class Recorder(TorchDispatchMode):
    """Keeps the calls of operators that have rules, with copies of what they read and what they returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        given = tree_map(
            lambda value: value.clone() if isinstance(value, torch.Tensor) else value, (args, kwargs or {})
        )
        result = func(*args, **(kwargs or {}))
        if name in RULES:
            self.calls.append((name, func, *given, result))
        return result


def calls(info: Any, dtype: torch.dtype, count: int) -> Iterator[tuple[str, Any, tuple[Any, ...], dict[str, Any], Any]]:
    """Yield the calls that the samples of an operator make."""
    for module in operator_database.samples(info, dtype, count):
        with Recorder() as recorder:
            try:
                module(*[each.clone() for each in module.given])
            except Exception:  # the sample is not for this machine
                continue
        yield from recorder.calls


def computed(name: str, args: Any, kwargs: Any, want: Sequence[Any]) -> list[Any] | None:
    """Return what a rule computes, as a file has it: in the operator's types; None if it refuses."""
    try:
        got = RULES[name](*args, **kwargs)
    except Failed:
        return None
    if got is NotImplemented:
        return None
    found = list(got) if isinstance(got, (list, tuple)) else [got]
    return [None if one is None else one.to(like.dtype) for one, like in zip(found, want, strict=True)]


def differences(name: str, operator: Any, args: Any, kwargs: Any, want: Any) -> list[str] | None:
    """Return how what a rule computes differs from what the operator did; None if it refuses."""
    want, exact = tree_leaves(want), [None]
    got = computed(name, args, kwargs, want)
    if got is None:
        return None
    got, want = (operator_database.told(name, args, kwargs, found) for found in (got, want))
    with contextlib.suppress(Exception):  # of what takes no float64
        wide = tree_map(_wide, (args, kwargs))
        exact = tree_leaves(operator(*wide[0], **wide[1]))
    exact = exact if len(exact) == len(want) else [None] * len(want)
    told = [
        "" if each[0] is None else operator_database.difference(*each) for each in zip(got, want, exact, strict=True)
    ]
    return [f"result {number}: {found}" for number, found in enumerate(told) if found]


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
