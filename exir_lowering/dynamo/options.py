"""The options of the torch.compile backend, checked, and the attempts that they ask for, in order."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from exir_lowering._upstream.compiler import BackendDetails
from exir_lowering._upstream.dynamo import registered_backends
from exir_lowering.dynamo.partitioning import ForBackend
from exir_lowering.errors import InputError, PluginLoadError, UnknownPluginError, did_you_mean
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins import registry
from exir_lowering.plugins.backend import Backend, Partitioner, PartitionerLike
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.steps.arguments import list_partitioners

TRAINING = ("both", "forward", "backward", "none")
PARTITIONS = ("profitable", "all")
METHODS = ("forward", "backward")

Check = Literal["sample", "content", "frozen"]
"""What is compared before each call, besides where a weight lies: the number of torch's writes into it and a sample of
its content, or all of its content, or nothing."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What `torch.compile(..., backend="exir_lowering", options={...})` takes.

    Attributes:
        partitioners: As for `lower`: a partitioner, the name of an installed one, a sequence in priority order, or a
            mapping from "forward" and "backward" to these. None uses `backends`, if that is a sequence of names.
        backends: As for `lower`, a mapping from ids to backends; or a sequence in order of preference: ids of backends,
            Backend classes or objects, names of partitioners, and last the name of another torch.compile backend. The
            next one is taken when one is not available, takes nothing, or fails while a graph is compiled.
        delegates: As for `load`: delegates by id, or a sequence, before the installed ones.
        training: Which graphs of a function that is differentiated are partitioned.
        decompositions: The decompositions for AOTAutograd; None is PyTorch's core ATen decompositions, without those
            that change random numbers or cannot be differentiated.
        fallback: The torch.compile backend that takes a graph that cannot be compiled, by its name; None to raise.
        check_weights: How to detect, before each call, that a compiled-in weight has changed: "sample" compares torch's
            count of writes and a sample of the content, "content" compares all of it, and "frozen" compares only its
            address.
        partitions: Which partitions for backends that ExecuTorch's runtime executes are kept: the "profitable" ones,
            without those that by their size take longer than in PyTorch, or "all". Those of other delegates, and
            all where a coverage is required, are kept.
        lowering: How to lower.
    """

    partitioners: PartitionerLike = None
    backends: Mapping[str, Any] | Sequence[Any] = field(default_factory=dict)
    delegates: Mapping[str, Any] = field(default_factory=dict)
    training: Literal["both", "forward", "backward", "none"] = "both"
    decompositions: Mapping[Any, Callable[..., Any]] | None = None
    fallback: str | None = "eager"
    check_weights: Check = "sample"
    partitions: Literal["profitable", "all"] = "profitable"
    lowering: LoweringOptions = field(default_factory=LoweringOptions)


def requires_coverage(options: CompileOptions) -> bool:
    """Return whether it is an error if too little is delegated."""
    return options.lowering.require_coverage > 0


def read_options(given: Any) -> CompileOptions:
    """Check what a caller passed as options; InputError names an option that is unknown or has a wrong value."""
    if isinstance(given, CompileOptions):
        return given
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise InputError(f"options={given!r}: expected a dict with some of {', '.join(map(repr, _CHECKS))}.")
    for name in given:
        if name not in _CHECKS:
            known = f"{', '.join(map(repr, _CHECKS))}.{did_you_mean(name, _CHECKS)}"
            raise InputError(f"options: unknown option {name!r}, expected some of {known}")
    checked = {name: _CHECKS[name](value) for name, value in given.items()}
    return CompileOptions(**checked)


def _check_partitioners(value: Any) -> Any:
    if isinstance(value, Mapping):
        unknown = [name for name in value if name not in METHODS]
        if unknown:
            raise InputError(
                f"options['partitioners'] names the method {unknown[0]!r}, expected 'forward' (also without gradients) "
                "or 'backward'."
            )
    return value


def _check_backends(value: Any) -> Any:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        registry.check_backends(value)
        for backend_id, candidate in value.items():
            details = isinstance(candidate, type) and issubclass(candidate, BackendDetails)
            if not details and not _is(candidate, Backend):
                raise InputError(
                    f"options['backends'][{backend_id!r}]={candidate!r}: expected an exir_lowering.Backend (object or "
                    "class) or an ExecuTorch BackendDetails class."
                )
        return value
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InputError(
            f"options['backends']={value!r}: expected a mapping from ids to backends, or a sequence of names and "
            'Backend objects in order of preference, such as ["openvino", "xnnpack", "inductor"].'
        )
    return tuple(value)


def _check_delegates(value: Any) -> Any:
    delegates = registry.check_delegates(value)
    for delegate_id, candidate in delegates.items():
        if not _is(candidate, Delegate):
            raise InputError(
                f"options['delegates'][{delegate_id!r}]={candidate!r}: expected an exir_lowering.Delegate (object or "
                "class)."
            )
    return delegates


def _is(candidate: Any, kind: type) -> bool:
    return isinstance(candidate, kind) or (isinstance(candidate, type) and issubclass(candidate, kind))


def _one_of(name: str, known: Sequence[str], value: Any) -> Any:
    if value not in known:
        raise InputError(f"options[{name!r}]={value!r}: expected one of {', '.join(map(repr, known))}.")
    return value


def _check_decompositions(value: Any) -> Any:
    if value is not None and not isinstance(value, Mapping):
        raise InputError(
            f"options['decompositions']={value!r}: expected a mapping from operators to functions, such as "
            "torch.export.default_decompositions() returns, or None."
        )
    return value


def _check_fallback(value: Any) -> Any:
    if value is None:
        return None
    known = registered_backends()
    if not isinstance(value, str) or value not in known or value.startswith("exir_lowering"):
        raise InputError(
            f"options['fallback']={value!r}: expected the name of another torch.compile backend, such as 'eager' or "
            "'inductor' (torch._dynamo.list_backends(None) lists them), or None to raise."
        )
    return value


def _check_lowering(value: Any) -> Any:
    if not isinstance(value, LoweringOptions):
        raise InputError(f"options['lowering']={value!r}: expected a LoweringOptions.")
    return value


_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "partitioners": _check_partitioners,
    "backends": _check_backends,
    "delegates": _check_delegates,
    "training": partial(_one_of, "training", TRAINING),
    "decompositions": _check_decompositions,
    "fallback": _check_fallback,
    "check_weights": partial(_one_of, "check_weights", get_args(Check)),
    "partitions": partial(_one_of, "partitions", PARTITIONS),
    "lowering": _check_lowering,
}


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
