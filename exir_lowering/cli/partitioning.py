"""The arguments that choose partitioners: an installed one by its name, or one that a module makes.

    -p xnnpack              an installed partitioner
    -p my_module:factory    what an importable module makes, also one in the current folder
    --variant npu=mine,xnnpack

Options and rules are Python: a function of a module returns the partitioner with them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from exir_lowering.errors import InputError, LoweringError, PluginLoadError, did_you_mean, exception_text

if TYPE_CHECKING:
    from exir_lowering.plugins import Partitioner


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the argument for partitioners."""
    command.add_argument(
        "-p",
        "--partitioner",
        action="append",
        default=[],
        metavar="NAME|MODULE:FUNCTION",
        help="the partitioner, which chooses the operators that a backend takes: an installed one (`exir-lower "
        "plugins` lists them), or what a function or class of a module makes; repeatable: each gets what the ones "
        "before it left; without any, everything stays on the host",
    )


def check_arguments(arguments: argparse.Namespace) -> None:
    """Check the form of the arguments, before anything slow; InputError if one is wrong."""
    variants = getattr(arguments, "variant", [])
    if variants and arguments.partitioner:
        raise InputError("--variant: it takes the place of -p; name the partitioners of each variant.")
    for text in variants:
        name, equals, _ = text.partition("=")
        if not equals or not name:
            raise InputError(f"--variant {text!r}: expected NAME=PARTITIONER,..., such as npu=mine,xnnpack.")
    named = [*arguments.partitioner, *(one for each in variants for one in _list(each)[1])]
    for text in named:
        place, colon, function = text.partition(":")
        if not place or (colon and not all(part.isidentifier() for part in function.split("."))):
            raise InputError(
                f"-p {text!r}: expected the name of an installed partitioner, such as xnnpack, or MODULE:FUNCTION. "
                "A function of a module returns a partitioner with options and rules."
            )
        package = place.partition(".")[0]
        known = not package or package in sys.modules or find_spec(package)
        if colon and not (known or PathFinder.find_spec(package, [os.getcwd()])):
            _import(text, place, function)  # says that it is not there, before anything slow is imported
    if not any(":" in text for text in named):  # a module may register what others name
        check_names("exir_lowering.partitioners", named)


def check_names(group: str, names: Sequence[str]) -> None:
    """Look for plug-ins before anything slow is imported; UnknownPluginError if there is none of a name."""
    from exir_lowering.plugins import registry

    for name in names:
        if name not in registry.known_ids(group):
            registry.load(group, name)


def make(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the argument `partitioners` or `variants` of `lower`; InputError or PluginLoadError if that fails."""
    variants = [_list(text) for text in getattr(arguments, "variant", [])]
    if variants:
        return {"variants": {name: [*map(_make, texts)] or None for name, texts in variants}}
    return {"partitioners": [*map(_make, arguments.partitioner)] or None}


def _list(variant: str) -> tuple[str, list[str]]:
    name, _, texts = variant.partition("=")
    return name, [text.strip() for text in texts.split(",")] if texts else []


def _make(text: str) -> Partitioner:
    from exir_lowering.plugins import Partitioner, registry

    place, colon, function = text.partition(":")
    factory = _import(text, place, function) if colon else registry.load(registry.PARTITIONERS, place)
    made = factory if isinstance(factory, Partitioner) else _call(text, factory)
    if not isinstance(made, Partitioner):
        raise InputError(
            f"-p {text!r}: it makes a {type(made).__name__}, expected an ExecuTorch Partitioner. Name a Partitioner "
            "class, or a function that returns one."
        )
    return made


def _call(text: str, factory: Any) -> Any:
    if not callable(factory):
        raise InputError(f"-p {text!r}: {factory!r} cannot be called.")
    try:
        return factory()
    except LoweringError as error:
        raise InputError(f"-p {text!r}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:
        name = getattr(factory, "__qualname__", repr(factory))
        raise PluginLoadError(f"-p {text!r}: calling {name} raised {exception_text(error)}") from error


def _import(text: str, place: str, function: str) -> Any:
    """Return what a module has, also one in the current folder, which comes after everything that is installed."""
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        found: Any = importlib.import_module(place)
    except MemoryError:
        raise
    except Exception as error:
        raise PluginLoadError(
            f"-p {text!r}: the module {place!r} cannot be imported: {exception_text(error)}"
        ) from error
    finally:
        # The last one: there may have been another one in front.
        del sys.path[len(sys.path) - 1 - sys.path[::-1].index(folder)]
    for part in function.split("."):
        if not hasattr(found, part):
            known = [name for name in vars(found) if not name.startswith("_")]
            hint = did_you_mean(part, known, f" It has {', '.join(map(repr, known)) or 'none'}.", most=3)
            raise InputError(f"-p {text!r}: {place} has no {function!r}.{hint}")
        found = getattr(found, part)
    return found
