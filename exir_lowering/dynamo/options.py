"""The options of the torch.compile backend, checked, and the attempts that they ask for, in order."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, get_args

from exir_lowering._upstream.compiler import BackendDetails
from exir_lowering._upstream.dynamo import registered_backends
from exir_lowering.dynamo.partitioning import ForBackend
from exir_lowering.errors import InputError, UnknownPluginError, did_you_mean
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins import registry
from exir_lowering.plugins.backend import Backend, Partitioner, PartitionerLike
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.steps.arguments import list_partitioners

NAME = "exir_lowering"  # of the backend, for torch.compile
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
    known = [one.name for one in fields(CompileOptions)]
    listed = ", ".join(map(repr, known))
    if given is not None and not isinstance(given, Mapping):
        raise InputError(f"options={given!r}: expected a dict with some of {listed}.")
    checked = dict(given or {})
    if "delegates" in checked:
        checked["delegates"] = registry.check_delegates(checked["delegates"])
    for name, value in checked.items():
        if name not in known:
            raise InputError(f"options: unknown option {name!r}, expected some of {listed}.{did_you_mean(name, known)}")
        is_right, expected = _RIGHT[name]
        if not is_right(value):
            raise InputError(f"options[{name!r}]={value!r}: expected {expected}.")
    return CompileOptions(**checked)


def _is(candidate: Any, *kinds: type) -> bool:
    return isinstance(candidate, kinds) or (isinstance(candidate, type) and issubclass(candidate, kinds))


def _are_backends(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is(one, Backend, BackendDetails) for name, one in value.items())
    return value is None or (isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0)


def _list_others() -> list[str]:
    return [name for name in registered_backends() if not name.startswith(NAME)]


def _one_of(*allowed: str) -> tuple[Callable[[Any], bool], str]:
    return allowed.__contains__, f"one of {', '.join(map(repr, allowed))}"


_RIGHT: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "partitioners": (
        lambda value: not isinstance(value, Mapping) or set(value) <= set(METHODS),
        "partitioners, or a mapping from 'forward' (also without gradients) and 'backward' to these",
    ),
    "backends": (
        _are_backends,
        "a mapping from ids to backends, each an exir_lowering.Backend or an ExecuTorch BackendDetails class, or a "
        'sequence of names and Backend objects in order of preference, such as ["openvino", "xnnpack", "inductor"]',
    ),
    "delegates": (
        lambda value: all(_is(one, Delegate) for one in value.values()),
        "delegates by id, each an exir_lowering.Delegate (object or class)",
    ),
    "training": _one_of("both", "forward", "backward", "none"),
    "decompositions": (
        lambda value: value is None or isinstance(value, Mapping),
        "a mapping from operators to functions, such as torch.export.default_decompositions() returns, or None",
    ),
    "fallback": (
        lambda value: value in (None, *_list_others()),
        "the name of another torch.compile backend, such as 'eager' or 'inductor' (torch._dynamo.list_backends(None) "
        "lists them), or None to raise",
    ),
    "check_weights": _one_of(*get_args(Check)),
    "partitions": _one_of("profitable", "all"),
    "lowering": (lambda value: isinstance(value, LoweringOptions), "a LoweringOptions"),
}
"""What each option may be, and how an error says it."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to compile a graph."""

    name: str  # in reports
    partitioners: Mapping[str, Sequence[Partitioner]]  # by method, in priority order
    backends: Mapping[str, Any]  # by id, before the installed ones
    options: CompileOptions  # the others
    must_take: bool = False  # whether it is no success if it takes no operator


Candidate = tuple[str, Callable[[], Attempt]]
"""The name of an attempt in reports, and what makes it when it is its turn: UnknownPluginError or PluginLoadError if
what it names is not there."""


def list_candidates(options: CompileOptions) -> tuple[list[Candidate], str | None]:
    """Return what is tried, in order, and the torch.compile backend for the rest; InputError for a wrong option."""
    backends = options.backends or {}
    if isinstance(backends, Mapping):
        attempt = Attempt(NAME, list_partitioners(options.partitioners, METHODS), backends, options)
        return [(NAME, lambda: attempt)], options.fallback
    own = {*registry.known_ids(registry.BACKENDS), *registry.known_ids(registry.PARTITIONERS)}
    others = {*_list_others()} - own
    given = list(backends)
    fallback = given.pop() if isinstance(given[-1], str) and given[-1] in others else options.fallback
    found: list[Candidate] = []
    for candidate in given:
        name = candidate
        if not isinstance(candidate, str):
            name = getattr(candidate, "backend_id", getattr(candidate, "__name__", ""))
            if not isinstance(name, str) or not name:
                raise InputError(
                    f"options['backends']: got {candidate!r}, expected a name, a Backend class or an object."
                )
        elif candidate in others:
            raise InputError(
                f"options['backends']: {candidate!r} is another torch.compile backend, which takes whole graphs; it "
                "must be the last one."
            )
        elif candidate not in own and (close := difflib.get_close_matches(name, {*own, *others}, 1, 0.85)):
            text = f"options['backends']: there is no {name!r} here; did you mean {close[0]!r}?"
            raise UnknownPluginError(text, plugin_id=name)
        found.append((name, partial(_make, candidate, name, options)))
    return found, fallback


def _make(candidate: Any, backend_id: str, options: CompileOptions) -> Attempt:
    """Return the attempt with one backend: the partitioners' tags for it, or those of its own partitioner."""
    given = {} if isinstance(candidate, str) else {backend_id: candidate}
    if options.partitioners is not None:
        chosen = list_partitioners(options.partitioners, METHODS)
        chosen = {method: [ForBackend.of(each, backend_id) for each in found] for method, found in chosen.items()}
    elif isinstance(candidate, str):
        chosen = list_partitioners(candidate, METHODS)
    else:
        from exir_lowering.partitioners import SupportPartitioner, everything  # only where nothing says what it takes

        taking_all = SupportPartitioner({backend_id: everything()})
        chosen = {method: [taking_all] for method in METHODS}
    return Attempt(backend_id, chosen, given, options, must_take=True)
