"""What identifies the code of a plug-in as it is in memory: its functions, and all that they can reach by name.

Files say what a process would import now, not what this one runs: a file may have been edited since, a class attribute
or a variable of a module set. So functions are described by their compiled code, and by the values of the variables,
defaults and closures that it names; whatever those refer to is described in turn. It ends at modules whose version is
in the key anyway: Python's own, and what is installed, except the plug-in's own package.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import importlib.util
import inspect
import logging
import re
import site
import struct
import sys
import sysconfig
import threading
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, cast

from exir_lowering.steps.cache.keys import Forms, NoKeyError, Storages

_INSTALLED = tuple(
    {
        *(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")),
        *(site.getsitepackages() if hasattr(site, "getsitepackages") else ()),
        site.getusersitepackages(),
    }
)
_OF_CLASSES = frozenset(
    {
        *("__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__abstractmethods__", "_abc_impl"),
        *("__parameters__", "__orig_bases__", "__dataclass_fields__", "__dataclass_params__", "__match_args__"),
        *("__firstlineno__", "__static_attributes__", "__annotate__", "__annotations_cache__", "__type_params__"),
    }
)
"""What Python keeps in classes beside what they do."""

_OF_MODULES = frozenset(
    {
        *("__name__", "__doc__", "__package__", "__loader__", "__spec__", "__file__", "__cached__", "__builtins__"),
        *("__path__", "__annotations__", "__warningregistry__"),
    }
)
"""The same for modules."""

_BY_NAME = frozenset({"eval", "exec", "globals", "vars"})
"""What reaches variables of a module that the code does not name."""


def describe_code(kind: type, settings: Mapping[str, Any] | None = None) -> list[str]:
    """Return lines that are equal in any process if a class with an object's settings does the same; or NoKeyError."""
    try:
        return _Code(kind.__module__.partition(".")[0]).describe(kind, dict(settings or {}))
    except (NoKeyError, MemoryError):
        raise
    except Exception as error:  # of objects that do not answer what they are asked, or refer to themselves
        try:
            text = f"{type(error).__name__}: {error}"
        except MemoryError:
            raise
        except Exception:
            text = type(error).__name__
        raise NoKeyError(f"the code of {kind.__module__}.{kind.__qualname__} cannot be described: {text}") from None


def _is_installed(file: str | None) -> bool:
    return file is not None and any(PurePath(file).is_relative_to(folder) for folder in _INSTALLED)


class _Code:
    """Describes what can be reached from a class of a package, each thing once."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._forms = Forms(Storages(), named=True)
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no identity is that of something else later
        self._waiting: list[tuple[Any, str]] = []

    def describe(self, kind: type, settings: dict[str, Any]) -> list[str]:
        lines = [self._refer(kind, kind.__qualname__), self._value(settings, f"a setting of {kind.__qualname__}")]
        while self._waiting:
            value, where = self._waiting.pop(0)
            describe = self._function if isinstance(value, FunctionType) else self._class
            lines += [f"{self._numbers[id(value)]}: {line}" for line in describe(value, where)]
        return lines

    def _refer(self, value: Any, where: str) -> str:
        """Return the number of a function or a class, which is described in its turn."""
        if id(value) not in self._numbers:
            self._number(value)
            self._waiting.append((value, where))
        return f"#{self._numbers[id(value)]}"

    def _is_versioned(self, module: Any) -> bool:
        """Return whether a module's code is that of a version that the key has."""
        name = str(module or "")
        if name.partition(".")[0] in sys.stdlib_module_names and name != "__main__":
            return True
        if name.partition(".")[0] == self._package:
            return False
        if name.partition(".")[0] in ("exir_lowering", "executorch", "torch"):
            return True
        return _is_installed(getattr(sys.modules.get(name), "__file__", None))

    # -- what is described in its turn

    def _class(self, kind: type, where: str) -> Iterator[str]:
        yield f"class {kind.__module__}.{kind.__qualname__}"
        for base in kind.__bases__:
            yield f"base {self._value(base, where)}"
        if type(kind) is not type:
            yield f"metaclass {self._value(type(kind), where)}"
        for name in sorted(set(vars(kind)) - _OF_CLASSES):
            if not isinstance(vars(kind)[name], (GetSetDescriptorType, MemberDescriptorType)):
                yield f"{name} = {self._value(vars(kind)[name], f'{where}.{name}')}"

    def _function(self, function: FunctionType, where: str) -> Iterator[str]:
        yield f"function {function.__module__}.{function.__qualname__} {_digest(function.__code__)}"
        yield f"defaults {self._value((function.__defaults__, function.__kwdefaults__), where)}"
        if function.__dict__:
            yield f"attributes {self._value(function.__dict__, where)}"
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell == CellType():
                yield f"{name} is not set"
            else:
                yield f"{name} = {self._value(cell.cell_contents, f'{where}, variable {name}')}"
        if self._is_versioned(function.__globals__.get("__name__")):  # such as a decorator's function
            return
        names = {name for code in _codes(function.__code__) for name in code.co_names}
        reached = set(function.__globals__) - _OF_MODULES if names & _BY_NAME else names & set(function.__globals__)
        for name in sorted(reached):
            yield f"{name} = {self._value(function.__globals__[name], f'{function.__module__}.{name}')}"
        for name in sorted(set(_imported(function))):
            yield f"import {name} {self._import(name, where)}"

    def _module(self, module: ModuleType) -> str:
        """Return the form of a module: all of it, unless its version is known."""
        if self._is_versioned(module.__name__):
            return f"module {module.__name__}"
        if not str(getattr(module, "__file__", None) or ".py").endswith(".py"):
            raise NoKeyError(f"the module {module.__name__} is no Python code, and has no version")
        if id(module) in self._numbers:
            return f"#{self._numbers[id(module)]}"
        self._number(module)
        found = sorted(set(vars(module)) - _OF_MODULES)
        inside = (f"{name}={self._value(vars(module)[name], f'{module.__name__}.{name}')}" for name in found)
        return f"module {module.__name__}({','.join(inside)})"

    def _number(self, value: Any) -> int:
        self._alive.append(value)
        return self._numbers.setdefault(id(value), len(self._numbers))

    def _import(self, name: str, where: str) -> str:
        """Return what a function imports when it is called."""
        module = sys.modules.get(name)
        if module is not None:
            return self._module(module)
        if self._is_versioned(name):
            return "when it is called"
        top = name.partition(".")[0]
        if top != self._package and _is_installed(getattr(importlib.util.find_spec(top), "origin", None)):
            return "when it is called"
        raise NoKeyError(f"{where} imports {name}, which is not imported yet")

    # -- values

    def _value(self, value: Any, where: str) -> str:
        """Return the form of a value; of what is described in its turn, or was before, the number."""
        kind = type(value)
        if kind in _NUMBERED:
            if id(value) in self._numbers:
                return f"#{self._numbers[id(value)]}"
            self._number(value)
        if kind in _WRAPPERS:
            return f"{kind.__qualname__}({','.join(self._value(part, where) for part in _WRAPPERS[kind](value))})"
        if isinstance(value, FunctionType):
            modules = value.__module__, value.__globals__.get("__name__")
            if value.__closure__ or not all(map(self._is_versioned, modules)):
                return self._refer(value, where)
            return f"{modules[1]}.{value.__qualname__} {_digest(value.__code__)}"
        if isinstance(value, type) and kind is not GenericAlias:
            versioned = self._is_versioned(value.__module__)
            return f"{value.__module__}.{value.__qualname__}" if versioned else self._refer(value, where)
        if isinstance(value, ModuleType):
            return self._module(value)
        if isinstance(value, logging.Logger):  # of whatever class: a library can set that for all
            return f"logger {value.name}"
        if not self._is_versioned(kind.__module__):
            return self._instance(value, where)
        if isinstance(value, (list, tuple)):
            return f"{kind.__name__}({','.join(self._value(item, where) for item in value)})"
        if isinstance(value, Mapping):
            made = self._value(getattr(value, "default_factory", None), where)
            items = (f"{self._value(key, where)}:{self._value(item, where)}" for key, item in value.items())
            return f"{kind.__name__}({made};{','.join(items)})"
        if isinstance(value, (set, frozenset)):
            return f"set({','.join(self._value(item, where) for item in _ordered(value, where))})"
        return self._object(value, where)

    def _object(self, value: Any, where: str) -> str:
        kind = type(value)
        if kind in _BUILT_IN:
            return self._built_in(value, where)
        if isinstance(value, enum.Enum):
            return f"{self._value(kind, where)}.{value.name}"
        if typing.get_args(value):
            parts = (typing.get_origin(value), *typing.get_args(value))
            return f"type({','.join(self._value(part, where) for part in parts)})"
        if isinstance(value, _LOCKS):
            return "lock"
        if isinstance(value, struct.Struct):
            return f"struct {value.format}"
        if isinstance(value, re.Pattern):
            return f"re {value.pattern!r} {value.flags}"
        if isinstance(value, (PurePath, range, type(annotations))) or kind.__module__ == "typing":
            return repr(value)
        try:
            return self._forms.form(value)
        except NoKeyError as error:
            if not hasattr(value, "__dict__") or not all(map(_is_python, kind.__mro__)):
                raise NoKeyError(f"{where}: {error}") from None
        return self._instance(value, where)

    def _built_in(self, value: Any, where: str) -> str:
        module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
        bound = getattr(value, "__self__", None)
        if bound is not None and not isinstance(bound, ModuleType):
            return f"built in {value.__qualname__} of {self._value(bound, where)}"
        if module is not None and not self._is_versioned(module):
            raise NoKeyError(f"{where}: {value.__qualname__} of {module} is no Python code, and has no version")
        return f"built in {module}.{value.__qualname__}"

    def _instance(self, value: Any, where: str) -> str:
        """Return the form of an object by its attributes, and what it is beside."""
        if id(value) in self._numbers:
            return f"#{self._numbers[id(value)]}"
        self._number(value)
        content: list[Any] = [attributes(value)]
        for base in type(value).__mro__:
            if base in _PLAIN:
                content.append(cast("Any", base).__repr__(value) if base in _TEXTUAL else base(value))
            elif self._is_versioned(base.__module__) and not _is_python(base):
                raise NoKeyError(f"{where}: objects of {base.__module__}.{base.__qualname__} have no canonical form")
        return f"{self._value(type(value), where)}{self._value(content, where)}"


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those in slots."""
    found = dict(getattr(value, "__dict__", None) or {})
    for base in type(value).__mro__:
        slots = (name for name, slot in vars(base).items() if isinstance(slot, MemberDescriptorType))
        found |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return found


def _ordered(values: Collection[Any], where: str) -> list[Any]:
    """Return the members of a set in an order that is the same in any process."""

    def key(value: Any) -> tuple[str, str, str]:
        text = repr(value) if type(value) in _TEXTUAL or value is None else ""
        named = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', getattr(value, 'name', ''))}"
        return type(value).__qualname__, text, named if not text else ""

    if len(set(map(key, values))) < len(values):
        raise NoKeyError(f"{where}: a set of objects has no order")
    return sorted(values, key=key)


_TEXTUAL: tuple[Any, ...] = (str, bytes, int, float, complex)
_PLAIN: tuple[Any, ...] = (*_TEXTUAL, list, tuple, set, frozenset, dict)
_NUMBERED = (list, dict, set)  # what can hold itself

_BUILT_IN = (
    *(BuiltinFunctionType, GetSetDescriptorType, MemberDescriptorType, type(object.__init__), type(object().__str__)),
    *(type(re.compile("").match), type(str.join), type(dict.__dict__["fromkeys"])),
)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: classes of C that never change lack it
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_WRAPPERS: dict[Any, Callable[[Any], tuple[Any, ...]]] = {
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    property: lambda value: (value.fget, value.fset, value.fdel),
    functools.cached_property: lambda value: (value.func,),
    functools.partial: lambda value: (value.func, value.args, value.keywords),
    functools.partialmethod: lambda value: (value.func, value.args, value.keywords),
    MethodType: lambda value: (value.__func__, value.__self__),
    type(functools.lru_cache(lambda: None)): lambda value: (value.__wrapped__, value.cache_parameters()),
}
"""What descriptors and wrappers hold."""


@functools.cache
def _is_python(kind: type) -> bool:
    """Return whether the objects of a class have no state but their attributes, as far as that class goes."""
    if kind is object:
        return True
    try:
        return bool(kind.__flags__ & _HEAP_TYPE and inspect.getsource(kind))
    except (OSError, TypeError):
        return False


def _digest(code: CodeType) -> str:
    """Return the digest of what code does: not where it stands."""
    text = repr([code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags])
    text += repr([code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount])
    text += repr(getattr(code, "co_exceptiontable", None))
    text += ",".join(map(_constant, code.co_consts))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _digest(value)
    if isinstance(value, tuple):
        return f"({','.join(map(_constant, value))})"
    if isinstance(value, frozenset):
        return f"{{{','.join(sorted(map(_constant, value)))}}}"
    return f"{type(value).__name__} {value!r}"


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _imported(function: FunctionType) -> Iterator[str]:
    """Yield the names of the modules that a function imports."""
    package = function.__globals__.get("__package__") or ""
    for code in _codes(function.__code__):
        before: list[Any] = []
        for instruction in dis.get_instructions(code):
            if instruction.opname == "IMPORT_NAME":
                level, name = before[-2] if len(before) > 1 else 0, str(instruction.argval)
                yield importlib.util.resolve_name("." * level + name, package) if level else name
            before.append(instruction.argval)
