"""What callers may pass, brought into one form: a program and a list of partitioners for each method."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_manager import PassManager as FxPassManager

from exir_lowering import graphs
from exir_lowering._upstream.compiler import CompileSpec, ExecutorchProgramManager, Partitioner
from exir_lowering._upstream.edge import EdgeProgramManager, manager_contents
from exir_lowering.errors import InputError, did_you_mean
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins import registry
from exir_lowering.plugins.rewrite import Rewrite, find_rewrites
from exir_lowering.pte import manifest
from exir_lowering.pte.manifest import BUCKET, Bucket, Line, split

T = TypeVar("T")


def check_program(who: str, value: Any) -> ExportedProgram:
    """Check that a value is an ExportedProgram; raise InputError if it is not."""
    if isinstance(value, ExportedProgram):
        return value
    hint = ""
    if isinstance(value, EdgeProgramManager):
        hint = " A manager has several methods: pass it alone."
    elif isinstance(value, ExecutorchProgramManager):
        hint = " Its programs are already emitted: pass those that it was made from."
    elif isinstance(value, (list, tuple)):
        hint = " Several programs are given as a mapping of method names to them: {'forward': program}."
    elif isinstance(value, (str, os.PathLike)):
        hint = f" Load the file first: torch.export.load({os.fspath(value)!r})."
    elif hasattr(value, "forward"):
        hint = " Export the module first: torch.export.export(module, example_inputs)."
    raise InputError(f"{who}: got {type(value).__name__}, expected a torch.export.ExportedProgram.{hint}")


Passes = list[Any] | FxPassManager  # what runs over one method: passes in order, or a pass manager

_PassesLike = Sequence[Callable[[GraphModule], Any]] | FxPassManager
TransformPasses = _PassesLike | Mapping[str, _PassesLike] | None
"""What `lower` takes as transform passes: for all methods, or by method name."""


@dataclass(frozen=True, slots=True)
class RequestedMethod:
    """One method to lower, as the caller gave it."""

    name: str
    program: ExportedProgram  # in ATen or Edge dialect
    partitioners: tuple[Partitioner, ...]  # in priority order
    passes: Passes | None  # what runs over it in Edge dialect


class Request(NamedTuple):
    """What to lower."""

    methods: tuple[RequestedMethod, ...]  # in the order in which they were given
    constant_methods: Mapping[str, Any]  # values that also become methods: those of an EdgeProgramManager
    buckets: Mapping[str, Bucket | None]  # the sizes that each method was specialised for, None for none


def read_request(programs: Any, partitioners: Any, transform_passes: Any = None, variants: Any = None) -> Request:
    """Turn what a caller passed to `lower` into one value per method; a program alone is the method "forward"."""
    methods, constant_methods = _methods(programs)
    passes = by_method("transform_passes", {} if transform_passes is None else transform_passes, methods, _passes)
    requested = []
    for tag, wanted in _read_variants(partitioners, variants).items():
        chosen = list_partitioners(wanted, methods, f"variants[{tag!r}]" if tag else "partitioners")
        requested += [
            RequestedMethod(f"{name}@{tag}" if tag else name, program, tuple(chosen[name]), passes.get(name) or None)
            for name, program in methods.items()
        ]
    buckets = {method.name: method.program.graph_module.meta.get(BUCKET) for method in requested}
    for name in buckets:
        family, tags = split(name)
        if tags and not (family and all(tags)):
            raise InputError(f"programs: got the method name {name!r}, expected a name and tags, such as forward@int8.")
        for other in (family, manifest.METHOD) if tags else ():
            if other in buckets or other in constant_methods:
                raise InputError(f"programs: beside {name!r}, {other!r} names its family or the manifest. Rename one.")
    return Request(tuple(requested), constant_methods, buckets)


def choose_rewrites(options: LoweringOptions, default: str) -> tuple[Rewrite, ...]:
    """Return the rewrites of a call: the default, "safe" or "none", if the options do not say it."""
    return find_rewrites(default if options.rewrites is None else options.rewrites)


def _methods(value: Any) -> tuple[dict[str, ExportedProgram], dict[str, Any]]:
    """Return the programs by method name, and the values that become methods."""
    constants: dict[str, Any] = {}
    if isinstance(value, EdgeProgramManager):
        value, constants = manager_contents(value)
    if not isinstance(value, Mapping):
        return {"forward": check_program("programs", value)}, {}
    methods: Mapping[Any, Any] = value
    if not methods:
        raise InputError("programs is empty: expected at least one method with its ExportedProgram.")
    for name, candidate in methods.items():
        if not isinstance(name, str) or not name or not name.isprintable() or not set(name).isdisjoint(" /"):
            raise InputError(
                f"programs: got the method name {name!r}, expected a text without spaces, slashes and characters that "
                "cannot be printed."
            )
        check_program(f"Method {name!r}", candidate)
    return dict(methods), constants


def _passes(who: str, value: Any) -> Passes:
    if isinstance(value, FxPassManager):
        return value
    for one in value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else [None]:
        if not callable(one) or isinstance(one, type):
            hint = " Create an instance of it." if isinstance(one, type) else ""
            raise InputError(
                f"{who}: got {value if one is None else one!r}, expected a sequence of passes: functions or callable "
                f"objects that take a graph module.{hint}"
            )
    return list(value)


def list_partitioners(value: Any, methods: Collection[str], who: str = "partitioners") -> dict[str, list[Partitioner]]:
    """Return the partitioners of each method in priority order; a method without any stays on the host."""

    def read(who: str, value: Any) -> list[Partitioner]:
        if isinstance(value, (str, Partitioner)) or not isinstance(value, Sequence):
            value = [] if value is None else [value]
        for one in value:
            if not isinstance(one, (str, Partitioner)):
                hint = " Create an instance of it." if isinstance(one, type) and issubclass(one, Partitioner) else ""
                raise InputError(
                    f"{who}: got {one!r}, expected an ExecuTorch Partitioner or the name of an installed one.{hint}"
                )
        return [registry.find_partitioner(one) if isinstance(one, str) else one for one in value]

    found = by_method(who, value, methods, read)
    return {name: found.get(name, []) for name in methods}


def by_method(who: str, value: Any, methods: Collection[str], read: Callable[[str, Any], T]) -> dict[str, T]:
    """Read what is given for all methods, or for those that a mapping has by their names, or that of their family."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(methods, read(who, value))
    known = [*methods, *(family for name in methods if (family := split(name)[0]))]
    for name in value:
        if name not in known:
            listed = ", ".join(map(repr, known))
            raise InputError(
                f"{who}: there is no method {name!r}; the methods are {listed}.{did_you_mean(name, known)}"
            )
    keys = {name: name if name in value else split(name)[0] for name in methods}
    return {name: read(f"{who}[{key!r}]", value[key]) for name, key in keys.items() if key in value}


def check_options(value: Any) -> LoweringOptions:
    """Return the options; None means the defaults. Raise InputError for anything else."""
    if value is None:
        return LoweringOptions()
    if not isinstance(value, LoweringOptions):
        raise InputError(f"options: got {type(value).__name__}, expected LoweringOptions(...).")
    return value


def require_edge(name: str, candidate: ExportedProgram) -> None:
    """Check that a method's program is in Edge dialect; raise InputError if it is not."""
    if not is_edge(candidate):
        raise InputError(
            f"Method {name!r} is in {candidate.dialect} dialect, expected Edge dialect. Use exir_lowering.lower, which "
            "takes torch.export output, or executorch.exir.to_edge first."
        )


def is_edge(candidate: ExportedProgram) -> bool:
    """Return whether a program is in Edge dialect."""
    return bool(candidate.dialect == "EDGE")


def check_destination(who: str, backend_id: Any, compile_specs: Any) -> None:
    """Check the types of a backend id and compile specs; raise InputError if one is wrong."""
    if not isinstance(backend_id, str):
        raise InputError(f"{who}: got {backend_id!r} as the backend id, expected a string.")
    if isinstance(compile_specs, (str, bytes)) or not all(isinstance(s, CompileSpec) for s in compile_specs):
        raise InputError(f"{who}: got compile_specs={compile_specs!r}, expected a sequence of CompileSpec.")


def _read_variants(partitioners: Any, variants: Any) -> dict[str, Any]:
    """Return what each variant is lowered for, by its name in order of preference; "" if there are no variants."""
    if variants is None:
        return {"": partitioners}
    if partitioners is not None:
        raise InputError("lower: got partitioners and variants; each variant names its own partitioners.")
    if not isinstance(variants, Mapping) or not variants:
        raise InputError(
            f"variants: got {variants!r}, expected a mapping from names to partitioners, such as "
            '{"npu": [npu, "xnnpack"], "cpu": "xnnpack"}.'
        )
    for name in variants:
        if not isinstance(name, str) or not name.isprintable() or not name or not set(name).isdisjoint(" @=/"):
            raise InputError(
                f'variants: got the name {name!r}, expected one such as "npu", which is put behind those of methods: '
                'forward@npu. It has no spaces, "@", "=" or "/".'
            )
    return dict(variants)


def describe_families(programs: Mapping[str, ExportedProgram], buckets: Mapping[str, Any]) -> dict[str, str]:
    """Return the constant method that is the manifest of lowered programs, by its name; {} if none is in a family."""
    lines = []
    for name, program in programs.items():
        if not split(name)[0]:
            continue
        found = (getattr(owner, target).backend_id for _, owner, target in graphs.delegates(program.graph_module))
        lines.append(Line(name, tuple(dict.fromkeys(found)), buckets[name] or Bucket()))
        for backend in lines[-1].backends:
            if not backend.isprintable() or " " in backend:
                raise InputError(
                    f"Method {name!r} is for the backend {backend!r}: ids in a manifest have no spaces. Rename it."
                )
    return {manifest.METHOD: manifest.encode(lines)} if lines else {}
