"""Find the delegates that a file needs on this machine."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from exir_lowering.errors import BackendUnavailableError, BackendUnavailableWarning, LoweringError
from exir_lowering.plugins import availability
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.runtime.fallback import OriginalGraphs
from exir_lowering.runtime.source import ProgramFile

Unavailable: TypeAlias = Literal["error", "fallback"]

_FALLBACK = (
    'A file that was emitted with keep_originals=True can be loaded with unavailable="fallback": PyTorch executes the '
    "original graphs then."
)


def find_delegates(file: ProgramFile, given: Mapping[str, Any], unavailable: Unavailable) -> Mapping[str, Delegate]:
    """Find a delegate for each backend that the runtime does not have itself; those given, by id, come first.

    `unavailable` says what to do where nothing here executes a backend: "error", or "fallback" to the original graphs
    of its partitions, with a warning. Raise a BackendUnavailableError when nothing executes a backend, or what does is
    not available here, a BackendFailure when a delegate raised when it was asked whether it is available, and a
    PluginLoadError when one could not be created, or its id is provided twice.
    """
    found: dict[str, Delegate] = {}
    for backend, method in file.backends.items():
        needs = f"{file.name} cannot be loaded: method {method!r} needs the backend {backend!r}, and"
        try:
            executor = availability.executor(backend, given)
        except LoweringError as error:
            raise type(error)(f"{needs} {error}") from error.__cause__
        if isinstance(executor, availability.Missing):
            if unavailable == "error":
                raise BackendUnavailableError(f"{needs} {executor.reason}. {executor.advice} {_FALLBACK}")
            executor = OriginalGraphs(backend, executor.reason)
            warnings.warn(
                f"{file.name}: the partitions for the backend {backend!r} are executed by PyTorch, from their original "
                f"graphs, as {executor.reason}.",
                BackendUnavailableWarning,
                stacklevel=5,
            )
        if executor is not None:
            found[backend] = executor
    return found
