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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from exir_lowering import BackendFailure, Delegate, DelegateContext, InputError
from exir_lowering.graphs.operators import pure as pure_operators

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec


HEAD = "compiler_demo 1"
OPERATORS: Mapping[str, Callable[[Any, Any, Any], torch.Tensor]] = {
    "aten.add": lambda left, right, alpha: torch.add(left, right, alpha=alpha),
    "aten.sub": lambda left, right, alpha: torch.sub(left, right, alpha=alpha),
    "aten.mul": lambda left, right, alpha: torch.mul(left, right),
}
_CONSTANT = re.compile(r"%(\d+) = constant (\w+) (\[.*?\]) (.*)")
_CALL = re.compile(r"%(\d+) = (aten\.\w+) (\S+) (\S+) alpha=(\S+) # debug_handle (-?\d+)")


class Instruction(NamedTuple):
    """One operator call."""

    operator: str  # one of `OPERATORS`
    left: str  # "%" and the number of a value, or a number
    right: str
    alpha: int | float  # the factor of the second argument of add and sub
    handle: int  # the debug handle of its node, -1 if there is none


class Code(NamedTuple):
    """A compiled program: the number of inputs, the constants that follow them, the instructions, the results."""

    inputs: int
    constants: list[torch.Tensor]
    instructions: list[Instruction]
    results: list[str]

    def events(self) -> list[str]:
        """Return the identifier of each instruction's profile event; debug handles may occur twice."""
        return [f"{instruction.operator} #{number}" for number, instruction in enumerate(self.instructions)]


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
    """Read a program; InputError if the bytes are not such a text, have another version, or are damaged."""
    lines = bytes(text).decode(errors="replace").split("\n")
    if lines[0] != HEAD:
        raise InputError(
            f"This is not a payload of backend 'compiler_demo', or has another version: it starts with "
            f"{lines[0][:40]!r}, expected {HEAD!r}. Lower the model again."
        )
    if len(lines) < 4 or not lines[-2].startswith("return") or lines[-1]:
        raise InputError(f"A payload of backend 'compiler_demo' is truncated: got {lines[-1][:80]!r} at its end.")
    code = Code(0, [], [], lines[-2].split()[1:])
    for position, line in enumerate(lines[1:-2], start=2):
        try:
            if position == 2:
                code = Code(int(line.removeprefix("inputs ")), *code[1:])
            elif constant := _CONSTANT.fullmatch(line):
                number, dtype, shape, values = constant.groups()
                tensor = torch.tensor(json.loads(values), dtype=pure_operators.DTYPES[dtype])
                code.constants.append(tensor.reshape(json.loads(shape)))
            else:
                number, operator, left, right, alpha, handle = _CALL.fullmatch(line).groups()  # type: ignore[union-attr]
                code.instructions.append(Instruction(operator, left, right, json.loads(alpha), int(handle)))
            values_before = code.inputs + len(code.constants) + len(code.instructions) - 1
            if position > 2 and int(number) != values_before:
                raise ValueError(f"{values_before} values come before it")
        except (ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
            raise InputError(
                f"Line {position} of a payload of backend 'compiler_demo' cannot be read: {line[:80]!r}: {error}."
            ) from error
    return code


class CompilerDemoDelegate(Delegate):
    """Executes the payloads of `CompilerDemoBackend`."""

    delegate_id = "compiler_demo"

    def compile(
        self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext
    ) -> tuple[Code, DelegateContext]:
        """Read the instructions; InputError if the payload is not from the demo compiler."""
        code = parse(processed)
        for instruction in code.instructions:
            if instruction.operator not in OPERATORS:
                raise InputError(
                    f"A payload of backend 'compiler_demo' calls {instruction.operator}, which it does not support."
                )
        return code, context

    def execute(self, handle: tuple[Code, DelegateContext], inputs: list[Any]) -> Sequence[torch.Tensor]:
        """Run the instructions, each as one profile event; BackendFailure, with its debug handle, if one fails."""
        code, context = handle
        if len(inputs) != code.inputs:
            raise InputError(f"A payload of backend 'compiler_demo' takes {code.inputs} inputs, got {len(inputs)}.")
        values = [*inputs, *code.constants]

        def value(name: str) -> Any:
            return values[int(name[1:])] if name.startswith("%") else json.loads(name)

        with torch.no_grad():
            for event, (operator, left, right, alpha, number) in zip(code.events(), code.instructions, strict=True):
                try:
                    with context.event(event):
                        values.append(OPERATORS[operator](value(left), value(right), alpha))
                except MemoryError:
                    raise
                except Exception as error:
                    raise BackendFailure(
                        f"Delegate 'compiler_demo': {operator} {left} {right}, debug handle {number}, failed: "
                        f"{type(error).__name__}: {error}",
                        debug_handle=number,
                    ) from error
        return [value(name) for name in code.results]
