"""What releases of ExecuTorch's runtime were seen to run, and builds of them: one source for `check` and `lower`.

"runs" is said only of what was seen to run in a release: each kernel with these element types and ranks, each operator
in a payload. It is not about values that a kernel refuses, such as an index that is too large, memory and speed.

The table of releases is made by `tests/inspection/record_releases.py`, which runs cases in each of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from exir_lowering._upstream import installed
from exir_lowering.errors import InputError
from exir_lowering.pte.printing import middle


@dataclass(frozen=True, slots=True)
class Form:
    """What is asked of a runtime."""

    name: str  # a kernel, an operator of a backend as "XnnpackBackend/XNNAdd", or a feature of the file
    types: str = ""  # the element types of its tensors
    ranks: str = ""  # how many dimensions its first tensor has, and the one with most: "2.4"
    rest: str = ""  # the kinds of its other arguments, bools and strings themselves; orders of dimensions
    of: Literal["kernel", "backend", "feature"] = "feature"


def join_ranks(ranks: Sequence[int]) -> str:
    """Return how many dimensions the first tensor has, and the one with most, as a form has it."""
    return f"{ranks[0]}.{max(ranks)}" if ranks else ""


Verdict = Literal["runs", "unknown", "does not run"]

_FACTORS = ("the element types {}", "the numbers of dimensions {}", "the arguments {}")
_RANKS_ENOUGH = 3  # a kernel that takes so many combinations of ranks, and refuses none, takes all
_KEYS = frozenset({"name", "runtime", "operators", "backends", "max_memory"})
_HELP = (
    'Expected {"name": "watch", "runtime": "1.4.1"}, or a list of these, with some of "operators": ["aten::add.out"] '
    'or {"aten::add.out": ["float32"] or null}, "backends": ["XnnpackBackend"], "max_memory": bytes.'
)


@dataclass(frozen=True, slots=True)
class Release:
    """A release of ExecuTorch, as its wheel has it."""

    name: str
    kernels: Mapping[str, str]  # with the library that has to be loaded for each; "" for none
    backends: frozenset[str]
    evidence: Mapping[str, Mapping[str, Any]]  # by the name of a form

    def judge(self, form: Form) -> tuple[Verdict, str]:
        """Return whether it runs what has this form, and why not."""
        seen, key = self.evidence.get(form.name, {}), [form.types, form.ranks, form.rest]
        if key in seen.get("runs", ()) and form.types not in seen.get("not", ()):
            return "runs", ""
        words = [word.format(middle(value, 60)) for word, value in zip(_FACTORS, key, strict=True)]
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

    @property
    def available(self) -> frozenset[str]:
        """The backends that it has."""
        return self.release.backends if self.backends is None else self.backends


@cache
def known_releases() -> Mapping[str, Release]:
    """Return the releases that are known, by name, the oldest first."""
    table = json.loads(resources.files(__package__).joinpath("releases.json").read_bytes())
    releases: dict[str, Release] = {}
    for name, found in sorted(table["releases"].items(), key=lambda item: [int(part) for part in item[0].split(".")]):
        kernels = {each: library for library, names in found["kernels"].items() for each in names}
        seen = {key: each[1] for key, groups in table["evidence"].items() for each in groups if name in each[0]}
        fields = (f"field {slot} of {kind}" for kind, count in found["schema"].items() for slot in range(count))
        seen.update({field: {"yes": [[""]] * 3} for field in fields})
        releases[name] = Release(name, kernels, frozenset(found["backends"]), seen)
    return releases


def find_release(name: str) -> Release:
    """Return a release; an InputError if nothing is known of it."""
    if name not in known_releases():
        known = ", ".join(known_releases())
        raise InputError(f"nothing is known of ExecuTorch {name!r}, only of {known}. Give one of these.")
    return known_releases()[name]


def find_target(given: str | PathLike[str] | None) -> Target:
    """Return the runtime that a file is for: a release, the build in a file of targets; None is what is installed.

    An InputError if there is no such release, or the file has not exactly one target.
    """
    if given is None:
        return _installed()
    if str(given) in known_releases():
        return Target(f"ExecuTorch {given}", find_release(str(given)))
    if not Path(given).is_file():
        raise InputError(
            f"the target {str(given)!r} is neither a release of ExecuTorch of which something is known "
            f"({', '.join(known_releases())}) nor a file of targets."
        )
    found = read_targets(Path(given))
    if len(found) != 1:
        raise InputError(f"the targets {str(given)!r} are {len(found)}; a file is lowered for one. Give one of them.")
    return found[0]


@cache
def _installed() -> Target:
    """Return the runtime that is installed; of a release that is not known, what its kernels are called."""
    name = metadata.version("executorch")
    release = known_releases().get(name)
    if release is None:
        release = Release(name, dict.fromkeys(installed.kernels() or (), ""), installed.own_backends(), {})
    return Target(f"ExecuTorch {name}", release)


def read_targets(path: Path) -> list[Target]:
    """Read a file of targets; an InputError if it is something else."""
    try:
        found = json.loads(path.read_bytes())
        return [_target(each) for each in (found if isinstance(found, list) else [found])]
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"the targets {str(path)!r} cannot be read: {error}\n{_HELP}") from None


def _target(given: Any) -> Target:
    if not isinstance(given, dict) or not given.keys() <= _KEYS:
        raise ValueError(f"got the target {middle(ascii(given), 60)}.")
    name, runtime, memory, operators = (given.get(key) for key in ("name", "runtime", "max_memory", "operators"))
    if not isinstance(name, str) or not isinstance(runtime, str) or type(memory) not in (int, type(None)):
        raise ValueError(f"got name {name!a}, runtime {runtime!a}, max_memory {memory!a}.")
    types = operators if isinstance(operators, dict) else dict.fromkeys(_words("operators", operators) or ())
    kernels = {kernel: _words(kernel, words) for kernel, words in types.items()} if operators is not None else None
    return Target(name, find_release(runtime), kernels, _words("backends", given.get("backends")), memory)


def _words(key: str, given: Any) -> frozenset[str] | None:
    if given is not None and not (isinstance(given, list) and all(isinstance(each, str) for each in given)):
        raise ValueError(f"got {key!a}: {middle(ascii(given), 60)}.")
    return None if given is None else frozenset(given)
