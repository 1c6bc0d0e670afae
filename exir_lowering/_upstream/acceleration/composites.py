"""Remember two look-ups of torch that take half the time of a small conversion.

torch asks its dispatcher for all composite operators of all namespaces, five times in each conversion to Edge dialect,
and rebuilds the type of an annotation for each kernel that a conversion replaces. The answers are the same until an
operator is registered.
"""

from __future__ import annotations

import threading
import typing
from typing import Any

import torch
import torch._ops

# It collects the operators with CompositeImplicitAutograd kernels; the other modules import it by name.
from torch._export import utils
from torch.export import decomp_utils, exported_program

_KEY = torch._C.DispatchKey.CompositeImplicitAutograd


class _Collected:
    """The composite operators, and what they were found in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: tuple[Any, set[Any]] | None = None
        self._packets: tuple[Any, list[Any]] = (None, [])
        self._operators: tuple[int, list[Any]] = (-1, [])

    def collect(self, collect: Any) -> set[Any]:
        """Return a copy of the operators that are found, which are those found before if nothing was registered."""
        with self._lock:
            state = self._state()
            if self._found is None or self._found[0] != state:
                found = collect()
                self._found = (self._state(), found)  # collecting gives torch.ops names for what it finds
            return set(self._found[1])

    def _state(self) -> Any:
        """Return what the answer depends on: the kernels of the dispatcher, and those in Python."""
        registered = tuple(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
        names = tuple((name, tuple(_names(name))) for name in torch.ops._dir)
        if self._packets[0] != names:
            found = (getattr(getattr(torch.ops, space), name) for space, known in names for name in known)
            self._packets = (names, [packet for packet in found if isinstance(packet, torch._ops.OpOverloadPacket)])
            self._operators = (-1, [])
        overloads = sum(len(packet._overload_names) for packet in self._packets[1])
        if self._operators[0] != overloads:
            self._operators = (overloads, [each for packet in self._packets[1] for each in packet.op_overloads()])
        in_python = tuple(id(each) for each in self._operators[1] if _KEY in each.py_kernels)
        return registered, names, overloads, in_python


def _names(namespace: str) -> list[str]:
    return getattr(getattr(torch.ops, namespace, None), "_dir", [])


_COLLECTED = _Collected()


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what remembers the operators, and an alias for annotations that remembers what it was subscripted with.

    The answers are right for every thread.
    """
    collect = utils._collect_all_valid_cia_ops

    def remembered() -> set[Any]:
        return _COLLECTED.collect(collect)

    return [
        *((module, collect.__name__, remembered) for module in (utils, decomp_utils, exported_program)),
        (torch._ops, "Callable", typing.Callable),
    ]
