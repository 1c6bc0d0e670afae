"""What can go wrong, as types.

    LoweringError
    ├── InputError (ValueError)          the caller's programs, names, options or run-time inputs
    ├── UnknownPluginError (LookupError) a backend or partitioner id that nobody provides
    ├── PluginLoadError                  a plug-in that is broken, or provided twice
    ├── PartitionerContractError         a partitioner broke its promise, or raised
    ├── CoverageError                    less is delegated than the options require
    ├── BackendContractError             a backend or delegate returned something else than it should
    ├── BackendFailure                   a backend or delegate raised; names the partition or the method
    ├── BackendUnavailableError          a file needs a backend that this machine does not have
    └── InvariantError                   a defect of exir-lowering itself

MemoryError, and what a signal handler raises, pass through as they are: see `interrupts`.

`BackendUnavailableWarning` is no error: what was lowered cannot be executed where it was lowered.

Each message says who, where, what was got, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class LoweringError(Exception):
    """The base of every error that exir-lowering raises."""


class InputError(LoweringError, ValueError):
    """The caller gave something that cannot be lowered, loaded or run."""


class UnknownPluginError(LoweringError, LookupError):
    """A backend or partitioner was asked for by an id that nobody provides.

    Attributes:
        plugin_id: The id that was asked for.
    """

    def __init__(self, message: str, *, plugin_id: str) -> None:
        super().__init__(message)
        self.plugin_id = plugin_id


class PluginLoadError(LoweringError):
    """A plug-in could not be imported, is of the wrong type, or its id is provided twice."""


class PartitionerContractError(LoweringError):
    """A partitioner raised, or did more or less than tagging nodes.

    Attributes:
        violation: Which promise was broken, one of `VIOLATIONS`.
        details: The names that the message was made of (partitioner, node, tag, user, user_tag).
    """

    VIOLATIONS = (
        "raised",
        "result_type",
        "destinations",
        "graph_modified",
        "output_tagged",
        "input_tagged",
        "tag_without_destination",
        "no_copy",
        "not_convex",
    )

    def __init__(self, message: str, *, violation: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.violation = violation
        self.details: Mapping[str, Any] = MappingProxyType(dict(details or {}))


class CoverageError(LoweringError):
    """Less of a method is delegated than the options require.

    Attributes:
        plan: The `LoweringPlan`, with every operator that stays on the host and why.
    """

    def __init__(self, message: str, *, plan: Any) -> None:
        super().__init__(message)
        self.plan = plan


class BackendContractError(LoweringError):
    """A backend's results are not what they should be, it wrote into a weight, or a delegate did wrong.

    What a delegate returns has to have the number, dtypes and shapes that its file tells; its inputs are not written.
    """


class BackendFailure(LoweringError):
    """A backend raised while it preprocessed, or its delegate while it executed; the original is `__cause__`.

    Attributes:
        debug_handle: The debug handle of the operator that failed, when a delegate knows it.
    """

    def __init__(self, message: str, *, debug_handle: int | None = None) -> None:
        super().__init__(message)
        self.debug_handle = debug_handle


class BackendUnavailableError(LoweringError):
    """A file needs a backend that neither the runtime of this machine nor an available delegate has."""


class BackendUnavailableWarning(UserWarning):
    """A model was lowered for a backend whose payloads this machine cannot execute; another one may."""


class InvariantError(LoweringError):
    """Something that exir-lowering guarantees does not hold: a defect of exir-lowering, please report it."""


def named_handle(error: BaseException) -> int | None:
    """Return the debug handle that an exception of a plug-in, or one of its causes, names in `debug_handle`."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        handle = getattr(cause, "debug_handle", None)
        if isinstance(handle, int) and not isinstance(handle, bool) and handle > 0:
            return handle
        cause = cause.__cause__
    return None
