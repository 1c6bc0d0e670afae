"""Runtimes: what is known of ExecuTorch's releases, and targets, which are builds of one's own.

The table of releases is made by `tests/support/record_releases.py`, which runs cases in each of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from exir_lowering.errors import InputError
from exir_lowering.inspection.forms import Form
from exir_lowering.plans import formatting as shown

Verdict = Literal["runs", "unknown", "does not run"]

_FACTORS = ("the element types {}", "the numbers of dimensions {}", "the arguments {}")
_RANKS_ENOUGH = 3  # a kernel that takes so many combinations of ranks, and refuses none, takes all
_LARGEST = 16_000_000  # bytes of a file of targets
_KEYS = frozenset({"name", "runtime", "operators", "backends", "max_memory"})
_HELP = (
    'expected {"name", "runtime": "1.4.1", "operators": null, ["aten::add.out", ...] or {"aten::add.out": ["float32", '
    '...] or null}, "backends": null or ["XnnpackBackend", ...], "max_memory": null or bytes}, or a list of these'
)


@dataclass(frozen=True, slots=True)
class Release:
    """A release of ExecuTorch, as its wheel has it."""

    name: str
    kernels: Mapping[str, str]  # with the library that has to be loaded for each; "" for none
    backends: frozenset[str]
    schema: Mapping[str, int]  # how many fields the tables of a program have
    evidence: Mapping[str, Mapping[str, Any]]  # by the name of a form

    def judge(self, form: Form) -> tuple[Verdict, str]:
        """Return whether it runs what has this form, and why not."""
        seen, key = self.evidence.get(form.name, {}), [form.types, form.ranks, form.rest]
        if key in seen.get("runs", ()) and form.types not in seen.get("not", ()):
            return "runs", ""
        words = [word.format(shown.middle(value, 60)) for word, value in zip(_FACTORS, key, strict=True)]
        given = f", with {', '.join(word for word, value in zip(words, key, strict=True) if value)}" * any(key)
        if key in seen.get("fails", ()):
            return "does not run", f"its runtime refuses it{given}"
        yes, no = seen.get("yes", ((), (), ())), seen.get("no", ((), (), ()))
        for value, refused, taken, word, factor in zip(key, no, yes, words, _FACTORS, strict=True):
            if value in refused:
                few = ", ".join(sorted(taken, key=lambda each: ("32" not in each, len(each), each))[:3])
                return "does not run", f"its runtime refuses {word}; it takes {factor.format(few or 'no other')}"
        fits = [value in taken for value, taken in zip(key, yes, strict=True)]
        fits[1] |= len(yes[1]) >= _RANKS_ENOUGH and not no[1] and "/" not in form.name
        if all(fits) and form.types not in seen.get("not", ()):
            return "runs", ""
        return "unknown", f"nothing like it was seen to run{given}"


@dataclass(frozen=True, slots=True)
class Target:
    """A build of a runtime; None is what the wheel of its release has."""

    name: str
    release: Release
    kernels: Mapping[str, frozenset[str] | None] | None = None  # with their element types; None for all of these
    backends: frozenset[str] | None = None
    max_memory: int | None = None  # bytes of planned memory that a method can have


@cache
def _table() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(resources.files(__package__).joinpath("releases.json").read_bytes())
    return found


def known_releases() -> list[str]:
    """Return the releases that are known, the oldest first."""
    return sorted(_table()["releases"], key=lambda name: [int(part) for part in name.split(".")])


@cache
def find_release(name: str) -> Release:
    """Return a release; an InputError if nothing is known of it."""
    if name not in known_releases():
        raise InputError(f"check: nothing is known of ExecuTorch {name!r}, only of {', '.join(known_releases())}.")
    found, evidence = _table()["releases"][name], _table()["evidence"]
    kernels = {each: library for library, names in found["kernels"].items() for each in names}
    seen = {key: each[1] for key, groups in evidence.items() for each in groups if name in each[0]}
    return Release(name, kernels, frozenset(found["backends"]), found["schema"], seen)


def read_targets(path: Path) -> list[Target]:
    """Read a file of targets; an InputError if it is something else."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST)
        found = json.loads(content)
        return [_target(each) for each in (found if isinstance(found, list) else [found])]
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"check: the targets {str(path)!r} cannot be read: {error}; {_HELP}.") from None


def _target(given: Any) -> Target:
    if not isinstance(given, dict) or not given.keys() <= _KEYS:
        raise ValueError(f"got the target {shown.middle(str(given), 60)}")
    name, runtime, memory, operators = (given.get(key) for key in ("name", "runtime", "max_memory", "operators"))
    if not isinstance(name, str) or not isinstance(runtime, str) or type(memory) not in (int, type(None)):
        raise ValueError(f"got name {name!r}, runtime {runtime!r}, max_memory {memory!r}")
    kernels: dict[str, frozenset[str] | None] | None = None
    if isinstance(operators, dict):
        kernels = {kernel: _words(kernel, types) for kernel, types in operators.items()}
    elif operators is not None:
        kernels = dict.fromkeys(_words("operators", operators) or ())
    return Target(name, find_release(runtime), kernels, _words("backends", given.get("backends")), memory)


def _words(key: str, given: Any) -> frozenset[str] | None:
    if given is not None and not (isinstance(given, list) and all(isinstance(each, str) for each in given)):
        raise ValueError(f"got {key} {shown.middle(str(given), 60)}")
    return None if given is None else frozenset(given)
