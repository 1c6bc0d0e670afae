"""What the user names on the command line is imported here, modules and Python files; nothing that a file names is."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import operator
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from exir_lowering.errors import InputError, did_you_mean, exception_text


def import_module(who: str, place: str) -> ModuleType:
    """Return a module, or that of a Python file; InputError if importing it raises."""
    try:
        return _run_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        what = f"{place!r} cannot be imported: {exception_text(error, '.')}"
        raise InputError(f"{who}: {what}{line_of(error, place)}.") from error


def is_there(place: str) -> bool:
    """Return whether there is a Python file, or the package of a module, without importing it."""
    package = place.partition(".")[0]
    with importable(place):
        return Path(place).is_file() or package in sys.modules or importlib.util.find_spec(package) is not None


def find_object(who: str, place: str, name: str) -> Any:
    """Return what a module, or a Python file, has under a name; InputError if importing it raises."""
    module = import_module(who, place)
    try:
        return operator.attrgetter(name)(module)
    except AttributeError as error:
        known = [one for one in dir(error.obj) if not one.startswith("_")]
        hint = did_you_mean(error.name, known, f" It has {', '.join(map(repr, known)) or 'none'}.", most=3)
        raise InputError(f"{who}: {place} has no {name!r}.{hint}") from error


def call(who: str, function: Any, place: str) -> Any:
    """Return what a function makes; InputError if it raises, with the line of its file."""
    if not callable(function):
        raise InputError(f"{who}: {function!r} cannot be called.")
    try:
        return function()
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        what = f"calling {getattr(function, '__qualname__', repr(function))} raised {exception_text(error, '.')}"
        raise InputError(f"{who}: {what}{line_of(error, place)}.") from error


@contextlib.contextmanager
def importable(place: str) -> Iterator[None]:
    """Let modules be found beside a Python file, as Python does, or in the working folder after what is installed."""
    beside = place.endswith(".py")
    folder = str(Path(place).resolve().parent) if beside else os.getcwd()
    if added := beside or folder not in sys.path:
        sys.path.insert(0 if beside else len(sys.path), folder)
    try:
        yield
    finally:
        if added and folder in sys.path:
            sys.path.remove(folder)


def _run_file(path: Path) -> ModuleType:
    known = sys.modules.get(path.stem)
    if known is not None and (given := getattr(known, "__file__", None)) and path.samefile(given):
        return known  # for another method, or a partitioner
    name = path.stem if known is None else f"{path.stem} of {path}"
    spec: Any = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def line_of(error: BaseException, place: str) -> str:
    """Return the last line of the user's file that led to an error, as the end of a message."""
    frames = traceback.extract_tb(error.__traceback__) if place.endswith(".py") else ()
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == Path(place).name]
    return f" ({place}, line {lines[-1]})" if lines else ""
