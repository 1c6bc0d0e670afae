"""What the user names on the command line is imported here, modules and Python files; nothing that a file names is."""

from __future__ import annotations

import contextlib
import functools
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

from exir_lowering.cli.output import find_file, first_line
from exir_lowering.errors import InputError, did_you_mean


def check(who: str, place: str) -> None:
    """Raise InputError if there is no such Python file or package, before anything slow is imported."""
    if place.endswith(".py"):
        find_file(place)
    elif (package := place.partition(".")[0]) not in sys.modules:
        with _importable(place):
            if importlib.util.find_spec(package) is None:
                raise InputError(
                    f"{who}: {place!r} cannot be imported: ModuleNotFoundError: No module named {package!r}."
                )


def import_module(who: str, place: str) -> ModuleType:
    """Return a module, or that of a Python file; InputError if importing it raises."""
    with _importable(place), explaining(f"{who}: {place!r} cannot be imported:", place):
        return _run_file(Path(place).resolve()) if place.endswith(".py") else importlib.import_module(place)


def make(who: str, place: str, name: str, ready: Any) -> Any:
    """Return what a module or a Python file has under a name, called unless it is of a type that is `ready`."""
    module = import_module(who, place)
    try:
        found = operator.attrgetter(name)(module)
    except AttributeError as error:
        known = [one for one in dir(error.obj) if not one.startswith("_")]
        hint = did_you_mean(error.name, known, f" It has {', '.join(map(repr, known)) or 'none'}.", most=3)
        raise InputError(f"{who}: {place} has no {name!r}.{hint}") from error
    if isinstance(found, ready):
        return found
    if not callable(found):
        raise InputError(f"{who}: {found!r} cannot be called.")
    with _importable(place), explaining(f"{who}: calling {name} raised", place):
        return found()


@contextlib.contextmanager
def explaining(what: str, place: str) -> Iterator[None]:
    """Raise InputError for what the user's code raises, with the last line of their file that led there."""
    try:
        yield
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__) if place.endswith(".py") else ()
        lines = [frame.lineno for frame in frames if Path(frame.filename).name == Path(place).name]
        line = f" ({place}, line {lines[-1]})" if lines else ""
        branch = " What depends on a tensor's values is torch.where, or torch.cond." * ("data-dependent" in str(error))
        said = f"{type(error).__name__}: {first_line(error)[:800]}{line}.{branch} --debug shows all of it."
        raise InputError(f"{what} {said}") from error


@contextlib.contextmanager
def _importable(place: str) -> Iterator[None]:
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


@functools.cache
def _run_file(path: Path) -> ModuleType:
    name = path.stem if path.stem not in sys.modules else f"{path.stem} of {path}"
    spec: Any = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
