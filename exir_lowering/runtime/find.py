"""Find the Python delegates that a file needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from exir_lowering import registry
from exir_lowering.delegate import Delegate
from exir_lowering.errors import BackendFailure, BackendUnavailableError, UnknownPluginError
from exir_lowering.runtime.format import Method


def find_delegates(
    name: str,
    methods: Mapping[str, Method],
    given: Mapping[str, Any],
    own: Collection[str],
    usable: Callable[[str], bool],
    lacking: str,
) -> Mapping[str, Delegate]:
    """Find a delegate for each backend that the runtime does not have itself.

    Args:
        name: How to call the file in messages.
        methods: The file's methods.
        given: The call's delegates, by id.
        own: The backends that the runtime has itself.
        usable: Tells which of them it can use.
        lacking: What to say of a backend that the runtime does not have.

    Raises:
        BackendUnavailableError: Nobody has a backend, or who has it cannot use it here.
        BackendFailure: A delegate raised when it was asked whether it is available.
        PluginLoadError: A delegate could not be made, or its id is provided twice.
    """
    found: dict[str, Delegate] = {}
    for method in methods.values():
        for backend in method.backends:
            if backend in found or (backend in own and usable(backend)):
                continue
            needs = f"{name} cannot be loaded: method {method.name!r} needs the backend {backend!r}, and"
            if backend in own:
                raise BackendUnavailableError(
                    f"{needs} the ExecuTorch runtime here says that it is not available. It has {', '.join(own)}. "
                    "Lower the model for another one, or install what the backend needs."
                )
            try:
                found[backend] = registry.find_delegate(backend, given)
            except UnknownPluginError as error:
                raise BackendUnavailableError(
                    f"{needs} {lacking} {error} Or lower the model for one of the runtime's backends."
                ) from None
            _check_available(needs, backend, found[backend])
    return found


def _check_available(needs: str, backend: str, delegate: Delegate) -> None:
    who = f"{type(delegate).__module__}.{type(delegate).__qualname__}"
    try:
        available = delegate.is_available()
    except Exception as error:
        raise BackendFailure(
            f"{needs} its delegate {who} failed in is_available: {type(error).__name__}: {error}"
        ) from error
    if not available:
        raise BackendUnavailableError(
            f"{needs} its delegate {who} says that it is not available on this machine. Install what it needs, or load "
            "the file where it is available."
        )
