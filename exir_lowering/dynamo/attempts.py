"""What is tried for a graph, in order: one attempt for all partitioners, or one for each backend of a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exir_lowering._upstream.dynamo import registered_backends
from exir_lowering.dynamo.options import METHODS, CompileOptions
from exir_lowering.dynamo.sole import for_backend
from exir_lowering.errors import InputError, UnknownPluginError
from exir_lowering.plugins import registry
from exir_lowering.plugins.backend import Partitioner
from exir_lowering.steps.arguments import list_partitioners


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to compile a graph.

    Attributes:
        name: What it is called in reports.
        partitioners: By method, its partitioners in priority order.
        backends: Backends by id, before the installed ones.
        must_take: Whether it is no success if it takes no operator.
    """

    name: str
    partitioners: Mapping[str, Sequence[Partitioner]]
    backends: Mapping[str, Any]
    must_take: bool = False


def list_attempts(options: CompileOptions) -> tuple[list[Attempt], str | None]:
    """Return the attempts, and the torch.compile backend that runs what none of them compiles; None for an error.

    Raises:
        InputError, UnknownPluginError, PluginLoadError: An option names something that does not exist.
    """
    if isinstance(options.backends, Mapping):
        name = "exir_lowering"
        return [Attempt(name, _by_method(options.partitioners), options.backends)], options.fallback
    attempts: list[Attempt] = []
    fallback = options.fallback
    for position, candidate in enumerate(options.backends):
        if isinstance(candidate, str) and _is_other(candidate):
            if position != len(options.backends) - 1:
                raise InputError(
                    f"options['backends']: {candidate!r} is another torch.compile backend, which takes whole graphs; "
                    "it must be the last one."
                )
            fallback = candidate
        else:
            attempts.append(_attempt(candidate, options))
    return attempts, fallback


def _is_other(name: str) -> bool:
    own = {*registry.known_ids(registry.BACKENDS), *registry.known_ids(registry.PARTITIONERS)}
    return name not in own and name in registered_backends() and not name.startswith("exir_lowering")


def _attempt(candidate: Any, options: CompileOptions) -> Attempt:
    """Return the attempt with one backend: the partitioners' tags for it, or those of its own partitioner."""
    given = {}
    if isinstance(candidate, str):
        backend_id = candidate
    else:
        backend_id = getattr(candidate, "backend_id", getattr(candidate, "__name__", ""))
        if not isinstance(backend_id, str) or not backend_id:
            raise InputError(f"options['backends']: got {candidate!r}, expected a name, a Backend class or an object.")
        given = {backend_id: candidate}
    if options.partitioners is not None:
        chosen = _by_method(options.partitioners)
        only = {method: [for_backend(each, backend_id) for each in found] for method, found in chosen.items()}
        return Attempt(backend_id, only, given, must_take=True)
    if isinstance(candidate, str) and candidate in registry.known_ids(registry.PARTITIONERS):
        return Attempt(candidate, _by_method(candidate), given, must_take=True)
    if not given:
        raise UnknownPluginError(
            f"options['backends']: {candidate!r} is neither an installed partitioner nor a torch.compile backend, and "
            "there are no partitioners. Pass options['partitioners'], which say what goes to that backend.",
            plugin_id=candidate,
        )
    from exir_lowering.partitioners import SupportPartitioner, everything  # only where nothing else says what it takes

    taking_all = SupportPartitioner({backend_id: everything})
    return Attempt(backend_id, {method: [taking_all] for method in METHODS}, given, must_take=True)


def _by_method(partitioners: Any) -> dict[str, list[Partitioner]]:
    return list_partitioners(partitioners, METHODS)
