"""The arguments that choose partitioners: an installed one by its name, or one that a module or a Python file makes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from exir_lowering.cli import importing
from exir_lowering.errors import InputError

if TYPE_CHECKING:
    from exir_lowering.plugins import Partitioner


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
        if "," in text and ":" not in text:
            raise InputError(f"-p {text!r}: expected one name; give each its own: -p {text.replace(',', ' -p ')}.")
        place, colon, function = text.partition(":")
        if not place or (colon and not all(part.isidentifier() for part in function.split("."))):
            raise InputError(
                f"-p {text!r}: expected the name of an installed partitioner, such as xnnpack, or MODULE:FUNCTION. "
                "A function of a module returns a partitioner with options and rules."
            )
        if colon:
            importing.check(f"-p {text!r}", place)
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

    place, colon, function = text.rpartition(":")
    if not colon:
        return registry.find_partitioner(text)
    made = importing.make(f"-p {text!r}", place, function, Partitioner)
    if not isinstance(made, Partitioner):
        raise InputError(
            f"-p {text!r}: it makes a {type(made).__name__}, expected an ExecuTorch Partitioner. Name a Partitioner "
            "class, or a function that returns one."
        )
    return made
