"""Find rewrites: given as objects, registered in this process, or installed with an entry point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from exir_lowering.errors import InputError, PluginLoadError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.plugins import registry
from exir_lowering.plugins.rewrite import Rewrite

_Class = TypeVar("_Class", bound=type)


def register_rewrite(rewrite: _Class) -> _Class:
    """Register a `Rewrite` class in this process, under its `name`; a class decorator.

    It runs where `LoweringOptions(rewrites=[...])` names it.

    Returns:
        The class.

    Raises:
        PluginLoadError: It is not a Rewrite class, has no name or no `rewrite`, or its name is already taken.
    """
    registry.register(registry.REWRITES, registry.check_class("register_rewrite", rewrite, Rewrite, "name"), rewrite)
    return rewrite


def find_rewrites(chosen: str | Sequence[Any]) -> tuple[Rewrite, ...]:
    """Return the rewrites that an option names, each once, in their order.

    The option is "none", the name of a rewrite or of a set of them such as "safe", or a sequence of such names and of
    Rewrite objects and classes. Raises InputError for anything else or two of the same name, UnknownPluginError for a
    name that no distribution provides, and PluginLoadError for one that is provided twice, cannot be imported, or is
    not a rewrite.
    """
    found: dict[str, Rewrite] = {}
    for one in [chosen] if isinstance(chosen, str) else chosen:
        for rewrite in _make("rewrites", one) if one != "none" else ():
            earlier = found.setdefault(rewrite.name, rewrite)
            if type(earlier) is not type(rewrite):
                raise InputError(
                    f"rewrites: {type(earlier).__qualname__} and {type(rewrite).__qualname__} are both named "
                    f"{rewrite.name!r}. Give one of them another name."
                )
    return tuple(found.values())


def _make(who: str, candidate: Any) -> Iterator[Rewrite]:
    if isinstance(candidate, str):
        yield from _installed(candidate)
    elif isinstance(candidate, Rewrite):
        yield _check(candidate)
    elif isinstance(candidate, type) and issubclass(candidate, Rewrite):
        try:
            made = candidate()
        except Exception as error:
            let_through(error)
            raise PluginLoadError(f"{who}: creating {candidate!r} raised {type(error).__name__}: {error}") from error
        yield _check(made)
    else:
        raise InputError(f"{who}: got {candidate!r}, expected a name, a Rewrite object or a Rewrite class.")


def _installed(name: str) -> Iterator[Rewrite]:
    loaded = registry.load(registry.REWRITES, name)
    for one in loaded if isinstance(loaded, (list, tuple)) else [loaded]:
        if isinstance(one, str):
            raise PluginLoadError(f"Rewrite {name!r}: got {one!r}, expected a Rewrite or a tuple of Rewrites.")
        try:
            yield from _make(f"Rewrite {name!r}", one)
        except InputError as error:
            raise PluginLoadError(
                f"{error} Correct the entry point or the registration in group {registry.REWRITES!r}."
            ) from error


def _check(rewrite: Rewrite) -> Rewrite:
    name, operators = getattr(rewrite, "name", None), getattr(rewrite, "operators", None)
    if not isinstance(name, str) or not name:
        raise PluginLoadError(f"Rewrite {type(rewrite).__qualname__}: the name is {name!r}, expected a text.")
    known = list(operators) if isinstance(operators, Sequence) and not isinstance(operators, str) else [None]
    if not all(isinstance(one, str) for one in known):
        raise PluginLoadError(f"Rewrite {name!r}: operators is {operators!r}, expected a tuple of operator names.")
    for attribute, possible in (("exactness", ("bits", "tolerance")), ("when", ("always", "taken"))):
        value = getattr(rewrite, attribute, None)
        if value not in possible:
            raise PluginLoadError(f"Rewrite {name!r}: {attribute} is {value!r}, expected one of {possible}.")
    return rewrite
