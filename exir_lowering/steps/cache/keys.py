"""Keys: what identifies a result, in named parts, so that a miss can say which of them differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

FORMAT = 1
"""The version of the keys and of the entries; a change of either makes all earlier entries misses."""


class NoKeyError(Exception):
    """Something has no key, as it holds what cannot be compared by content; the message completes "not cached: "."""


@dataclass(frozen=True, slots=True)
class Key:
    """What identifies a result."""

    kind: str  # of the result: "preprocess" or "edge"
    parts: Mapping[str, str]  # the digest of each part, by name

    @property
    def digest(self) -> str:
        """The digest of all parts: 64 hexadecimal digits."""
        return _digest(json.dumps([FORMAT, self.kind, dict(self.parts)], sort_keys=True))

    def differs(self, other: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names of the parts in which another key differs."""
        names = dict.fromkeys((*self.parts, *other))
        return tuple(name for name in names if self.parts.get(name) != other.get(name))


def make_key(kind: str, parts: Mapping[str, Iterable[str]]) -> Key:
    """Make a key of some kind of result from the lines of each part, by name. Lines may hold anything."""
    digests = {name: _digest(json.dumps(list(lines))) for name, lines in parts.items()}
    return Key(kind, MappingProxyType(digests))


def join_keys(keys: Sequence[Key], names: Sequence[str]) -> Key:
    """Make the key of a group from those of its members, of one kind, in their order; names are part of it."""
    parts = {part: [key.parts[part] for key in keys] for part in keys[0].parts}
    return make_key(keys[0].kind, {**parts, "group": names})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
