"""What callers may give, turned into one form: a program and a list of partitioners for each method."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import Partitioner
from torch.export import ExportedProgram

from exir_lowering import registry
from exir_lowering.errors import InputError
from exir_lowering.options import LoweringOptions

EDGE_DIALECT = "EDGE"


def program(who: str, value: Any) -> ExportedProgram:
    """Check that a value is an ExportedProgram.

    Raises:
        InputError: It is not.
    """
    if isinstance(value, ExportedProgram):
        return value
    hint = ""
    if hasattr(value, "exported_program"):
        hint = " Pass its programs: {name: manager.exported_program(name) for name in manager.methods}."
    elif hasattr(value, "forward"):
        hint = " Export the module first: torch.export.export(module, example_inputs)."
    raise InputError(f"{who}: got {type(value).__name__}, expected a torch.export.ExportedProgram.{hint}")


def programs(value: Any) -> dict[str, ExportedProgram]:
    """Return the programs by method name; a single program is the method "forward".

    Raises:
        InputError: There is none, a name is not a string that can name a method, or a value is not an ExportedProgram.
    """
    if not isinstance(value, Mapping):
        return {"forward": program("programs", value)}
    if not value:
        raise InputError("programs is empty: expected at least one method with its ExportedProgram.")
    for name, candidate in value.items():
        if not isinstance(name, str) or not name:
            raise InputError(f"programs: got the method name {name!r}, expected a non-empty string.")
        if "/" in name:
            raise InputError(
                f"programs: the method name {name!r} holds a slash, which separates names in partition ids."
            )
        program(f"Method {name!r}", candidate)
    return dict(value)


def partitioners(value: Any, methods: Mapping[str, ExportedProgram]) -> dict[str, list[Partitioner]]:
    """Return the partitioners of each method in priority order; a method without any stays on the host.

    Raises:
        InputError: A method is not known, or something is no partitioner.
        UnknownPluginError, PluginLoadError: A name cannot be resolved.
    """
    if not isinstance(value, Mapping):
        common = _list("partitioners", value)
        return dict.fromkeys(methods, common)
    for name in value:
        if name not in methods:
            close = difflib.get_close_matches(str(name), methods, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise InputError(
                f"partitioners: there is no method {name!r}; the methods are {', '.join(map(repr, methods))}.{hint}"
            )
    return {name: _list(f"partitioners[{name!r}]", value.get(name)) for name in methods}


def _list(who: str, value: Any) -> list[Partitioner]:
    if value is None:
        return []
    if isinstance(value, (str, Partitioner)) or not isinstance(value, Sequence):
        value = [value]
    return [_one(who, item) for item in value]


def _one(who: str, value: Any) -> Partitioner:
    if isinstance(value, str):
        return registry.find_partitioner(value)
    if isinstance(value, Partitioner):
        return value
    hint = " Make an object of it." if isinstance(value, type) and issubclass(value, Partitioner) else ""
    raise InputError(f"{who}: got {value!r}, expected an ExecuTorch Partitioner or the name of an installed one.{hint}")


def options(value: Any) -> LoweringOptions:
    """Return the options; None is the defaults.

    Raises:
        InputError: It is something else.
    """
    if value is None:
        return LoweringOptions()
    if not isinstance(value, LoweringOptions):
        raise InputError(f"options: got {type(value).__name__}, expected LoweringOptions(...).")
    return value


def require_edge(methods: Mapping[str, ExportedProgram]) -> None:
    """Check that programs are in Edge dialect.

    Raises:
        InputError: One is not.
    """
    for name, candidate in methods.items():
        if not is_edge(candidate):
            raise InputError(
                f"Method {name!r} is in {candidate.dialect} dialect, expected Edge dialect. Use exir_lowering.lower, "
                f"which takes torch.export output, or executorch.exir.to_edge first."
            )


def is_edge(candidate: ExportedProgram) -> bool:
    """Tell whether a program is in Edge dialect."""
    return bool(candidate.dialect == EDGE_DIALECT)


def destination(who: str, backend_id: Any, compile_specs: Any) -> None:
    """Check a backend id and compile specs.

    Raises:
        InputError: One is of another type.
    """
    if not isinstance(backend_id, str):
        raise InputError(f"{who}: got {backend_id!r} as the backend id, expected a string.")
    if isinstance(compile_specs, (str, bytes)) or not all(isinstance(s, CompileSpec) for s in compile_specs):
        raise InputError(f"{who}: got compile_specs={compile_specs!r}, expected a sequence of CompileSpec.")
