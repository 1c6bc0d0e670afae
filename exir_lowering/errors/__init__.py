"""Error types: what can go wrong.

    LoweringError
    ├── InputError (ValueError)          the caller's programs, names, options or run-time inputs
    ├── UnknownPluginError (LookupError) no one provides a backend or partitioner id
    ├── PluginLoadError                  a plug-in is broken, or provided twice
    ├── PartitionerContractError         a partitioner broke its contract, or raised
    ├── RewriteContractError             a rewrite broke its contract, or raised
    ├── CoverageError                    less is delegated than the options require
    ├── MemoryRequirementError           a method's tensors take more memory than the options allow
    ├── BackendContractError             a backend or delegate broke its contract
    ├── BackendFailure                   a backend or delegate raised; names the partition or the method
    ├── BackendUnavailableError          a file needs a backend that this machine does not have
    ├── LimitError                       a run of a file went over one of its limits, and was ended
    └── InvariantError                   a defect of exir-lowering itself

MemoryError passes through unchanged: a want of memory must not move a partition to the host in silence.

Each message says who, where, what was got, what was expected, and what to do. A traceback ends with the page of
docs/errors that has the causes and cures: a note of the error (PEP 678), so that its text stays as it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar


class LoweringError(Exception):
    """The base of every error that exir-lowering raises.

    Its `__notes__` name the page of the documentation about its class. A traceback shows them, from Python 3.11 on.
    """

    _page: ClassVar[str] = "LoweringError"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__ == __name__:  # a class that is defined elsewhere has the page of its base
            cls._page = cls.__name__

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.__notes__ = [f"See docs/errors/{self._page}.md"]

    def __reduce__(self) -> tuple[Any, ...]:
        # `Exception` calls the class with `args`, but `__init__` may take others.
        state = {**self.__dict__, "__notes__": [*getattr(self, "__notes__", ())]}
        return type(self).__new__, (type(self), *self.args), state


class InputError(LoweringError, ValueError):
    """The caller passed something that cannot be lowered, loaded or run."""


class UnknownPluginError(LoweringError, LookupError):
    """No one provides the requested id of a backend or partitioner.

    Attributes:
        plugin_id: The requested id.
    """

    def __init__(self, message: str, *, plugin_id: str) -> None:
        super().__init__(message)
        self.plugin_id = plugin_id


class PluginLoadError(LoweringError):
    """A plug-in could not be imported, has the wrong type, or its id is provided twice."""


class PartitionerContractError(LoweringError):
    """A partitioner raised, or did something other than tag nodes.

    Attributes:
        violation: Which rule was broken, one of `VIOLATIONS`.
        details: The names in the message (partitioner, node, tag, user, user_tag).
    """

    VIOLATIONS = (
        "raised", "result_type", "destinations", "graph_modified", "output_tagged", "input_tagged",
        "tag_without_destination", "no_copy", "not_convex",
    )  # fmt: skip

    def __init__(self, message: str, *, violation: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.violation = violation
        self.details: Mapping[str, Any] = dict(details or {})


class RewriteContractError(LoweringError):
    """A rewrite raised, or replaced a value by one of another type or by one that is computed later."""


class CoverageError(LoweringError):
    """Less of a method is delegated than the options require.

    Attributes:
        plan: The `LoweringPlan`, with every operator that stays on the host and why.
    """

    def __init__(self, message: str, *, plan: Any) -> None:
        super().__init__(message)
        self.plan = plan


class MemoryRequirementError(LoweringError):
    """The tensors of a method take more memory than the options allow.

    Attributes:
        memory: The `PlannedMemory` of each method, with the tensors at its peak and the model's lines.
    """

    def __init__(self, message: str, *, memory: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.memory = memory


class BackendContractError(LoweringError):
    """A backend returned invalid results or wrote into a weight, or a delegate broke its contract.

    A delegate must return the number, dtypes and shapes of outputs that its file declares, and not write its inputs.
    """


class BackendFailure(LoweringError):
    """A backend raised during preprocessing, or a delegate during execution; the original is `__cause__`.

    Attributes:
        debug_handle: The debug handle of the operator that failed, if known.
    """

    def __init__(self, message: str, *, debug_handle: int | None = None) -> None:
        super().__init__(message)
        self.debug_handle = debug_handle


class BackendUnavailableError(LoweringError):
    """A file needs a backend that neither the runtime of this machine nor an available delegate provides."""


class LimitError(LoweringError):
    """A program was loaded with limits, and went over one: it was ended.

    Attributes:
        limit: The limit, by its name in `Limits`: "seconds" or "memory".
    """

    def __init__(self, message: str, *, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class BackendUnavailableWarning(UserWarning):
    """A model was lowered for a backend whose payloads this machine cannot execute; another machine may."""


class ExportWarning(UserWarning):
    """A program was most likely exported by mistake as it is, such as in training mode; it is lowered nevertheless."""


class CacheWarning(UserWarning):
    """The cache of lowered partitions could not be used; the result is the same without it."""


class InvariantError(LoweringError):
    """Something that exir-lowering guarantees does not hold: a defect of exir-lowering. Please report it."""


def find_named_handle(error: BaseException) -> int | None:
    """Return the debug handle in the `debug_handle` of a plug-in's exception, or of one of its causes."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        handle = getattr(cause, "debug_handle", None)
        if isinstance(handle, int) and not isinstance(handle, bool) and handle > 0:
            return handle
        cause = cause.__cause__
    return None


def did_you_mean(
    wanted: object, known: Iterable[str], otherwise: str = "", *, most: int = 1, sure: Sequence[str] = ()
) -> str:
    """Return the end of a message: the sure names, or else those close to an unknown one, or else another end."""
    close = sure or difflib.get_close_matches(str(wanted), known, n=most)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else otherwise


def few(names: Iterable[str], most: int) -> str:
    """List the first names, and count the others: a, b and 7 more."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def exception_text(error: BaseException, end: str = "") -> str:
    """Return the type and text of an exception, without `end`; its `__str__` may be a plug-in's, and raise."""
    text = "it has no message that can be shown"
    with ignoring_errors():
        text = str(error)
    return f"{type(error).__name__}: {text.removesuffix(end)}"


@contextmanager
def explained(explain: Callable[[Exception], Exception], *passing: type[Exception]) -> Iterator[None]:
    """Raise what is made of an error inside, from that error; MemoryError, and those of `passing`, pass through."""
    try:
        yield
    except (MemoryError, *passing):  # type: ignore[misc]  # mypy sees through no star here
        raise
    except Exception as error:
        raise explain(error) from error


class _Ignoring(suppress):
    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> bool:
        return kind is not None and not issubclass(kind, MemoryError) and super().__exit__(kind, *rest)


def ignoring_errors() -> _Ignoring:
    """End a block in silence where something is raised inside; MemoryError passes through."""
    return _Ignoring(Exception)
