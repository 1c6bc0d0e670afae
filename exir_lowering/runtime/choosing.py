"""Choose the method of a family that runs, and fit inputs and outputs to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from exir_lowering._upstream.ambient import neutral
from exir_lowering.errors import BackendUnavailableError, InputError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.plugins.availability import Missing
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.manifest import Bucket, Line, split
from exir_lowering.pte.value_kinds import Tensor
from exir_lowering.runtime.inputs import lay_out
from exir_lowering.runtime.source import ProgramFile

Preferred: TypeAlias = str | Sequence[str] | Callable[[str, Sequence[str]], str] | None
"""What `load` takes as `choose`: variants, in order of preference, or a function."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which method of a file runs.

    Attributes:
        method: Its name.
        reason: Why it is this one.
        others: Why it is not one of those that come before it, by method.
    """

    method: str
    reason: str
    others: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(
            (f"{self.method}: {self.reason}", *(f"  not {one}: {why}" for one, why in self.others.items()))
        )


def check_preferred(preferred: Any, file: ProgramFile) -> Preferred:
    """Return what is preferred, variants as a tuple; InputError if it is something else, or no method has a variant."""
    if preferred is None or callable(preferred):
        return preferred  # type: ignore[no-any-return]
    names = (preferred,) if isinstance(preferred, str) else preferred
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"load: choose: got {preferred!r}, expected the name of a variant, a sequence of them, or a function that "
            "takes the name of a family and those of its methods that can run."
        )
    known = {tag: None for lines in file.manifest.values() for line in lines for tag in split(line.method)[1]}
    for name in names:
        if name not in known:
            has = f"it has {', '.join(map(repr, known))}" if known else "it has no families of methods"
            raise InputError(f"load: choose: {file.name} has no variant {name!r}; {has}.")
    return tuple(names)


def choose(
    file: ProgramFile, family: str, inputs: Sequence[Any], missing: Mapping[str, Missing], preferred: Preferred
) -> Choice:
    """Choose a method of a family for inputs; raise an InputError or a BackendUnavailableError when none can run."""
    others: dict[str, str] = {}
    able: list[Line] = []
    unfit = False
    for line in _ordered(file.family(family), preferred):
        if absent := _absent(file, line, missing):
            others[line.method] = f"the backend {absent!r} is missing: {missing[absent].reason}"
        elif misfit := _misfit(line.bucket, inputs):
            others[line.method], unfit = misfit, True
        else:
            able.append(line)
            if not callable(preferred):
                break
    if not able:
        why = "".join(f"\n  {method}: {reason}" for method, reason in others.items())
        raise (InputError if unfit else BackendUnavailableError)(
            f"run: {file.name} has no method of the family {family!r} that can run with these inputs here:{why}"
        )
    if callable(preferred):
        return _ask(preferred, family, [line.method for line in able], others)
    why = "the first whose backends are available" + (" and whose sizes fit" if able[0].bucket.sizes else "")
    return Choice(able[0].method, f"{why}, of those that choose= names" if preferred else why, others)


def _ordered(lines: Sequence[Line], preferred: Preferred) -> Sequence[Line]:
    """Return the lines to choose from: those of the preferred variants, where the family has any."""
    names = preferred if isinstance(preferred, tuple) else ()
    return [line for name in names for line in lines if name in split(line.method)[1]] or lines


def _ask(function: Any, family: str, able: Sequence[str], others: Mapping[str, str]) -> Choice:
    """Let a caller's function choose."""
    try:
        method = function(family, tuple(able))
    except Exception as error:
        let_through(error)
        raise InputError(f"choose({family!r}, {able}) raised {type(error).__name__}: {error}") from error
    if method not in able:
        raise InputError(f"choose({family!r}, {able}) returned {method!r}, expected one of these names.")
    return Choice(method, "choose= says so", others)


def _absent(file: ProgramFile, line: Line, missing: Collection[str]) -> str:
    return next((backend for backend in file.methods[line.method].backends if backend in missing), "")


def _misfit(bucket: Bucket, inputs: Sequence[Any]) -> str:
    """Say why inputs do not fit a bucket; what is no such tensor at all is refused when the method runs."""
    for size in bucket.sizes:
        given = _shape(inputs, size.input)
        if size.dimension < len(given) and (misfit := size.misfit(given[size.dimension])):
            return misfit
    return ""


def _shape(inputs: Sequence[Any], index: int) -> Sequence[int]:
    given = inputs[index] if index < len(inputs) else None
    return given.shape if isinstance(given, torch.Tensor) else ()


def never_chosen(file: ProgramFile, missing: Collection[str]) -> set[str]:
    """Return the methods of families that no inputs are run with: an earlier one that can run takes them all."""
    found: set[str] = set()
    for family in file.manifest:
        taken: list[Bucket] = []
        for line in file.family(family):
            if _absent(file, line, missing) or Bucket() in taken or line.bucket in taken:
                found.add(line.method)
            else:
                taken.append(line.bucket)
    return found


def pad(bucket: Bucket, inputs: Sequence[Any]) -> list[Any]:
    """Return inputs with zeros behind their ends, so that they have the sizes of a bucket."""
    padded = list(inputs)
    for index in {size.input for size in bucket.sizes}:
        shape = list(_shape(inputs, index))
        for size in bucket.sizes:
            if size.input == index and size.dimension < len(shape) and not size.exact:
                shape[size.dimension] = max(shape[size.dimension], size.size)  # one that is too large is refused later
        if shape != list(_shape(inputs, index)) and inputs[index].layout == torch.strided:
            given = inputs[index]
            with neutral():
                padded[index] = given.new_zeros(shape)
                padded[index][tuple(map(slice, given.shape))] = given.detach()
    return padded


def crop(bucket: Bucket, method: MethodSpec, inputs: Sequence[Any], outputs: list[Any]) -> list[Any]:
    """Return outputs without what comes from padding; `inputs` are those that were given."""
    cropped = {one.output for one in bucket.crops}
    for one in bucket.crops:
        size = _shape(inputs, one.input)[one.input_dimension]
        whole = outputs[one.output]
        outputs[one.output] = whole.narrow(one.dimension, 0, min(size, whole.shape[one.dimension]))
    for index in cropped:
        content = method.outputs[index].content
        if isinstance(content, Tensor):
            outputs[index] = lay_out(outputs[index], content.dim_order)
    return outputs
