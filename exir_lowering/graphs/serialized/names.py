"""Names in a serialised program, of which torch makes Python code later: only what is plainly a name is let through."""

from __future__ import annotations

import keyword
import re
from typing import Any

from exir_lowering.graphs.serialized import grammar

_IDENTIFIER = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]{0,511}", re.ASCII)
_ATTRIBUTE = re.compile(r"[A-Za-z0-9_]{1,512}(\.[A-Za-z0-9_]{1,512}){0,63}", re.ASCII)
_PATH = re.compile(r"[^\"'\\\x00-\x1f\x7f]{0,2048}")


def check_identifier(name: Any) -> str:
    """Return a name that Python code may have, of a node or of an argument; ValueError if it is none."""
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name) or keyword.iskeyword(name):
        raise ValueError(f"{str(name)[:80]!r} is not the name of a node or argument")
    return name


def check_attribute(name: Any) -> str:
    """Return the name of a graph's attribute, such as "sub_mod.weight"; ValueError if it is none."""
    if not isinstance(name, str) or not _ATTRIBUTE.fullmatch(name) or "__" in (name[:2], name[-2:]):
        raise ValueError(f"{str(name)[:80]!r} is not the name of an attribute")
    return name


def check_path(name: Any) -> str:
    """Return a name of a parameter, buffer, constant or module, fit for string literals; ValueError if it is none."""
    if not isinstance(name, str) or not _PATH.fullmatch(name):
        raise ValueError(f"{str(name)[:80]!r} is not the name of a parameter or module")
    return name


def check_guard(text: Any) -> str:
    """Return a guard, such as "L['x'].size()[0] <= 8", which torch executes when the program becomes a module.

    ValueError: It is not made of numbers, arguments, their sizes, arithmetic and comparisons.
    """
    if not isinstance(text, str):
        raise ValueError(f"{str(text)[:80]!r} is not a guard")
    grammar.check_guard(text)
    return text
