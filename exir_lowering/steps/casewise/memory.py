"""What a process has found out about cases."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

_REMEMBERED = 20_000
"""How many cases of earlier programs a process remembers; one takes a few kilobytes."""


class Memory:
    """What has been found out about cases, the most recently used ones. Threads take turns: conversions have a lock."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        """Return what is known of a case, None if nothing is."""
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
        return found

    def put(self, key: Hashable, found: Any) -> None:
        """Remember what was found."""
        self._known[key] = found
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def forget(self) -> None:
        """Forget everything."""
        self._known.clear()


MEMORY = Memory()
"""What this process knows of cases without symbols; those with symbols belong to one program."""
