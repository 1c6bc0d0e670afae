"""What an XNNPACK payload needs from its file.

XNNPACK prints the format of a payload that it does not know and the name of a weight that it does not find, and
ExecuTorch's Python binding ends the process when what is printed is not UTF-8. XNNPACK is the one backend that every
wheel of ExecuTorch has, so its payloads are looked into.
"""

from __future__ import annotations

import struct

from exir_lowering.runtime.flatbuffer import CorruptError, root

BACKEND = "XnnpackBackend"
MAGIC = b"XH00"
TABLES = b"XN"
HEADER = struct.Struct("<4x4sHIIIQ")


def weight_names(payload: memoryview) -> tuple[str, ...]:
    """Return the names of the weights that a payload finds in the file's named data.

    Args:
        payload: The payload, which is neither copied nor read beyond its tables.

    Raises:
        CorruptError: The payload's header or its table of weights is damaged.
    """
    tables = payload
    if len(payload) >= HEADER.size and bytes(payload[4:8]) == MAGIC:
        _, _, start, size, constants, constants_size = HEADER.unpack_from(payload)
        end = max(start + size, constants + constants_size)
        if end > len(payload):
            raise CorruptError(f"a payload of {BACKEND!r} tells of {end} bytes, it has {len(payload)}")
        tables = payload[start : start + size]
    if len(tables) < 8 or bytes(tables[4:6]) != TABLES or not bytes(tables[6:8]).isalnum():
        raise CorruptError(f"a payload of {BACKEND!r} starts with {bytes(tables[:8])!r}, expected {TABLES!r} at byte 4")
    return tuple(sorted({name for table in root(tables).tables(8) if (name := table.text(2))}))
