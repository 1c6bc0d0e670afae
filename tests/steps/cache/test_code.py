"""The code of a plug-in is in the key as it is in memory: what a result can depend on makes another key, or none."""

from __future__ import annotations

import enum
import functools
import importlib
import logging
import os
import re
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from cached import layers, linear, uses

from exir_lowering import LoweredMethods, LoweringOptions, PreprocessResult, lower
from exir_lowering.steps.cache.code import attributes, describe_code
from exir_lowering.steps.cache.keys import NoKeyError

BACKEND = """
import logging
import re
import struct
import threading
import torch
from dataclasses import dataclass
from functools import lru_cache, partial
from exir_lowering import Backend, PreprocessResult
from . import helper, tables
from .helper import scaled

_LOG = logging.getLogger(__name__)
_WORD = re.compile("[a-z]+")
_PAIR = struct.Struct("<II")
_LOCK = threading.Lock()
FACTOR = 2

@dataclass(frozen=True)
class Settings:
    depth: int = 1
    def total(self):
        return self.depth * 10

SETTINGS = Settings()

@lru_cache
def remembered(value):
    return value + 1

class Base(Backend):
    backend_id = "code"
    width = 3
    @staticmethod
    def pad(text):
        return text + b"."
    @property
    def height(self):
        return 4

class Code(Base):
    one_by_one = True
    @torch.no_grad()
    def preprocess(self, program, compile_specs):
        from .late import suffix
        with _LOCK:
            _LOG.debug("%s %s", _WORD, _PAIR.size)
        grow = partial(scaled, factor=FACTOR)
        numbers = [grow(self.width), helper.offset(1), tables.TABLE["key"](5), SETTINGS.total(), remembered(7)]
        return PreprocessResult(self.pad(repr([*numbers, self.height]).encode()) + suffix())
"""
FILES = {
    "__init__.py": "",
    "backend.py": BACKEND,
    "helper.py": "SHIFT = 1\ndef scaled(value, factor, more=1):\n    return value * factor * more\n"
    "def offset(value):\n    return inner(value)\ndef inner(value):\n    return value + SHIFT\n",
    "tables.py": "TABLE = {'key': lambda value: value - 1}\n",
    "late.py": "def suffix():\n    return b'!'\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package of a backend, imported from source files."""
    folder = tmp_path / "codepackage"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    names = [Path(name).stem for name in FILES if "_" not in name]
    modules = {name: importlib.import_module(f"codepackage.{name}") for name in names}
    yield SimpleNamespace(folder=folder, **modules)
    for name in [name for name in sys.modules if name.partition(".")[0] == "codepackage"]:
        del sys.modules[name]


def _set(target: str, value: Any) -> Callable[[Any], None]:
    """Return what sets an attribute: the path is below the package."""

    def change(package: Any) -> None:
        owner, _, name = target.rpartition(".")
        for part in owner.split("."):
            package = getattr(package, part)
        setattr(package, name, value)

    return change


def _item(package: Any) -> None:
    package.tables.TABLE["key"] = lambda value: value - 2


def _decorated(package: Any) -> None:
    package.backend.Code.preprocess = torch.no_grad()(lambda *given: PreprocessResult(b"decorated"))


def _default(package: Any) -> None:
    package.helper.scaled.__defaults__ = (3,)


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name


class _OddError(Exception):
    def __str__(self) -> str:
        raise TypeError


class _Odd:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise _OddError


class _Queue(deque[int]):
    pass


class _Attributes(dict[str, int]):
    __getattr__ = dict.__getitem__


class _Text(str):
    def __repr__(self) -> str:
        return "*"


def _visits(again: bool) -> type:
    """Return a class like `_Visitor`, of the same name, whose method does the same or not."""
    made = type("_Visitor", (), {"visit": (lambda self: 2) if again else (lambda self: 1)})
    made.__module__ = __name__
    return made


def _of_kind(value: int) -> type:
    """Return a class, the same but for its metaclass."""
    kind = type("_Kind", (type,), {"level": value, "__module__": __name__})
    return kind("_Visitor", (), {"__module__": __name__})  # type: ignore[no-any-return]


def _levels(value: int) -> Any:
    return enum.Enum("_Level", {"LOW": value}, module=__name__)


def _cyclic(value: int) -> list[Any]:
    made: list[Any] = [value]
    made.append(made)
    return made


def _doubled(value: int) -> list[Any]:
    made: list[Any] = [value]
    for _ in range(40):
        made = [made, made]
    return made


def _remembering(value: int) -> Any:
    def decorated(function: Any) -> Any:
        return functools.wraps(function)(lambda: value)

    return functools.lru_cache(decorated(_visits))


VALUES: dict[str, Callable[[int], Any]] = {
    "a dictionary with attributes": lambda value: _Attributes(level=value),
    "a bound method of a table": lambda value: {"a": value}.get,
    "a bound method of a pattern": lambda value: re.compile(f"a{value}").match,
    "an ordered dictionary of classes": lambda value: OrderedDict(a=_visits(value == 2)),
    "a default dictionary": lambda value: defaultdict(_visits(value == 2)),
    "a view of a dictionary": lambda value: MappingProxyType({"a": _visits(value == 2)}),
    "a generic type": lambda value: list[_visits(value == 2)],  # type: ignore[misc]
    "a union": lambda value: int | _visits(value == 2),
    "a metaclass": _of_kind,
    "a member of an enumeration": lambda value: OrderedDict(a=_levels(value).LOW),
    "a long pattern": lambda value: re.compile("a" * 300 + str(value)),
    "a list that holds itself": _cyclic,
    "a list of lists of lists": _doubled,
    "what is decorated and remembered": _remembering,
    "a partial function": lambda value: functools.partial(max, value),
    "a text of a class": lambda value: _Text(value),
}

CHANGES = {
    "a class attribute": _set("backend.Code.width", 5),
    "one of a base": _set("backend.Base.width", 5),
    "a method": _set("backend.Code.pad", staticmethod(lambda text: text + b"?")),
    "what is decorated": _decorated,
    "a property": _set("backend.Base.height", property(lambda self: 5)),
    "a variable": _set("backend.FACTOR", 3),
    "an object": _set("backend.SETTINGS.__class__.total", lambda self: 0),
    "a helper": _set("backend.scaled", lambda value, factor: 0),
    "a helper of another module": _set("helper.offset", lambda value: 0),
    "what a helper calls": _set("helper.inner", lambda value: 0),
    "a variable that a helper reads": _set("helper.SHIFT", 2),
    "a default": _default,
    "a function in a table": _item,
    "what is remembered": _set("backend.remembered", lambda value: 0),
    "what is imported late": _set("late.suffix", lambda: b"?"),
}


def _lower(package: Any, folder: Any) -> LoweredMethods:
    options = LoweringOptions(cache=folder)
    return lower(layers(), linear("code"), options=options, backends={"code": package.backend.Code()})


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_a_result_is_no_hit(package: Any, change: Callable[[Any], None], tmp_path: Path) -> None:
    _lower(package, tmp_path)
    assert all(use.hit for use in uses(_lower(package, tmp_path)))
    change(package)
    changed = _lower(package, tmp_path)
    assert not any(use.hit for use in uses(changed))
    assert changed.emit().buffer == _lower(package, False).emit().buffer


@pytest.mark.parametrize("name", ["backend.py", "helper.py"])
def test_a_file_that_was_edited_after_its_import_does_not_matter(package: Any, name: str, tmp_path: Path) -> None:
    """What is kept is the result of the code that ran; a process that has the new code makes its own."""
    before = _lower(package, tmp_path).emit().buffer
    path = package.folder / name
    path.write_text(path.read_text().replace("FACTOR = 2", "FACTOR = 9").replace("SHIFT = 1", "SHIFT = 8"))
    again = _lower(package, tmp_path)
    assert all(use.hit for use in uses(again)) and again.emit().buffer == before
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from codepackage import backend, late\nfrom cached import layers, linear, uses\n"
        "from exir_lowering import LoweringOptions, lower\n"
        "def lowered(kept):\n"
        "    options = LoweringOptions(cache=kept)\n"
        "    return lower(layers(), linear('code'), options=options, backends={'code': backend.Code()})\n"
        "found = lowered(sys.argv[1])\n"
        "print(sum(use.hit for use in uses(found)), found.emit().buffer == lowered(False).emit().buffer)\n"
    )
    support = os.pathsep.join([str(Path(__file__).parents[2] / "support"), os.environ.get("PYTHONPATH", "")])
    done = forked.run(code, tmp_path, package.folder.parent, env={"PYTHONPATH": support})
    assert done.stdout.split() == ["0", "True"], done.stderr


def test_equal_code_is_equal_in_another_process(package: Any, tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from codepackage import backend, late\nfrom exir_lowering.steps.cache.code import attributes, describe_code\n"
        "print(describe_code(backend.Code, {'a': [1, {2, 'b'}]}))\n"
    )
    expected = describe_code(package.backend.Code, {"a": [1, {2, "b"}]})
    for seed in ("1", "2"):
        done = forked.run(code, package.folder.parent, env={"PYTHONHASHSEED": seed}, fresh=True)
        assert done.stdout.strip() == repr(expected), done.stderr


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set("backend.FACTOR", object()), "codepackage.backend.FACTOR: a value of type builtins.object"),
        (_set("backend.FACTOR", {_Named("a"), _Named("a")}), "FACTOR: a set of objects has no order"),
        (_set("backend.FACTOR", _Odd()), "cannot be described: _OddError"),
        (_set("backend.FACTOR", _Queue()), "FACTOR: objects of collections.deque have no canonical form"),
        (_set("backend.Code.width", iter([1])), "Code.width: a value of type builtins.list_iterator"),
        (lambda package: sys.modules.pop("codepackage.late"), "imports codepackage.late, which is not imported yet"),
    ],
)
def test_what_cannot_be_told_has_no_key(package: Any, change: Any, reason: str) -> None:
    change(package)
    with pytest.raises(NoKeyError, match=reason):
        describe_code(package.backend.Code)


def test_a_logger_is_its_name_whatever_its_class(package: Any) -> None:
    """Libraries set the class of all loggers, such as nncf, whose version the key does not have."""

    class Noted(logging.Logger):
        pass

    expected = describe_code(package.backend.Code)
    package.backend._LOG = Noted("codepackage.backend")
    package.backend._LOG.addHandler(logging.StreamHandler(sys.stderr))
    assert describe_code(package.backend.Code) == expected


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_values_are_told_apart(package: Any, make: Callable[[int], Any]) -> None:
    def described(value: int) -> list[str]:
        package.backend.FACTOR = make(value)
        return describe_code(package.backend.Code)

    assert described(1) == described(1)
    assert described(1) != described(2)


def test_slots_of_a_backend_are_settings(package: Any) -> None:
    class Slotted(package.backend.Base):  # type: ignore[misc,name-defined]
        __slots__ = ("level",)

        def preprocess(self, program: Any, compile_specs: Any) -> Any:
            raise NotImplementedError

    one, other = Slotted(), Slotted()
    one.level, other.level = 1, 2
    assert attributes(one) == {"level": 1} != attributes(other)


def test_the_report_says_why_it_is_not_cached(package: Any, tmp_path: Path) -> None:
    package.backend._WORD = object()
    for _ in range(2):
        found = uses(_lower(package, tmp_path))
        assert found and all(not use.hit and "backend._WORD: a value of type" in use.explain() for use in found)
