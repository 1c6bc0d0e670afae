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
    spec, inputs = file.methods[name], graphs.user_inputs(program)
    where = f"verify: method {name!r} of {file.name}"
    if len(inputs) != len(spec.inputs):
        raise InputError(
            f"{where} takes {len(spec.inputs)} inputs, but its program takes {len(inputs)}: the file was made from "
            "another program. Pass the one that was lowered."
        )
    called = convention.of_program(name, program)
    for label, node, wanted in zip(called.labels, inputs, spec.inputs, strict=True):
        value, expected, problem = node.meta.get("val"), wanted.content, ""
        if isinstance(value, torch.Tensor) != isinstance(expected, Tensor):
            problem = "a tensor" if isinstance(value, torch.Tensor) else "no tensor"
        elif isinstance(value, torch.Tensor) and isinstance(expected, Tensor):
            fits = value.dtype == expected.dtype and len(value.shape) == len(expected.sizes)
            for size, bound in zip(value.shape, expected.sizes, strict=fits):
                free = not isinstance(size, int) or size == bound or (expected.dynamic and size <= bound)
                fits = fits and (free or expected.unbound)
            problem = "" if fits else show(value)
        if problem:
            raise InputError(
                f"{where}: {label} is {describe(wanted)} in the file, and {problem} in the program: the file was made "
                "from another program. Pass the one that was lowered."
            )
    nodes = [node for _, node in graphs.every_node(program.graph_module) if node.op == "call_function"]
    # Of what a file executes, too: payloads are not looked at.
    quantized = any(one.startswith(_QUANTIZED) for one in (*map(graphs.operator_name, nodes), *spec.operators))
    dtypes = [value.dtype for node in nodes if isinstance(value := node.meta.get("val"), torch.Tensor)]
    halves = [dtype for dtype in dtypes if dtype in (torch.float16, torch.bfloat16)]
    coarsest = max(halves, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
    return Subject(name, program, spec, called, inputs, quantized, coarsest, file.bucket(name))


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
    found: dict[str, list[list[Any]]] = {}
    for name, calls in methods.items():
        for number, call in enumerate(calls):
            where = f"verify: call {number} of {name!r}"
            found.setdefault(name, []).append(bind_call(where, subjects[name].convention, call))
            subjects[name].check(where, found[name][-1])
    return found


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


def bind_call(where: str, convention: Convention, call: object) -> list[Any]:
    """Return the values of a call, a tuple or (args, kwargs), in the program's order; InputError if it is none."""
    if not isinstance(call, (tuple, list)):
        raise InputError(f"{where}: got a {type(call).__name__}, {_EXPECTED}")
    # (args, kwargs), unless these are two arguments of which the second is a dict.
    args, kwargs = call, dict[str, Any]()
    if len(call) == 2 and isinstance(call[0], (tuple, list)) and isinstance(call[1], dict):
        names = (*convention.positional, *convention.keywords)
        if set(call[1]) <= set(names) and (len(names) != 2 or len(call[0]) + len(call[1]) == 2):
            args, kwargs = call
    return convention.bind(args, kwargs)
