"""Compare emitted contents directly: ExecuTorch takes their SHA-256, several times for each weight.

It asks only whether two contents are equal. That is found out at the speed of memory. What methods have in common is in
memory once: each method's delegates come with their own.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from executorch.exir._serialize._named_data_store import NamedDataStore  # it finds equal named data by their hashes
from executorch.exir.emit import _emitter  # it finds equal constants and payloads by theirs

from exir_lowering._upstream import pins
from exir_lowering._upstream.acceleration import current
from exir_lowering._upstream.locks import during, replacing

_HEAD = 64
_VISITOR = "executorch.backends.xnnpack.operators.node_visitor"


@dataclass(slots=True)
class _Content:
    """A content, with a name that equal ones share, and its SHA-256 once it was asked for."""

    content: Any
    name: str
    sha256: Any = None


class _Contents:
    """Contents, of which equal ones are one."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, bytes], list[_Content]] = {}
        self._count = 0

    def find(self, content: Any) -> _Content:
        """Return what is known of bytes, or of data on the disk: of the first ones that are equal."""
        head = content[:_HEAD] if isinstance(content, bytes) else content.prefix(_HEAD)
        alike = self._found.setdefault((len(content), head), [])
        for other in alike:
            if other.content is content or _read(other.content) == _read(content):
                return other
        self._count += 1
        alike.append(_Content(content, f"content {self._count}"))
        return alike[-1]


_compared: ContextVar[_Contents | None] = ContextVar("exir_lowering_compared", default=None)
_kept: ContextVar[_Contents | None] = ContextVar("exir_lowering_kept", default=None)


def comparing_contents() -> AbstractContextManager[Any]:
    """Compare what this thread emits by content if it accelerates; no store of named data may outlive it."""
    return during(_compared, _Contents() if current() is not None else None, _COMPARING)


def keeping_contents(keep: bool) -> AbstractContextManager[Any]:
    """Keep equal named data of this thread's delegates in memory once, and take the SHA-256 of XNNPACK's once."""
    return during(_kept, _Contents() if keep else None, _KEEPING)


def _read(content: Any) -> bytes:
    return content if isinstance(content, bytes) else content.to_bytes()


def _comparing() -> list[tuple[Any, str, Any]]:
    if not pins.is_on("content comparison"):
        return []
    hashed = NamedDataStore._sha256

    def named(data: Any) -> Any:
        contents = _compared.get()
        return hashed(data) if contents is None else contents.find(data).name

    hashing = _hashing(_compared, lambda found: SimpleNamespace(hexdigest=lambda: found.name))
    return [(NamedDataStore, "_sha256", staticmethod(named)), (_emitter, "hashlib", hashing)]


def _hashing(variable: ContextVar[_Contents | None], hash_of: Callable[[_Content], Any]) -> SimpleNamespace:
    """Return what stands in for hashlib: it takes the hash of bytes from what is known of this thread's contents."""

    def sha256(data: Any) -> Any:
        contents = variable.get()
        if contents is None or type(data) is not bytes:
            return hashlib.sha256(data)
        return hash_of(contents.find(data))

    return SimpleNamespace(sha256=sha256)


def _keeping() -> list[tuple[Any, str, Any]]:
    if not pins.is_on("content comparison"):
        return []
    add = NamedDataStore._add_named_data_to_map

    def added(self: Any, key: str, data: Any, *args: Any, **kwargs: Any) -> None:
        contents = _kept.get()
        if contents is not None and type(data) is bytes:
            data = contents.find(data).content
        add(self, key, data, *args, **kwargs)

    def hashed(found: _Content) -> Any:
        if found.sha256 is None:
            found.sha256 = hashlib.sha256(found.content)
        return found.sha256.copy()

    visitor = sys.modules.get(_VISITOR)  # it names data by the SHA-256 of its content
    known = visitor is not None and pins.is_on("reused XNNPACK hashes")
    hashing = [(visitor, "hashlib", _hashing(_kept, hashed))] if known else []
    return [(NamedDataStore, "_add_named_data_to_map", added), *hashing]


_COMPARING, _KEEPING = replacing(_comparing), replacing(_keeping)
