"""Inputs that the caller gives for methods, flat, and checked against what each method takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exir_lowering.errors import InputError
from exir_lowering.lowered_module import record
from exir_lowering.lowered_module.convention import Convention
from exir_lowering.pte.assembling import MODULE
from exir_lowering.pte.container import open_program
from exir_lowering.pte.manifest import split
from exir_lowering.runtime.choosing import pad
from exir_lowering.runtime.inputs import prepare
from exir_lowering.runtime.source import ProgramFile
from exir_lowering.verification.subjects import Subject

_EXPECTED = (
    "expected a sequence of calls for a single method, or a mapping from methods to such sequences; a call is a tuple "
    "of positional arguments, or (args, kwargs)."
)


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
    for subject, leaves in ((subjects[name], leaves) for name, found in calls.items() for leaves in found):
        where = f"verify: a bundled call of {subject.name!r}"
        prepare(where, subject.spec, pad(subject.bucket, leaves), subject.convention.labels)
    return calls


def _read(subject: Subject, number: int, call: object) -> list[Any]:
    where = f"verify: call {number} of {subject.name!r}"
    leaves = bind_call(where, subject.convention, call)
    prepare(where, subject.spec, pad(subject.bucket, leaves), subject.convention.labels)
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
