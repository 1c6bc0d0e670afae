"""What is compared: each method of a file that there is a program for, in calls that are given, once they fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering.errors import InputError, did_you_mean
from exir_lowering.lowered_module import convention, record
from exir_lowering.lowered_module.convention import Convention
from exir_lowering.pte.assembling import MODULE
from exir_lowering.pte.container import open_program
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.manifest import Bucket, split
from exir_lowering.pte.value_kinds import Tensor
from exir_lowering.runtime.choosing import pad
from exir_lowering.runtime.inputs import describe, prepare, show
from exir_lowering.runtime.source import ProgramFile

_QUANTIZED = ("quantized_decomposed", "torchao")
_HALF = (torch.float16, torch.bfloat16)
_EXPECTED = (
    "expected a sequence of calls for a single method, or a mapping from methods to such sequences; a call is a tuple "
    "of positional arguments, or (args, kwargs)."
)


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

    def check(self, where: str, inputs: Sequence[Any]) -> None:
        """Raise InputError if the method does not take some inputs, which are flat."""
        prepare(where, self.spec, pad(self.bucket, inputs), self.convention.labels)


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
            hint = did_you_mean(name, file.methods, " Pass a mapping from methods to programs.")
            known = ", ".join(map(repr, file.methods))
            raise InputError(f"verify: {file.name} has no method {name!r}; it has {known}.{hint}")
        for method in [name] if name in file.methods else family:
            found[method] = _subject(method, program, file)
    return found


def _subject(name: str, program: ExportedProgram, file: ProgramFile) -> Subject:
    spec = file.methods[name]
    inputs = graphs.user_inputs(program)
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
    return Subject(name, program, spec, called, inputs, *_kinds(program, spec), file.bucket(name))


def _misfit(value: Any, expected: Any) -> str:
    """Say what an input is in the program, if that cannot be what it is in the file; else ""."""
    if isinstance(value, torch.Tensor) != isinstance(expected, Tensor):
        return "a tensor" if isinstance(value, torch.Tensor) else "no tensor"
    if not isinstance(value, torch.Tensor) or not isinstance(expected, Tensor):
        return ""
    fits = len(value.shape) == len(expected.sizes) and all(
        not isinstance(size, int) or size == bound or (expected.dynamic and size <= bound) or expected.unbound
        for size, bound in zip(value.shape, expected.sizes, strict=True)
    )
    return "" if fits and value.dtype == expected.dtype else show(value)


def _kinds(program: ExportedProgram, spec: MethodSpec) -> tuple[bool, torch.dtype]:
    """Return whether a program, or what the host executes of it, is quantised (not payloads), and its coarsest type."""
    nodes = [node for _, node in graphs.every_node(program.graph_module) if node.op == "call_function"]
    names = (*map(graphs.operator_name, nodes), *spec.operators)
    values = (node.meta.get("val") for node in nodes)
    dtypes = [value.dtype for value in values if isinstance(value, torch.Tensor) and value.dtype in _HALF]
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
    return any(name.startswith(_QUANTIZED) for name in names), coarsest


def read_inputs(subjects: Mapping[str, Subject], inputs: object) -> dict[str, list[list[Any]]]:
    """Return the calls of each method, flat; InputError if a call is not one that its method takes."""
    if isinstance(inputs, Mapping):
        named = {name: [one for one in subjects if name in (one, split(one)[0])] or [name] for name in inputs}
        methods = {one: inputs[name] for name, ones in named.items() for one in ones}
    elif len({split(name)[0] or name for name in subjects}) == 1:
        methods = dict.fromkeys(subjects, inputs)
    else:
        raise InputError(f"verify: inputs: got a {type(inputs).__name__} for {len(subjects)} methods, {_EXPECTED}")
    if not methods:
        raise InputError(f"verify: inputs: got an empty mapping, {_EXPECTED}")
    for name, calls in methods.items():
        if name not in subjects:
            raise InputError(f"verify: inputs: there is no program for {name!r}, only for {', '.join(subjects)}.")
        if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)) or not calls:
            got = "no calls" if isinstance(calls, Sequence) and not calls else f"a {type(calls).__name__}"
            raise InputError(f"verify: inputs of {name!r}: got {got}, {_EXPECTED}")
    return {
        name: [_read(subjects[name], number, call) for number, call in enumerate(calls)]
        for name, calls in methods.items()
    }


def read_bundled(subjects: Mapping[str, Subject], file: ProgramFile) -> dict[str, list[list[Any]]]:
    """Return the calls that `LoweredModule.save` bundled with a file; InputError if there are none."""
    kept = open_program(file.file.content)[1].named.get(MODULE)
    bundled = {} if kept is None else record.read(file.name, file.methods, kept).bundled
    calls = {name: [list(leaves) for leaves in bundled[name]] for name in subjects if bundled.get(name)}
    if not calls:
        raise InputError(
            f"verify: {file.name} has no bundled inputs for {', '.join(subjects)}: a file has them that was saved by a "
            "lowered.module() with bundled_inputs. Leave inputs out to have them generated."
        )
    for name, leaves in ((name, leaves) for name, found in calls.items() for leaves in found):
        subjects[name].check(f"verify: a bundled call of {name!r}", leaves)
    return calls


def _read(subject: Subject, number: int, call: object) -> list[Any]:
    where = f"verify: call {number} of {subject.name!r}"
    leaves = bind_call(where, subject.convention, call)
    subject.check(where, leaves)
    return leaves


def bind_call(where: str, convention: Convention, call: object) -> list[Any]:
    """Return the values of a call, a tuple or (args, kwargs), in the program's order; InputError if it is none."""
    if not isinstance(call, (tuple, list)):
        raise InputError(f"{where}: got a {type(call).__name__}, {_EXPECTED}")
    args, kwargs = (call[0], call[1]) if _has_keywords(convention, call) else (call, {})
    return convention.bind(args, kwargs)


def _has_keywords(convention: Convention, call: Sequence[Any]) -> bool:
    """Return whether a call is (args, kwargs), and not two arguments of which the second is a dict."""
    if len(call) != 2 or not isinstance(call[0], (tuple, list)) or not isinstance(call[1], dict):
        return False
    names = (*convention.positional, *convention.keywords)
    return set(call[1]) <= set(names) and (len(names) != 2 or len(call[0]) + len(call[1]) == 2)
