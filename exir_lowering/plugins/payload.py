"""Checks of a backend's payloads before ExecuTorch's runtime gets them, and the tools to write such checks.

The runtime hands a payload to its backend as it is, and a backend that trusts it reads and writes wherever a damaged
one points. Whoever knows the format can check it here. The other names read the tables of a file, as payloads may be
flatbuffers too.
"""

from __future__ import annotations

from exir_lowering.plugins.registry import find_checks, find_checks_of
from exir_lowering.pte.flatbuffer import CorruptError, Table, root
from exir_lowering.pte.payloads import CheckedPayload, PayloadChecks, PayloadOperator
from exir_lowering.pte.value_kinds import KINDS, Tensor, ValueSpec, check_index

__all__ = [
    "KINDS", "CheckedPayload", "CorruptError", "PayloadChecks", "PayloadOperator", "Table", "Tensor", "ValueSpec",
    "check_index", "find_checks", "find_checks_of", "root",
]  # fmt: skip
