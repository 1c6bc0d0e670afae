"""The text that the demo compiler writes, and its parser.

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exir_lowering import InputError
from exir_lowering.graphs.operators import pure as pure_operators
from exir_lowering.plugins import let_through

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
        let_through(error)
        raise InputError(
            f"Line {position} of a payload of backend 'compiler_demo' is not a valid constant: {line[:80]!r}: {error}."
        ) from error
