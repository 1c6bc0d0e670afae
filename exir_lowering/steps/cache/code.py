"""What identifies the code of a plug-in as it is in memory: its functions, and all that they can reach by name.

Files say what a process would import now, not what this one runs: a file may have been edited since, a class attribute
or a variable of a module set. So functions are described by their compiled code, and by the values of the variables,
defaults and closures that it names; whatever those refer to is described in turn. It ends at modules whose version is
in the key anyway: Python's own, and what is installed, except the plug-in's own package.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.util
import inspect
import logging
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
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
    UnionType,
)
from typing import Any

from exir_lowering.errors.interrupts import let_through
from exir_lowering.steps.cache.forms import Forms, Storages
from exir_lowering.steps.cache.keys import NoKeyError

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

_BY_NAME = frozenset(
    {"eval", "exec", "getattr", "globals", "import_module", "locals", "setattr", "vars", "__dict__", "__import__"}
)
"""What reaches attributes of modules that the code does not name."""


def describe_code(kind: type, settings: Mapping[str, Any] | None = None) -> list[str]:
    """Return lines that are equal, in any process, if a class, with the settings of an object, does the same.

    Raise NoKeyError if that cannot be told.
    """
    try:
        return _Code(kind.__module__.partition(".")[0]).describe(kind, dict(settings or {}))
    except NoKeyError:
        raise
    except Exception as error:  # of objects that do not answer what they are asked, or refer to themselves
        let_through(error)
        said = f"{type(error).__name__}: {error}"
        raise NoKeyError(f"the code of {kind.__module__}.{kind.__qualname__} cannot be described: {said}") from None


class _Code:
    """Describes what can be reached from a class of a package, each thing once."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._forms = Forms(Storages(), named=True)
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no identity is that of something else later
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
            self._numbers[id(value)] = len(self._numbers)
            self._kept.append(value)
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
        file = getattr(sys.modules.get(name), "__file__", None)
        return file is not None and any(PurePath(file).is_relative_to(folder) for folder in _INSTALLED)

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
        names = sorted(set(_names(function.__code__)))
        for name in names:
            if name in function.__globals__:
                value = function.__globals__[name]
                yield f"{name} = {self._global(value, names, f'{function.__module__}.{name}')}"
        for name in sorted(set(_imported(function))):
            yield f"import {name} {self._import(name, names, where)}"

    def _global(self, value: Any, names: Iterable[str], where: str) -> str:
        return self._module(value, names) if isinstance(value, ModuleType) else self._value(value, where)

    def _module(self, module: ModuleType, names: Iterable[str]) -> str:
        """Return what a function reaches in a module: the attributes that its code names."""
        if self._is_versioned(module.__name__):
            return f"module {module.__name__}"
        if not str(getattr(module, "__file__", None) or ".py").endswith(".py"):
            raise NoKeyError(f"the module {module.__name__} is no Python code, and has no version")
        reached = sorted(vars(module)) if _BY_NAME.intersection(names) else [n for n in names if n in vars(module)]
        found = [name for name in reached if not name.startswith("__")]
        inside = (f"{name}={self._global(vars(module)[name], names, f'{module.__name__}.{name}')}" for name in found)
        key = id(module), tuple(found)
        if key in self._modules:
            return f"module {module.__name__}"
        self._modules.add(key)
        return f"module {module.__name__}({','.join(inside)})"

    @functools.cached_property
    def _modules(self) -> set[Any]:
        return set()

    def _import(self, name: str, names: Iterable[str], where: str) -> str:
        """Return what a function imports when it is called."""
        module = sys.modules.get(name)
        if module is not None:
            return self._module(module, names)
        if self._is_versioned(name) or self._is_installed(name):
            return "when it is called"
        raise NoKeyError(f"{where} imports {name}, which is not imported yet")

    def _is_installed(self, name: str) -> bool:
        if name.partition(".")[0] == self._package:
            return False
        found = importlib.util.find_spec(name.partition(".")[0])
        origin = found.origin if found is not None else None
        return origin is not None and any(PurePath(origin).is_relative_to(folder) for folder in _INSTALLED)

    # -- values

    def _value(self, value: Any, where: str) -> str:
        """Return the form of a value; of what is described in its turn, the number."""
        unwrapped = _unwrap(value)
        if unwrapped is not None:
            inner = ",".join(self._value(part, where) for part in unwrapped)
            return f"{type(value).__qualname__}({inner})"
        if isinstance(value, FunctionType):
            modules = value.__module__, value.__globals__.get("__name__")
            if value.__closure__ or not all(map(self._is_versioned, modules)):
                return self._refer(value, where)
            return f"{modules[1]}.{value.__qualname__} {_digest(value.__code__)}"
        if isinstance(value, type):
            versioned = self._is_versioned(value.__module__)
            return f"{value.__module__}.{value.__qualname__}" if versioned else self._refer(value, where)
        if isinstance(value, ModuleType):
            return self._module(value, ())
        if type(value) in (list, tuple):
            return f"{type(value).__name__}({','.join(self._value(item, where) for item in value)})"
        if type(value) is dict:
            items = value.items()
            return f"dict({','.join(f'{self._value(k, where)}:{self._value(v, where)}' for k, v in items)})"
        if type(value) in (set, frozenset):
            return f"set({','.join(sorted(self._value(item, where) for item in value))})"
        return self._object(value, where)

    def _object(self, value: Any, where: str) -> str:
        kind = type(value)
        if isinstance(value, (BuiltinFunctionType, GetSetDescriptorType, MemberDescriptorType)) or kind in _SLOTS:
            return f"built in {getattr(value, '__module__', None)}.{value.__qualname__}"
        if isinstance(value, logging.Logger):
            return f"logger {value.name}"
        if isinstance(value, (re.Pattern, PurePath, *_TYPING)) or kind.__module__ == "typing":
            return repr(value)
        if not self._is_versioned(kind.__module__):
            return self._instance(value, where)
        try:
            return self._forms.form(value)
        except NoKeyError as error:
            if not hasattr(value, "__dict__") or not all(map(_is_python, kind.__mro__)):
                raise NoKeyError(f"{where}: {error}") from None
        return self._instance(value, where)

    def _instance(self, value: Any, where: str) -> str:
        """Return the form of an object of a class that is described."""
        if id(value) in self._numbers:
            return f"#{self._numbers[id(value)]}"
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        content: list[Any] = [getattr(value, "__dict__", None)]
        for base in type(value).__mro__:
            slots = [name for name, slot in vars(base).items() if isinstance(slot, MemberDescriptorType)]
            content.append({name: getattr(value, name) for name in slots if hasattr(value, name)})
        content += [plain(value) for plain in (list, tuple, set, frozenset, dict) if isinstance(value, plain)]
        if isinstance(value, (str, bytes, int, float, complex)):
            content.append(repr(value))
        return f"{self._value(type(value), where)}{self._value(content, where)}"


_SLOTS = (type(object.__init__), type(object().__str__), type(str.join), type(dict.__dict__["fromkeys"]))


_TYPING = (GenericAlias, UnionType, type(annotations))


def _is_python(kind: type) -> bool:
    """Return whether the objects of a class have no state but their attributes, as far as that class goes."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind is object or (file is not None and file.endswith(".py"))


def _unwrap(value: Any) -> tuple[Any, ...] | None:
    """Return what a descriptor or a wrapper holds; None if it is neither."""
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, (functools.partial, functools.partialmethod)):
        return value.func, value.args, value.keywords
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if hasattr(value, "cache_parameters"):
        return (inspect.unwrap(value),)
    return None


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


def _names(code: CodeType) -> Iterator[str]:
    """Yield the variables of the module, and the attributes, that code names."""
    for inner in _codes(code):
        yield from inner.co_names


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
