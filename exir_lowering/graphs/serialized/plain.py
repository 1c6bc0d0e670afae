"""Plain arguments as JSON: what JSON has is itself, anything else an object whose only key says what it is.

Executing a file needs these alone; `arguments` adds what only a compiler has. What is allowed here is safe to execute.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from exir_lowering.graphs.operators import pure
from exir_lowering.graphs.serialized.container import DEEPEST, NotSerialisableError

_NATIVE = (type(None), bool, int)
_FORMATS = {
    name: getattr(torch, name) for name in ("channels_last", "channels_last_3d", "contiguous_format", "preserve_format")
}


class _Names:
    """The values of torch's own types that have names."""

    dtypes: ClassVar[Mapping[str, torch.dtype]] = pure.DTYPES
    layouts: ClassVar[Mapping[str, torch.layout]] = {"strided": torch.strided}
    devices: ClassVar[re.Pattern[str]] = re.compile("cpu")


class PlainWriter(_Names):
    """Writes plain arguments."""

    def __init__(self) -> None:
        self.writers: dict[type, Callable[[Any, int], Any]] = {
            str: lambda value, depth: value,
            float: lambda value, depth: value if math.isfinite(value) else {"float": repr(value)},
            complex: lambda value, depth: {"complex": [repr(value.real), repr(value.imag)]},
            **dict.fromkeys((list, immutable_list), self.list),
            tuple: lambda value, depth: {"tuple": self.list(value, depth)},
            **dict.fromkeys((dict, OrderedDict, immutable_dict), self._dict),
            torch.dtype: lambda value, depth: {"dtype": _find(self.dtypes, value)},
            torch.device: lambda value, depth: {"device": self._device(value)},
            torch.layout: lambda value, depth: {"layout": _find(self.layouts, value)},
            torch.memory_format: lambda value, depth: {"memory_format": _find(_FORMATS, value)},
        }

    def write(self, value: Any, depth: int = 0) -> Any:
        """Write a value; NotSerialisableError if it cannot be written exactly."""
        kind = type(value)
        if kind in _NATIVE:
            return value
        writer = self.writers.get(kind)
        if writer is None:
            return self.rare(value)
        if depth > DEEPEST:
            raise NotSerialisableError(f"a value that nests more than {DEEPEST} deep")
        return writer(value, depth + 1)

    def rare(self, value: Any) -> Any:
        """Write a value of a type that has no writer of its own."""
        raise NotSerialisableError(f"a value of the type {type(value).__name__}: {str(value)[:200]}")

    def list(self, value: Sequence[Any], depth: int) -> Any:
        """Write each of several values."""
        return [self.write(item, depth) for item in value]

    def _dict(self, value: Mapping[Any, Any], depth: int) -> Any:
        return {"dict": [[self.write(key, depth), self.write(item, depth)] for key, item in value.items()]}

    def _device(self, device: torch.device) -> str:
        name = str(device)
        if not self.devices.fullmatch(name):
            raise NotSerialisableError(f"the device {name}")
        return name


def _find(table: Mapping[str, Any], value: Any) -> str:
    for name, known in table.items():
        if known == value:
            return name
    raise NotSerialisableError(f"the value {value}")


class PlainReader(_Names):
    """Reads what `PlainWriter` wrote."""

    def __init__(self) -> None:
        many = self.many
        self.readers: dict[str, Callable[[Any, int], Any]] = {
            "tuple": lambda content, depth: tuple(many(content, depth)),
            "dict": lambda content, depth: {self.read(k, depth): self.read(v, depth) for k, v in content},
            "float": lambda content, depth: float(_short(content)),
            "complex": lambda content, depth: complex(*(float(_short(part)) for part in of_length(2, content))),
            "dtype": lambda content, depth: self.dtypes[content],
            "device": lambda content, depth: self._device(content),
            "layout": lambda content, depth: self.layouts[content],
            "memory_format": lambda content, depth: _FORMATS[content],
        }

    def read(self, tree: Any, depth: int = 0) -> Any:
        """Read a value; ValueError, LookupError or TypeError if it is not something that the writer makes."""
        if type(tree) is list:
            return self.many(tree, depth + 1)
        if type(tree) is not dict:
            return tree
        ((kind, content),) = tree.items()
        return self.readers[kind](content, depth + 1)

    def many(self, trees: Any, depth: int) -> list[Any]:
        """Read each of several values."""
        if type(trees) is not list or depth > DEEPEST + 1:
            raise ValueError("a sequence of values is a list, and nests to a limited depth")
        return [self.read(tree, depth) for tree in trees]

    def _device(self, name: Any) -> torch.device:
        if not isinstance(name, str) or not self.devices.fullmatch(name):
            raise ValueError(f"the device {str(name)[:80]!r}")
        return torch.device(name)


def of_length(length: int, items: Any) -> Any:
    """Return a list of so many items; ValueError if it is something else."""
    if type(items) is not list or len(items) != length:
        raise ValueError(f"expected {length} values")
    return items


def _short(text: Any) -> str:
    if not isinstance(text, str) or len(text) > 40:
        raise ValueError("a number is a short text")
    return text
