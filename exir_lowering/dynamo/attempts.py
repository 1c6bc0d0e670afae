"""What is tried for a graph, in order: one attempt for all partitioners, or one for each backend of a sequence."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from exir_lowering._upstream.dynamo import registered_backends
from exir_lowering.dynamo.options import METHODS, CompileOptions
from exir_lowering.dynamo.partitioning import ForBackend
from exir_lowering.errors import InputError, PluginLoadError, UnknownPluginError
from exir_lowering.plugins import registry
from exir_lowering.plugins.backend import Partitioner
from exir_lowering.steps.arguments import list_partitioners


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to compile a graph."""

    name: str  # in reports
    partitioners: Mapping[str, Sequence[Partitioner]]  # by method, in priority order
    backends: Mapping[str, Any]  # by id, before the installed ones
    options: CompileOptions  # the others
    must_take: bool = False  # whether it is no success if it takes no operator


@dataclass(frozen=True, slots=True)
class Candidate:
    """An attempt that is made when it is its turn, as what it names may not be there."""

    name: str  # in reports
    make: Callable[[], Attempt]  # raises UnknownPluginError or PluginLoadError


def list_candidates(options: CompileOptions) -> tuple[list[Candidate], str | None]:
    """Return what is tried, in order, and the torch.compile backend for the rest; InputError for a wrong option."""
    if isinstance(options.backends, Mapping):
        attempt = Attempt("exir_lowering", _by_method(options.partitioners), options.backends, options)
        return [Candidate(attempt.name, lambda: attempt)], options.fallback
    candidates = list(options.backends)
    fallback = options.fallback
    if isinstance(candidates[-1], str) and _is_other(candidates[-1]):
        fallback = candidates.pop()
    for candidate in candidates:
        if isinstance(candidate, str) and _is_other(candidate):
            raise InputError(
                f"options['backends']: {candidate!r} is another torch.compile backend, which takes whole graphs; it "
                "must be the last one."
            )
    found = [Candidate(_name(candidate), partial(_make, candidate, options)) for candidate in candidates]
    for candidate, given in zip(found, candidates, strict=True):
        if isinstance(given, str) and given not in _own_names():
            _check_spelling(candidate, among_backends=options.partitioners is not None)
    return found, fallback


def _check_spelling(candidate: Candidate, *, among_backends: bool) -> None:
    """Raise UnknownPluginError for a name that is nearly a known one; others may be plug-ins of another machine."""
    try:
        with suppress(PluginLoadError):
            candidate.make()
            if among_backends:
                registry.find_backend(candidate.name)
    except UnknownPluginError:
        if difflib.get_close_matches(candidate.name, {*_own_names(), *registered_backends()}, cutoff=0.85):
            raise


def _own_names() -> set[str]:
    return {*registry.known_ids(registry.BACKENDS), *registry.known_ids(registry.PARTITIONERS)}


def _is_other(name: str) -> bool:
    return name not in _own_names() and name in registered_backends() and not name.startswith("exir_lowering")


def _name(candidate: Any) -> str:
    """Return the id of a backend, or the name that was given."""
    if isinstance(candidate, str):
        return candidate
    name = getattr(candidate, "backend_id", getattr(candidate, "__name__", ""))
    if not isinstance(name, str) or not name:
        raise InputError(f"options['backends']: got {candidate!r}, expected a name, a Backend class or an object.")
    return name


def _make(candidate: Any, options: CompileOptions) -> Attempt:
    """Return the attempt with one backend: the partitioners' tags for it, or those of its own partitioner."""
    backend_id = _name(candidate)
    given = {} if isinstance(candidate, str) else {backend_id: candidate}
    if options.partitioners is not None:
        chosen = _by_method(options.partitioners)
        only = {method: [ForBackend.of(each, backend_id) for each in found] for method, found in chosen.items()}
        return Attempt(backend_id, only, given, options, must_take=True)
    if isinstance(candidate, str):
        return Attempt(backend_id, _by_method(candidate), given, options, must_take=True)
    from exir_lowering.partitioners import SupportPartitioner, everything  # only where nothing else says what it takes

    taking_all = SupportPartitioner({backend_id: everything()})
    return Attempt(backend_id, {method: [taking_all] for method in METHODS}, given, options, must_take=True)


def _by_method(partitioners: Any) -> dict[str, list[Partitioner]]:
    return list_partitioners(partitioners, METHODS)
