"""Compare emitted contents directly: ExecuTorch takes their SHA-256, several times for each weight.

It asks only whether two contents are equal. That is found out at the speed of memory. What methods have in common is in
memory once: each method's delegates come with their own.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from executorch.exir._serialize._named_data_store import NamedDataStore  # it finds equal named data by their hashes
from executorch.exir.emit import _emitter  # it finds equal constants and payloads by theirs

from exir_lowering.fast import Work, current

_HEAD = 64
_VISITOR = "executorch.backends.xnnpack.operators.node_visitor"


@dataclass(slots=True)
class _Content:
    """A content, with a name that equal ones share, and its SHA-256 once it was asked for."""

    content: Any
    name: str
    sha256: Any = None


def _find(contents: dict[Any, Any], content: Any) -> _Content:
    """Return what is known of bytes, or of data on the disk: of the first ones that are equal."""
    head = content[:_HEAD] if isinstance(content, bytes) else content.prefix(_HEAD)
    alike: list[_Content] = contents.setdefault((len(content), head), [])
    for other in alike:
        if other.content is content or _read(other.content) == _read(content):
            return other
    contents[None] = number = contents.get(None, 0) + 1
    alike.append(_Content(content, f"content {number}"))
    return alike[-1]


def _read(content: Any) -> bytes:
    return content if isinstance(content, bytes) else content.to_bytes()


def _hashing(contents_of: Callable[[Work], Any], hash_of: Callable[[_Content], Any]) -> SimpleNamespace:
    """Return what stands in for hashlib: it takes the hash of bytes from what is known of this thread's contents."""

    def sha256(data: Any) -> Any:
        work = current()
        contents = None if work is None else contents_of(work)
        return hashlib.sha256(data) if contents is None or type(data) is not bytes else hash_of(_find(contents, data))

    return SimpleNamespace(sha256=sha256)


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what compares what is emitted, and keeps named data of backends once."""
    hashed, add = NamedDataStore._sha256, NamedDataStore._add_named_data_to_map

    def named(data: Any) -> Any:
        work = current()
        return hashed(data) if work is None or work.emitted is None else _find(work.emitted, data).name

    def added(self: Any, key: str, data: Any, *args: Any, **kwargs: Any) -> None:
        work = current()
        if work is not None and work.preprocessed is not None and type(data) is bytes:
            data = _find(work.preprocessed, data).content
        add(self, key, data, *args, **kwargs)

    hashing = _hashing(lambda work: work.emitted, lambda found: SimpleNamespace(hexdigest=lambda: found.name))
    return [
        (NamedDataStore, "_sha256", staticmethod(named)),
        (NamedDataStore, "_add_named_data_to_map", added),
        (_emitter, "hashlib", hashing),
    ]


def xnnpack_hashes() -> list[tuple[Any, str, Any]]:
    """Return what takes the SHA-256 of equal weights of XNNPACK once, by which it names them."""
    visitor = sys.modules.get(_VISITOR)

    def hashed(found: _Content) -> Any:
        if found.sha256 is None:
            found.sha256 = hashlib.sha256(found.content)
        return found.sha256.copy()

    return [(visitor, "hashlib", _hashing(lambda work: work.preprocessed, hashed))] if visitor is not None else []
