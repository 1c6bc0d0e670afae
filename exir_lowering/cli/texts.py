"""Names and values as arguments write them: `NAME=VALUE,...`, values of JSON, and compile specs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from exir_lowering.cli.output import find_file
from exir_lowering.errors import InputError

if TYPE_CHECKING:
    from exir_lowering.plugins import CompileSpec


def read_pairs(who: str, text: str) -> list[tuple[str, str]]:
    """Return the names and values of `NAME=VALUE,...`, values as they stand there; InputError for another form."""
    pairs = []
    for part in split(who, text):
        name, equals, value = part.partition("=")
        if not equals or not name.strip().isidentifier():
            raise InputError(
                f"{who}: got {part!r}, expected NAME=VALUE with commas between them. Several values of one name are "
                "NAME=[A,B], or NAME=A,NAME=B."
            )
        pairs.append((name.strip(), value.strip()))
    return pairs


def split(who: str, text: str) -> Iterator[str]:
    """Yield what is between commas, except those in brackets and quotation marks."""
    begun, closing, quoted, skip = 0, [], False, False
    for index, letter in enumerate(text):
        if quoted:
            quoted, skip = skip or letter != '"', letter == "\\" and not skip
        elif letter == '"':
            quoted = True
        elif letter in "[{":
            closing.append("]" if letter == "[" else "}")
        elif letter in "]}":
            if not closing or letter != closing.pop():
                raise InputError(f"{who}: there is no bracket for the {letter!r} in {text!r}.")
        elif letter == "," and not closing:
            yield text[begun:index]
            begun = index + 1
    if quoted or closing:
        missing = '"' if quoted else closing[-1]
        raise InputError(f"{who}: {text!r} ends without {missing!r}. Quote it in the shell, such as '...'.")
    yield text[begun:]


def read_value(who: str, text: str) -> Any:
    """Return the value that a text stands for: one of JSON, or with texts that have no quotation marks."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if text[:1] == "[" and text[-1:] == "]":
        return [read_value(who, part.strip()) for part in split(who, text[1:-1])]
    if text[:1] == "{" and text[-1:] == "}":
        return {name: read_value(who, value) for name, value in _items(who, text)}
    return text


def read_names(who: str, text: str) -> list[str]:
    """Return names, which may look like numbers: those in brackets, or the only one."""
    parts = split(who, text[1:-1]) if text[:1] == "[" and text[-1:] == "]" else [text]
    return [part.strip().strip('"') for part in parts]


def _items(who: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and values of `{KEY:VALUE,...}`."""
    for part in split(who, text[1:-1]):
        key, sign, value = part.partition(":")
        if not sign or not key.strip():
            raise InputError(f"{who}: got {part!r} in {text!r}, expected {{KEY:VALUE,...}}.")
        yield key.strip().strip('"'), value.strip()


def read_specs(who: str, text: str) -> list[CompileSpec]:
    """Return the compile specs of `{KEY:VALUE,...}`: values as UTF-8, or the content of a file for `@FILE`."""
    from exir_lowering.plugins import CompileSpec

    if not (text[:1] == "{" and text[-1:] == "}"):
        raise InputError(f"{who}: got {text!r}, expected compile specs such as {{device:CPU}} or {{table:@FILE}}.")
    return [
        CompileSpec(key, find_file(value[1:]).read_bytes() if value[:1] == "@" else value.strip('"').encode())
        for key, value in _items(who, text)
    ]
