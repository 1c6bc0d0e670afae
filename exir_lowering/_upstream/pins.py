"""Which code of torch and ExecuTorch we replace, skip or mirror, and whether it is still the code that was checked.

Each feature depends on functions, classes and tables of upstream. When one of them is not known (another version has
other code, somebody has replaced it, it is gone), the feature is off, and upstream's own code does the work: slower,
as upstream computes it. `EXIR_LOWERING_PLAIN=1` turns all of them off.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import linecache
import logging
import operator
import os
import secrets
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from exir_lowering._upstream.locks import original_of

PLAIN = "EXIR_LOWERING_PLAIN"  # the environment variable that turns off all features, unless it is empty or 0

_LOG = logging.getLogger(__name__)
_VENDORS = "executorch.backends.", "coremltools."  # what is in these modules counts only if something has imported them
_OFF: set[str] = set()  # the features that were found off in this process
_LOGGED: set[str] = set()  # what the log has said
_SEEN: dict[str, tuple[tuple[Any, ...], str]] = {}  # what was looked at: what it consists of, and its digest
_STDLIB = sysconfig.get_path("stdlib")
_PROCESS = secrets.token_hex(8)  # tells what cannot be described from what another process has

# What the class statement adds to a class; `__` names that are no functions are left out, too.
_IGNORED = frozenset(("__annotations__", "__dict__", "__doc__", "__module__", "__orig_bases__", "__parameters__"))
# Methods that exporters replace; what is there is called, and nothing that we do depends on what it is.
_OPEN = frozenset(("_is_non_identity_clone", "remove_empty_tensors_from_cat"))


class UnknownCodeError(Exception):
    """Code without a source, or a value that cannot be described."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that is right only with upstream code that is known."""

    does: str
    without: str  # what happens instead when it is off
    code: dict[str, list[str]]  # the digests that are known, by place: "module:name" or "file:path"


FEATURES: Mapping[str, Feature] = {
    name: Feature(**entry)
    for name, entry in json.loads(resources.files(__package__).joinpath("pins.json").read_bytes()).items()
}  # everything that is off where upstream's code is not known, by name: see tests/house/record_pins.py


def is_plain() -> bool:
    """Return whether everything is turned off."""
    return os.environ.get(PLAIN, "") not in ("", "0")


def is_on(name: str) -> bool:
    """Return whether what a feature depends on is known."""
    return not why_off(name)


def why_off(name: str) -> str:
    """Return why a feature is off, "" if it is on."""
    reason, _ = _find_reason(name)
    if reason:  # another thread may just have restored what it had replaced
        reason, _ = _find_reason(name)
    if reason:
        _OFF.add(name)
    return reason


def explain(name: str) -> str:
    """Return a line for errors that a feature prevents where it is on, "" if it is."""
    reason = why_off(name)
    return f"\nOff: {name}: {reason}; {FEATURES[name].without}." if reason else ""


def report_switched_off() -> tuple[str, ...]:
    """Return the features that were found off in this process, each with the reason; the log says each once."""
    reasons = {name: why_off(name) for name in FEATURES if name in _OFF or is_plain()}
    found = tuple(f"{name}: {reason}; {FEATURES[name].without}" for name, reason in reasons.items() if reason)
    for line in found:
        if line not in _LOGGED and not is_plain():
            _LOGGED.add(line)
            _LOG.warning("Off: %s", line)
    return found


def state() -> list[str]:
    """Return lines that differ where results of this process could: for keys of what is kept; none if all is known."""
    found = {name: _find_reason(name) for name in FEATURES if why_off(name)}
    return [f"off: {name} {reason} {instead}".rstrip() for name, (reason, instead) in found.items()]


def vendor_modules() -> list[str]:
    """Return the modules that count only if something has imported them."""
    modules = {place.partition(":")[0] for feature in FEATURES.values() for place in feature.code}
    return sorted(module for module in modules if module.startswith(_VENDORS))


def _find_reason(name: str) -> tuple[str, str]:
    """Return why a feature is off, "" if it is on, and what tells apart what is there instead."""
    if is_plain():
        return f"{PLAIN} is set", ""
    for place, known in FEATURES[name].code.items():
        module = place.partition(":")[0]
        if module.startswith(_VENDORS) and module not in sys.modules:
            continue
        try:
            if _find_digest(place) not in known:
                return f"{place} differs from the code that was checked", _find_digest(place)
        except (ImportError, AttributeError) as error:
            return f"{place} is missing ({error})", ""
        except UnknownCodeError as error:
            return f"{place} is not known: {error}", _PROCESS
        except MemoryError:
            raise
        except Exception as error:  # a module of upstream that cannot be imported, or a class that answers oddly
            return f"{place} cannot be inspected ({type(error).__name__}: {error})", _PROCESS
    return "", ""


def _find_digest(place: str) -> str:
    """Return the digest of what is at a place; it is looked at again when it is another object."""
    value = find(place)
    parts = tuple(_parts(value))
    seen = _SEEN.get(place)
    if seen is not None and len(seen[0]) == len(parts) and all(map(operator.is_, seen[0], parts)):
        return seen[1]
    found = digest_of(value)
    _SEEN[place] = parts, found
    return found


def _parts(value: Any) -> Iterator[Any]:
    """Yield what is another object when a function, or something in a class or a table, is replaced."""
    yield value
    yield getattr(value, "__code__", None)
    if isinstance(value, type):
        for name, item in vars(value).items():
            if not name.startswith("__") or callable(item):
                yield from _parts(item)
    elif isinstance(value, (dict, list, set)):
        yield from value
        yield from value.values() if isinstance(value, dict) else ()


def find(place: str) -> Any:
    """Return upstream's own code, or a file's text, at a place; ImportError or AttributeError if it is not there."""
    module, _, path = place.partition(":")
    if module == "file":
        return _read_file(path)
    value: Any = sys.modules.get(module) or import_module(module)
    for name in path.split("."):
        owner, value = value, inspect.getattr_static(value, name)
        value = original_of(owner, name, value)
    return value


def _read_file(path: str) -> str:
    package, _, rest = path.partition("/")
    try:
        return Path(*sys.modules[package].__path__, rest).read_text(encoding="utf-8")
    except OSError as error:
        raise ImportError(str(error)) from error


def digest_of(value: Any) -> str:
    """Return the first digits of the SHA-256 of a function, class or table; UnknownCodeError if there is no source."""
    return hashlib.sha256("\n".join(_describe(value, 0)).encode()).hexdigest()[:16]


def _describe(value: Any, depth: int) -> Iterator[str]:
    if depth > 6:
        raise UnknownCodeError("it is nested too deeply")
    if isinstance(value, (staticmethod, classmethod)):
        yield type(value).__name__
        value = value.__func__
    if isinstance(value, property):
        for function in (value.fget, value.fset):
            yield from () if function is None else _describe(function, depth + 1)
    elif isinstance(value, FunctionType) or hasattr(value, "__wrapped__"):
        yield from _describe_function(value)
    elif isinstance(value, type):
        yield from _describe_class(value, depth)
    elif isinstance(value, Mapping):
        yield from (f"{_name(key)}: {_name(item)}" for key, item in value.items())
    elif isinstance(value, (set, frozenset)):
        yield from sorted(map(_name, value))
    elif isinstance(value, (list, tuple)):
        yield from map(_name, value)
    else:
        yield _name(value)


def _describe_function(function: Any) -> Iterator[str]:
    """Describe a function, and those that it wraps."""
    while True:
        code = getattr(function, "__code__", None)
        if code is None or _is_in_stdlib(code):
            yield type(function).__name__  # a decorator of Python's, whose source differs from version to version
        elif code.co_filename.startswith("<"):
            yield "made by code that has no file"  # such as what dataclasses make, which is in no table
        else:
            yield _source(code)
            yield from map(_name, function.__defaults__ or ())
        if not hasattr(function, "__wrapped__"):
            return
        function = function.__wrapped__


def _describe_class(kind: type, depth: int) -> Iterator[str]:
    yield from (base.__qualname__ for base in kind.__bases__)
    if issubclass(kind, Enum):  # what else it has is Python's own, and differs from version to version
        yield from (f"{name} = {_name(member.value)}" for name, member in kind.__members__.items())
    if is_dataclass(kind):
        yield from (f"{field.name}: {_name(field.type)} = {_name(field.default)}" for field in fields(kind))
    for name, item in sorted(vars(kind).items()):
        if name in _OPEN:
            continue
        item = original_of(kind, name, item)
        called = isinstance(item, (FunctionType, staticmethod, classmethod, property)) or hasattr(item, "__wrapped__")
        if called and not _is_of_python(item):
            yield name
            yield from _describe(item, depth + 1)
        elif not called and not issubclass(kind, Enum) and name not in _IGNORED and not name.startswith(("__", "_abc")):
            yield f"{name} ="
            yield from _describe(item, depth + 1)


def _is_of_python(item: Any) -> bool:
    """Return whether a function is one of Python's own, or one without a source that a dataclass made."""
    function = getattr(item, "__func__", item)
    while function is not None:
        code = getattr(function, "__code__", None)
        if not (code is None or code.co_filename.startswith("<") or _is_in_stdlib(code)):
            return False
        if code is None and not hasattr(function, "__wrapped__"):
            return False  # a property, or something built in
        function = getattr(function, "__wrapped__", None)
    return True


def _is_in_stdlib(code: CodeType) -> bool:
    return code.co_filename.startswith(_STDLIB) and "site-packages" not in code.co_filename


def _name(value: Any) -> str:
    """Describe an entry of a table, without where in memory it is."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_name, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_name, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_name(key)}: {_name(item)}' for key, item in value.items())}}}"
    if isinstance(value, ModuleType):
        return value.__name__
    named = getattr(value, "__qualname__", None)
    if isinstance(named, str):
        cells = getattr(value, "__closure__", None) if "<locals>" in named else None
        held = [_name(cell.cell_contents) for cell in cells or ()]
        return f"{value.__module__}.{named}{held or ''}"
    text = repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}" if " at 0x" in text else text


@cache
def _source(code: CodeType) -> str:
    lines = linecache.getlines(code.co_filename)
    if not 0 < code.co_firstlineno <= len(lines):
        raise UnknownCodeError(f"{code.co_name} has no source")
    return "".join(block_of(lines[code.co_firstlineno - 1 :]))


def block_of(lines: list[str]) -> list[str]:
    """Return the lines of the function that starts there, as `inspect.getblock`, which takes 20 times as long, does."""
    start, end = lines[0].lstrip(), 1
    column, header = len(lines[0]) - len(start), start.startswith("@")  # decorators
    for number, line in enumerate(lines[1:], 2):
        text = line.lstrip()
        inside = len(line) - len(text) > column
        if text and not inside and text[0] not in "#)]}":
            if not header:
                break
            header = text[0] == "@"
        end = number if text and (inside or text[0] != "#") else end
    cut = sum(line.count(quotes) for line in lines[:end] for quotes in ('"""', "'''")) % 2  # in a text of many lines
    plain = start.startswith(("def ", "async def ", "@")) and not cut
    return lines[:end] if plain else inspect.getblock(lines)
