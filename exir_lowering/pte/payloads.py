"""The payloads of backends in a file, read by the plug-in that knows the backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from exir_lowering.errors import BackendFailure, LoweringError, exception_text
from exir_lowering.pte.container import Data
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.value_kinds import MemoryLayout

if TYPE_CHECKING:
    from exir_lowering.plugins.backend import ExecutorchBackend

_Result = TypeVar("_Result")

ORIGINALS = "reference"
"""The backend whose payloads the original graphs of partitions are, which a file may keep."""


def original_key(method: str, number: int) -> str:
    """Return the key of the named data that holds the original graph of a method's delegate, by its number."""
    return f"exir_lowering.original/{method}/{number}"


@dataclass(frozen=True, slots=True)
class PayloadOperator:
    """An operator in a payload, as its backend has it.

    Attributes:
        name: What the backend calls it.
        inputs: What it takes, each in words, such as "float32[1, 3]" or "constant float32[4, 3]".
        outputs: What it makes.
    """

    name: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


class CheckedPayload(ABC):
    """A payload whose tables were read."""

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, int]:
        """The named data of the file that the payload reads, and how many bytes of each."""

    def describe(self) -> Sequence[PayloadOperator]:
        """Return the operators in the payload, in their order, for people to read; () where that is not known."""
        return ()


class PayloadChecks(ABC):
    """Reads the payloads of one backend, and knows the class of ExecuTorch that makes them.

    Found by the id of the backend, in the entry points of the group `exir_lowering.payloads`; made without arguments.

    Attributes:
        backend_id: The id of the backend, as it is in the file.
        made_by: The class of ExecuTorch that makes the payloads, with its module; `unread` is about this class, for
            the cache of lowered partitions.
        unread: What that class does not read of a partition, as for `exir_lowering.plugins.Backend`.
    """

    backend_id: ClassVar[str]
    made_by: ClassVar[str] = ""
    unread: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def check(self, payload: memoryview) -> CheckedPayload:
        """Read a payload.

        Args:
            payload: The payload, which is not to be copied or written to.

        Returns:
            What it needs and has.

        Raises:
            CorruptError: The payload is damaged.
        """

    def find_backend(self) -> type[ExecutorchBackend] | None:
        """Return the backend that lowers with the class `made_by`; None if the class needs nothing beside."""
        return None


FindChecks = Callable[[str], PayloadChecks | None]
"""Finds what checks the payloads of a backend, by its id; None for a backend whose payloads nothing checks."""


def check_payload(backend: str, payload: memoryview, find_checks: FindChecks) -> CheckedPayload | None:
    """Read a payload; return what it needs and has, None when no plug-in knows the backend."""
    checks = find_checks(backend)
    if checks is None:
        return None
    checked = _guard(backend, checks, lambda: checks.check(payload))
    if not isinstance(checked, CheckedPayload):
        raise BackendFailure(f"{_describe(backend, checks)} returned {checked!r}, expected a CheckedPayload.")
    return checked


def describe(backend: str, payload: CheckedPayload) -> tuple[PayloadOperator, ...]:
    """Return the operators in a payload, as its backend has them; a BackendFailure when what reads it fails."""
    return _guard(backend, payload, lambda: tuple(payload.describe()))


def find_weights(backend: str, payload: CheckedPayload, data: Data, external: dict[str, MemoryLayout | int]) -> None:
    """Check the sizes of a payload's weights that are in the file, and add those that are not to `external`."""
    for name, size in payload.weights.items():
        found = data.named.get(name)
        need = external.get(name, 0)
        if found is not None:
            if len(found) < size:
                raise CorruptError(f"a payload of {backend!r} reads {size} bytes of {name!r}, which has {len(found)}")
        elif isinstance(need, int):
            external[name] = max(need, size)


def _guard(backend: str, who: object, check: Callable[[], _Result]) -> _Result:
    """Return the result of a plug-in's check; what it raises is a verdict on the file, or a failure of its own."""
    try:
        return check()
    except (CorruptError, LoweringError, MemoryError):
        raise
    except Exception as error:
        raise BackendFailure(f"{_describe(backend, who)} failed: {exception_text(error)}") from error


def _describe(backend: str, plugin: object) -> str:
    return f"The plug-in that checks payloads of {backend!r} ({type(plugin).__module__}.{type(plugin).__qualname__})"
