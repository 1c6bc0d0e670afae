"""Choose the method of a family that runs, and fit inputs and outputs to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from exir_lowering._upstream.ambient import neutral
from exir_lowering.errors import BackendUnavailableError, InputError
from exir_lowering.plugins.availability import Missing
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.manifest import Bucket, Line, split
from exir_lowering.pte.value_kinds import Tensor
from exir_lowering.runtime.inputs import label, lay_out
from exir_lowering.runtime.source import ProgramFile


@dataclass(frozen=True, slots=True)
class Choice:
    """Which method of a file runs.

    Attributes:
        method: Its name.
        reason: Why it is this one.
        others: The methods of the family that cannot run with these inputs here, each with the reason.
    """

    method: str
    reason: str
    others: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.method}: {self.reason}" + "".join(f"\n  not {one}: {why}" for one, why in self.others.items())


def check_preferred(preferred: Any, file: ProgramFile) -> tuple[str, ...]:
    """Return the variants that are preferred; InputError if it is something else, or no method has one of them."""
    names = () if preferred is None else (preferred,) if isinstance(preferred, str) else preferred
    known = {tag: None for line in file.manifest for tag in split(line.method)[1]}
    valid = isinstance(names, Sequence) and all(isinstance(one, str) and one in known for one in names)
    if not valid or (not names and preferred is not None):
        raise InputError(
            f"load: choose: got {preferred!r}, expected a variant, or several in order of preference. The variants of "
            f"{file.name} are {', '.join(map(repr, known)) or 'none'}."
        )
    return tuple(names)


def choose(
    file: ProgramFile, family: str, inputs: Sequence[Any], missing: Mapping[str, Missing], preferred: Sequence[str]
) -> Choice:
    """Choose a method of a family for inputs; raise an InputError or a BackendUnavailableError when none can run."""
    lines = file.families()[family]
    lines = [line for name in preferred for line in lines if name in split(line.method)[1]] or lines
    others = {line.method: why for line in lines if (why := _why_not(file, line, missing, inputs))}
    able = next((line for line in lines if line.method not in others), None)
    if able is None:
        unfit = any(not _why_not(file, line, missing, ()) for line in lines)
        raise (InputError if unfit else BackendUnavailableError)(
            f"run: {file.name} has no method of the family {family!r} that can run with these inputs here:"
            + "".join(f"\n  {method}: {why}" for method, why in others.items())
        )
    sizes = " and whose sizes fit" if able.bucket.sizes else ""
    named = ", of those that choose= names" if preferred else ""
    return Choice(able.method, f"the first whose backends are available{sizes}{named}", others)


def _why_not(file: ProgramFile, line: Line, missing: Mapping[str, Missing], inputs: Sequence[Any]) -> str:
    """Say why a method cannot run; "" if it can."""
    for backend in file.methods[line.method].backends:
        if backend in missing:
            return f"the backend {backend!r} is missing: {missing[backend].reason}"
    return misfit(line.bucket, file.methods[line.method], inputs)


def misfit(bucket: Bucket, method: MethodSpec, inputs: Sequence[Any]) -> str:
    """Say why a bucket does not take inputs of these sizes; what is no tensor of its dimensions is refused later."""
    for size in bucket.sizes:
        for given in _shape(inputs, size.input)[size.dimension : size.dimension + 1]:
            where = f"dimension {size.dimension} of {label(method, size.input)} is {given}"
            least = size.size if size.exact else size.least
            if not least <= given <= size.size:
                return f"{where}, not {least} to {size.size}" if least < size.size else f"{where}, not {size.size}"
            same, place = size.like or (size.input, size.dimension)
            for other in _shape(inputs, same)[place : place + 1]:
                if other != given:
                    whose = f"dimension {place} of {label(method, same)}"
                    return f"{where}, but {whose}, which has to be the same, is {other}"
    return ""


def _shape(inputs: Sequence[Any], index: int) -> Sequence[int]:
    given = inputs[index] if index < len(inputs) else None
    return given.shape if isinstance(given, torch.Tensor) else ()


def pad(bucket: Bucket, inputs: Sequence[Any]) -> list[Any]:
    """Return inputs with a number behind their ends, so that they have the sizes of a bucket."""
    padded = list(inputs)
    for one in bucket.sizes:
        for given in _shape(padded, one.input)[one.dimension : one.dimension + 1]:
            tensor = padded[one.input]
            if given < one.size and not one.exact and tensor.layout == torch.strided:
                behind = (0, 0) * (tensor.dim() - 1 - one.dimension) + (0, one.size - given)
                with neutral():
                    padded[one.input] = torch.constant_pad_nd(tensor, behind, one.fill)
    return padded


def crop(bucket: Bucket, method: MethodSpec, inputs: Sequence[Any], outputs: list[Any]) -> list[Any]:
    """Return outputs without what comes from padding; `inputs` are those that were given."""
    for one in bucket.crops:
        whole, content = outputs[one.output], method.outputs[one.output].content
        if isinstance(content, Tensor):
            size = min(_shape(inputs, one.input)[one.input_dimension], whole.shape[one.dimension])
            with neutral():
                outputs[one.output] = lay_out(whole.narrow(one.dimension, 0, size), content.dim_order)
    return outputs
