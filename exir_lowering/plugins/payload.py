"""What looks into a backend's payloads before ExecuTorch's runtime gets them, and what it is written with.

The runtime hands a payload to its backend as it is, and a backend that trusts it reads and writes wherever a damaged
one tells it to. Whoever knows the format can check it here. The rest of this module is what the tables of a file are
read with, as payloads may be flatbuffers too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from exir_lowering.pte.flatbuffer import CorruptError, Table, root
from exir_lowering.pte.value_kinds import KINDS, Tensor, ValueSpec, check_index

__all__ = [
    "KINDS",
    "CheckedPayload",
    "CorruptError",
    "PayloadChecks",
    "Table",
    "Tensor",
    "ValueSpec",
    "check_index",
    "root",
]

NEEDED = frozenset({"XnnpackBackend"})
"""The backends that a file cannot use in the runtime when nothing checks their payloads: known to trust them.

Entry points are found by what an installation says of itself. One that is incomplete must not turn the checks off.
"""


class CheckedPayload(ABC):
    """A payload that is in order, as far as it can be told without what it is called with."""

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, int]:
        """The named data of the file that the payload reads, and how many bytes of each."""

    @abstractmethod
    def check_call(self, arguments: Sequence[ValueSpec]) -> None:
        """Check what the payload is called with.

        Args:
            arguments: What the file says of the values that it is called with: inputs, then outputs.

        Raises:
            CorruptError: It would read or write something else than these.
        """


class PayloadChecks(ABC):
    """Looks into the payloads of one backend.

    Found by the id of the backend, in the entry points of the group `exir_lowering.payloads`; made without arguments.

    Attributes:
        backend_id: The id of the backend, as it is in the file.
    """

    backend_id: ClassVar[str]

    @abstractmethod
    def check(self, payload: memoryview) -> CheckedPayload:
        """Check a payload.

        Args:
            payload: The payload, which is not to be copied or written to.

        Returns:
            What remains to be checked of it.

        Raises:
            CorruptError: The payload is damaged.
        """
