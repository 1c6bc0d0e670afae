"""The options of the torch.compile backend, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from executorch.exir.backend.backend_details import BackendDetails

from exir_lowering._upstream.dynamo import registered_backends
from exir_lowering.dynamo.watched_weights import Check
from exir_lowering.errors import InputError
from exir_lowering.errors.wording import did_you_mean
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins import registry
from exir_lowering.plugins.backend import Backend, PartitionerLike
from exir_lowering.plugins.delegate import Delegate

TRAINING = ("both", "forward", "backward", "none")
PARTITIONS = ("profitable", "all")
METHODS = ("forward", "backward")


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
            without those that are predicted to take longer than in PyTorch, or "all". Those of other delegates, and
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
    return options.lowering.require_full or options.lowering.require_coverage > 0


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
    if value.edge == "check":
        raise InputError(
            "options['lowering'] has edge='check', which compares the node metadata of both Edge conversions; "
            "AOTAutograd's graphs have less of it than exported programs. Use it with `lower`, or use edge='fast' or "
            "'executorch' here."
        )
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
