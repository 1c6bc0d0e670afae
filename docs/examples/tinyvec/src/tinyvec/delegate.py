"""At run time: executes instructions. No compiler is imported, neither ours nor ExecuTorch's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from exir_lowering import BackendFailure, Delegate, DelegateContext, InputError
from tinyvec import payload
from tinyvec.payload import Program

if TYPE_CHECKING:
    from exir_lowering import CompileSpec

_RUN: Mapping[str, Callable[..., torch.Tensor]] = {
    "aten.add.Tensor": torch.add,
    "aten.sub.Tensor": torch.sub,
    "aten.mul.Tensor": torch.mul,
    "aten.relu.default": torch.relu,
    "aten.mm.default": torch.mm,
    "aten.linear.default": torch.nn.functional.linear,
}


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """A program that is ready to be executed: what `compile` returns and `execute` gets."""

    program: Program
    weights: list[torch.Tensor]
    context: DelegateContext


class TinyvecDelegate(Delegate):
    """Executes what `TinyvecBackend` compiled."""

    delegate_id = "tinyvec"

    def is_available(self) -> bool:
        """Payloads and weights are little-endian."""
        return sys.byteorder == "little"

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> Machine:
        """Read the instructions and the weights, which are computed with in float32.

        Raises:
            InputError: The payload is no valid one, or named data of the file is missing.
        """
        program = payload.parse(processed)
        for instruction in program.code:
            if instruction.operator not in _RUN:
                raise InputError(
                    f"A payload of tinyvec calls {instruction.operator}, which this version does not have."
                )
        weights = [ref.load(context.named_data).to(torch.float32) for ref in program.weights]
        return Machine(program, weights, context)

    def execute(self, handle: Machine, inputs: list[Any]) -> Sequence[torch.Tensor]:
        """Run the instructions.

        Raises:
            InputError: The number of inputs is wrong.
            BackendFailure: An instruction failed; it has the debug handle of the operator.
        """
        program = handle.program
        if len(inputs) != program.inputs:
            raise InputError(f"A payload of tinyvec takes {program.inputs} inputs, got {len(inputs)}.")
        values = [*inputs, *handle.weights]
        for event, instruction in zip(program.events, program.code, strict=True):
            arguments = [values[number] for number in instruction.arguments]
            try:
                with torch.no_grad(), handle.context.event(event):
                    values.append(_RUN[instruction.operator](*arguments, **instruction.options))
            except Exception as error:
                raise BackendFailure(
                    f"tinyvec: {event} failed: {type(error).__name__}: {error}", debug_handle=instruction.handle
                ) from error
        return [values[number] for number in program.outputs]
