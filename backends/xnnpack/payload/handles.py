"""Replace the debug handles in a payload, in place: a handle that is not 0 always takes four bytes in its node's table.

ExecuTorch's writer leaves out numbers that are 0, and lays out tables by which fields are present, not by their values.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from exir_lowering.backends.xnnpack.payload.reading import split_payload
from exir_lowering.backends.xnnpack.payload.slots import XNNGraph, XNode
from exir_lowering.plugins.payload import CorruptError, root

_HANDLE = struct.Struct("<I")
_OWN = 65535
"""The handle of nodes that XNNPACK's passes make."""


def replace_handles(payload: bytes, handles: Mapping[int, int]) -> bytes:
    """Return the payload that ExecuTorch writes for a partition with other debug handles; `handles` replaces each.

    Raises CorruptError if the payload is damaged, or has a handle that is not among these.
    """
    changed = bytearray(payload)
    tables, _ = split_payload(memoryview(changed))
    places: dict[int, int] = {}
    for node in root(tables).tables(XNNGraph.XNODES):
        place, handle = node.place(XNode.DEBUG_HANDLE), node.number(XNode.DEBUG_HANDLE, "I")
        if place is None or (handle == _OWN and handle not in handles):
            continue
        if place in places or not 0 < handles.get(handle, 0) < 1 << 32:
            raise CorruptError(f"a node has the debug handle {handle}, which its partition does not have")
        places[place] = handles[handle]
    for place, handle in places.items():
        _HANDLE.pack_into(tables, place, handle)
    return bytes(changed)
