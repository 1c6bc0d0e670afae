"""The run-time side of the demo compiler: the text that it writes, read by its delegate and run with torch.

    compiler_demo 1
    inputs 1
    %1 = constant float32 [2] [1.0, 2.0]
    %2 = aten.add %0 %1 alpha=1 # debug_handle 3
    return %2

Values are numbered, starting with the inputs. An operator's arguments can also be plain numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from exir_lowering import BackendFailure, Delegate, DelegateContext, InputError
from exir_lowering.graphs.operators import pure as pure_operators

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec


HEAD = "compiler_demo 1"
OPERATORS = ("aten.add", "aten.sub", "aten.mul")
_CONSTANT = re.compile(r"%(\d+) = constant (\w+) (\[.*?\]) (.*)")
_CALL = re.compile(r"%(\d+) = (aten\.\w+) (\S+) (\S+) alpha=(\S+) # debug_handle (-?\d+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operator call."""

    operator: str  # one of `OPERATORS`
    left: str  # "%" and the number of a value, or a number
    right: str
    alpha: int | float  # the factor of the second argument of add and sub
    handle: int  # the debug handle of its node, -1 if there is none


@dataclass(frozen=True, slots=True)
class Code:
    """A compiled program: the number of inputs, the constants that follow them, the instructions, the results."""

    inputs: int
    constants: list[torch.Tensor]
    instructions: list[Instruction]
    results: list[str]


def events(instructions: Sequence[Instruction]) -> list[str]:
    """Return the identifier of each instruction's profile event; debug handles may occur twice."""
    return [f"{instruction.operator} #{number}" for number, instruction in enumerate(instructions)]


def write(code: Code) -> str:
    """Write a program as text."""
    lines = [HEAD, f"inputs {code.inputs}"]
    for number, tensor in enumerate(code.constants, code.inputs):
        dtype = str(tensor.dtype).removeprefix("torch.")
        lines.append(f"%{number} = constant {dtype} {json.dumps(list(tensor.shape))} {json.dumps(tensor.tolist())}")
    for number, i in enumerate(code.instructions, code.inputs + len(code.constants)):
        alpha = json.dumps(i.alpha)
        lines.append(f"%{number} = {i.operator} {i.left} {i.right} alpha={alpha} # debug_handle {i.handle}")
    lines.append(f"return {' '.join(code.results)}")
    return "\n".join(lines) + "\n"


def parse(text: bytes) -> Code:
    """Read a program; InputError if the bytes are not such a text, have another version, or are truncated."""
    try:
        lines = bytes(text).decode().split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"This is not a payload of backend 'compiler_demo': it is not text ({error}).") from error
    if lines[0] != HEAD:
        raise InputError(
            f"This is not a payload of backend 'compiler_demo', or has another version: it starts with "
            f"{lines[0][:40]!r}, expected {HEAD!r}. Lower the model again."
        )
    if len(lines) < 4 or not lines[-2].startswith("return") or lines[-1]:
        raise InputError(f"A payload of backend 'compiler_demo' is truncated: got {lines[-1][:80]!r} at its end.")
    constants: list[torch.Tensor] = []
    instructions: list[Instruction] = []
    inputs = int(_match(r"inputs (\d+)", lines[1], 2)[1])
    for position, line in enumerate(lines[2:-2], start=3):
        if constant := _CONSTANT.fullmatch(line):
            constants.append(_constant(constant, line, position))
            number = constant[1]
        else:
            call = _match(_CALL, line, position)
            number, operator, left, right, alpha, handle = call.groups()
            instructions.append(Instruction(operator, left, right, json.loads(alpha), int(handle)))
        if int(number) != inputs + len(constants) + len(instructions) - 1:
            raise InputError(f"A payload of backend 'compiler_demo' lacks a line before line {position}: {line!r}.")
    return Code(inputs, constants, instructions, lines[-2].split()[1:])


def _match(pattern: Any, line: str, position: int) -> re.Match[str]:
    found: re.Match[str] | None = re.fullmatch(pattern, line)
    if found is None:
        raise InputError(f"Line {position} of a payload of backend 'compiler_demo' cannot be read: {line[:80]!r}.")
    return found


def _constant(found: re.Match[str], line: str, position: int) -> torch.Tensor:
    _, dtype, shape, values = found.groups()
    try:
        return torch.tensor(json.loads(values), dtype=pure_operators.DTYPES[dtype]).reshape(json.loads(shape))
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        raise InputError(
            f"Line {position} of a payload of backend 'compiler_demo' is not a valid constant: {line[:80]!r}: {error}."
        ) from error


_RUN: Mapping[str, Callable[[Any, Any, Any], torch.Tensor]] = {
    "aten.add": lambda left, right, alpha: torch.add(left, right, alpha=alpha),
    "aten.sub": lambda left, right, alpha: torch.sub(left, right, alpha=alpha),
    "aten.mul": lambda left, right, alpha: torch.mul(left, right),
}


@dataclass(frozen=True, slots=True)
class Executable:
    """The instructions, the identifiers of their profile events, and the context that records these."""

    code: Code
    events: list[str]
    context: DelegateContext


class CompilerDemoDelegate(Delegate):
    """Executes the payloads of `CompilerDemoBackend`."""

    delegate_id = "compiler_demo"

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> Executable:
        """Read the instructions; InputError if the payload is not from the demo compiler."""
        code = parse(processed)
        for instruction in code.instructions:
            if instruction.operator not in _RUN:
                raise InputError(
                    f"A payload of backend 'compiler_demo' calls {instruction.operator}, which it does not support."
                )
        return Executable(code, events(code.instructions), context)

    def execute(self, handle: Executable, inputs: list[Any]) -> Sequence[torch.Tensor]:
        """Run the instructions, each as one profile event.

        InputError: The number of inputs is wrong. BackendFailure: An instruction failed, with its debug handle.
        """
        code = handle.code
        if len(inputs) != code.inputs:
            raise InputError(f"A payload of backend 'compiler_demo' takes {code.inputs} inputs, got {len(inputs)}.")
        values = [*inputs, *code.constants]
        with torch.no_grad():
            for event, instruction in zip(handle.events, code.instructions, strict=True):
                with handle.context.event(event):
                    values.append(_run(instruction, values))
        return [_value(name, values) for name in code.results]


def _run(instruction: Instruction, values: list[Any]) -> torch.Tensor:
    try:
        left, right = _value(instruction.left, values), _value(instruction.right, values)
        return _RUN[instruction.operator](left, right, instruction.alpha)
    except MemoryError:
        raise
    except Exception as error:
        raise BackendFailure(
            f"Delegate 'compiler_demo': {instruction.operator} {instruction.left} {instruction.right}, debug handle "
            f"{instruction.handle}, failed: {type(error).__name__}: {error}",
            debug_handle=instruction.handle,
        ) from error


def _value(name: str, values: list[Any]) -> Any:
    return values[int(name[1:])] if name.startswith("%") else json.loads(name)
