"""Checks of a backend's payloads before ExecuTorch's runtime gets them, and the tools to write such checks.

The runtime hands a payload to its backend as it is, and a backend that trusts it reads and writes wherever a damaged
one points. Whoever knows the format can check it here. The other names read the tables of a file, as payloads may be
flatbuffers too.
"""

from __future__ import annotations

from exir_lowering._upstream import installed
from exir_lowering.errors import PluginLoadError
from exir_lowering.plugins import registry
from exir_lowering.pte.flatbuffer import CorruptError, Table, root
from exir_lowering.pte.payloads import CheckedPayload, PayloadChecks, PayloadOperator
from exir_lowering.pte.value_kinds import KINDS, Tensor, ValueSpec, check_index

__all__ = [
    "KINDS", "CheckedPayload", "CorruptError", "PayloadChecks", "PayloadOperator", "Table", "Tensor", "ValueSpec",
    "check_index", "find_checks", "find_checks_of", "root",
]  # fmt: skip

NEEDED = frozenset({"XnnpackBackend"})
"""The backends that a file cannot use in the runtime when nothing checks their payloads: known to trust them.

Entry points are found by what an installation says of itself. One that is incomplete must not turn the checks off.
"""


def find_checks(backend: str) -> PayloadChecks | None:
    """Find what checks the payloads of a backend; its id, from a file, only selects among installed plug-ins.

    Returns None if no plug-in has any, and the backend is not known to need them. Raises PluginLoadError if they cannot
    be loaded, or are missing for a backend that needs them in the runtime of this machine.
    """
    checks = registry.find_payload_checks(backend)
    if checks is None and backend in NEEDED and backend in installed.own_backends():
        raise PluginLoadError(
            f"Payloads of {backend!r} are not given to the ExecuTorch runtime unchecked, and no entry point of "
            f"group {registry.PAYLOADS!r} has that name: the installation of exir-lowering is incomplete, or older "
            "than its source. Install it again."
        )
    return checks


def find_checks_of(details: type) -> PayloadChecks | None:
    """Find what checks the payloads of a class of ExecuTorch, if it was written for just this class."""
    checks = find_checks(details.__name__)
    return checks if checks is not None and checks.made_by == f"{details.__module__}.{details.__qualname__}" else None
