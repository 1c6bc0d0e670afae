"""The run-time side of the demo compiler: it reads the text when it compiles, and runs it with torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from exir_lowering import BackendFailure, Delegate, DelegateContext, InputError
from exir_lowering.backends.compiler_demo import instructions
from exir_lowering.backends.compiler_demo.instructions import Code, Instruction
from exir_lowering.plugins import let_through

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec


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
        code = instructions.parse(processed)
        for instruction in code.instructions:
            if instruction.operator not in _RUN:
                raise InputError(
                    f"A payload of backend 'compiler_demo' calls {instruction.operator}, which it does not support."
                )
        return Executable(code, instructions.events(code.instructions), context)

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
    except Exception as error:
        let_through(error)
        raise BackendFailure(
            f"Delegate 'compiler_demo': {instruction.operator} {instruction.left} {instruction.right}, debug handle "
            f"{instruction.handle}, failed: {type(error).__name__}: {error}",
            debug_handle=instruction.handle,
        ) from error


def _value(name: str, values: list[Any]) -> Any:
    return values[int(name[1:])] if name.startswith("%") else json.loads(name)
