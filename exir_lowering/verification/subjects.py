"""What is compared: each method of a file that there is a program for, once the two fit together."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.errors import InputError
from exir_lowering.lowered_module import convention
from exir_lowering.lowered_module.convention import Convention
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.manifest import Bucket
from exir_lowering.pte.value_kinds import Tensor
from exir_lowering.runtime.inputs import describe
from exir_lowering.runtime.source import ProgramFile

_QUANTIZED = ("quantized_decomposed", "torchao")
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A method and its program."""

    name: str
    program: ExportedProgram  # the caller's: it is only read
    spec: MethodSpec
    convention: Convention
    inputs: tuple[Node, ...]  # the placeholders of the values in its arguments
    quantized: bool
    coarsest: torch.dtype  # the floating-point type of the fewest digits that it computes with
    bucket: Bucket  # the sizes that the method was specialised for


def match(programs: object, file: ProgramFile, runnable: Collection[str] = ()) -> dict[str, Subject]:
    """Return what is compared, of a family each runnable method; InputError if a program is not that of its method."""
    given = programs if isinstance(programs, Mapping) else {"forward": programs}
    if not given:
        raise InputError("verify: programs: got an empty mapping, expected a program for at least one method.")
    found = {}
    for name, program in given.items():
        if not isinstance(name, str) or not isinstance(program, ExportedProgram):
            raise InputError(
                f"verify: programs: got a {type(program).__name__} for {name!r}, expected the ExportedProgram that was "
                "lowered, or a mapping from the names of methods to ExportedPrograms."
            )
        family = [line.method for line in file.families().get(name, ()) if line.method in runnable]
        if name not in file.methods and not family:
            close = difflib.get_close_matches(name, file.methods, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else " Pass a mapping from methods to programs."
            known = ", ".join(map(repr, file.methods))
            raise InputError(f"verify: {file.name} has no method {name!r}; it has {known}.{hint}")
        for method in [name] if name in file.methods else family:
            found[method] = _subject(method, program, file)
    return found


def _subject(name: str, program: ExportedProgram, file: ProgramFile) -> Subject:
    spec = file.methods[name]
    specs = program.graph_signature.input_specs
    nodes = program.graph.find_nodes(op="placeholder")
    inputs = tuple(node for node, one in zip(nodes, specs, strict=True) if one.kind is InputKind.USER_INPUT)
    where = f"verify: method {name!r} of {file.name}"
    if len(inputs) != len(spec.inputs):
        raise InputError(
            f"{where} takes {len(spec.inputs)} inputs, but its program takes {len(inputs)}: the file was made from "
            "another program. Pass the one that was lowered."
        )
    called = convention.of_program(name, program)
    for label, node, value in zip(called.labels, inputs, spec.inputs, strict=True):
        problem = _misfit(node.meta.get("val"), value.content)
        if problem:
            raise InputError(
                f"{where}: {label} is {describe(value)} in the file, and {problem} in the program: the file was made "
                "from another program. Pass the one that was lowered."
            )
    kinds = _is_quantized(program, spec), _coarsest(program)
    return Subject(name, program, spec, called, inputs, *kinds, file.bucket(name))


def _misfit(value: Any, expected: Any) -> str:
    """Say what an input is in the program, if that cannot be what it is in the file; else ""."""
    if isinstance(value, torch.Tensor) != isinstance(expected, Tensor):
        return "a tensor" if isinstance(value, torch.Tensor) else "no tensor"
    if not isinstance(value, torch.Tensor) or not isinstance(expected, Tensor):
        return ""
    sizes = [size if isinstance(size, int) else None for size in value.shape]
    shown = [str(size) for size in value.shape]
    same_rank = len(sizes) == len(expected.sizes)
    fits = same_rank and all(
        size is None or size == bound or (expected.dynamic and size <= bound) or expected.unbound
        for size, bound in zip(sizes, expected.sizes, strict=True)
    )
    if value.dtype != expected.dtype or not fits:
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} of shape [{', '.join(shown)}]"
    return ""


def _is_quantized(program: ExportedProgram, spec: MethodSpec) -> bool:
    """Return whether a program, or what the host executes of it, is quantised; inside payloads nobody can look."""
    names = [graphs.operator_name(node) for node in _operators(program)]
    return any(name.startswith(_QUANTIZED) for name in (*names, *spec.operators))


def _coarsest(program: ExportedProgram) -> torch.dtype:
    values = (node.meta.get("val") for node in _operators(program))
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor) and value.dtype in _HALF}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _operators(program: ExportedProgram) -> Sequence[Node]:
    return [node for _, module in graphs.walk(program.graph_module) for node in module.graph.nodes if _computes(node)]


def _computes(node: Node) -> bool:
    return node.op == "call_function" and isinstance(getattr(node.target, "__name__", None), str)
