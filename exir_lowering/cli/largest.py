"""The arguments for the largest inputs that a program gets: bounds of dimensions, also together, and sets of sizes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from exir_lowering.errors import InputError

_OPTIONS = {  # the form, what it is for, and an example
    "--bounds": (
        "[METHOD:]DIM[*DIM]=N,...",
        "how large dynamic dimensions get, also together, such as {}: memory is planned for no more, and larger inputs "
        "are refused; a dimension is a Dim's name, or an input and its number, such as tokens.1; repeatable",
        "height*width=1000000,seq=512",
    ),
    "--sizes": (
        "[METHOD:]DIM=N,...",
        "one of the largest inputs, as sizes that dimensions have together, such as {}; repeatable, once for each: "
        "memory is planned for the largest of them",
        "seq=16,batch=64",
    ),
}


def add(command: argparse.ArgumentParser, option: str) -> None:
    """Add the argument for `LoweringOptions.bounds`, or for `sizes` of `lower` and `plan`."""
    metavar, what, example = _OPTIONS[option]
    command.add_argument(option, action="append", default=[], metavar=metavar, help=what.format(example))


def read_bounds(given: Sequence[str]) -> dict[str, Any]:
    """Return `LoweringOptions.bounds`, by method if methods are named; InputError for another form."""
    found: dict[str, dict[str, int]] = {}
    for method, each in _read("--bounds", given).items():
        found[method] = {name: most for one in each for name, most in one.items()}
        if len(found[method]) < sum(map(len, each)):
            raise InputError(f"--bounds {' '.join(given)!r}: a dimension is there twice, expected one number for it.")
    return found.get("", found)


def read_sizes(given: Sequence[str]) -> Any:
    """Return `sizes` of `lower` and `plan`, by method if methods are named; InputError for another form."""
    found = _read("--sizes", given)
    return found.get("", found) or None


def _read(option: str, given: Sequence[str]) -> dict[str, list[dict[str, int]]]:
    """Return the numbers of each text by dimension, by the method that it is for: "" stands for all methods."""
    found: dict[str, list[dict[str, int]]] = {}
    for text in given:
        method, _, rest = text.rpartition(":")
        one = dict[str, int]()
        for part in rest.split(","):
            name, _, number = map(str.strip, part.rpartition("="))
            if not name or name in one or not number.isdecimal() or len(number) > 18:
                raise InputError(
                    f"{option} {text!r}: got {part!r}, expected DIMENSION=NUMBER, each dimension once, separated by "
                    f"commas, such as {_OPTIONS[option][-1]}; METHOD: before them if they are for one method."
                )
            one[name] = int(number)
        found.setdefault(method.strip(), []).append(one)
    if "" in found and len(found) > 1:
        raise InputError(f"{option}: some have a method and some have none, expected METHOD: before each, or none.")
    return found
