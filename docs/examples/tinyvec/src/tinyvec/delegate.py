"""At run time: executes instructions. No compiler is imported, neither ours nor ExecuTorch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from exir_lowering import BackendFailure, Delegate, DelegateContext, InputError
from exir_lowering.plugins import Instructions
from tinyvec import MAGIC, VERSION

if TYPE_CHECKING:
    from exir_lowering import CompileSpec

COMPUTE: Mapping[str, Callable[..., torch.Tensor]] = {
    "ADD": lambda one, other, alpha: torch.add(one, other, alpha=alpha),
    "SUB": lambda one, other, alpha: torch.sub(one, other, alpha=alpha),
    "MUL": torch.mul,
    "RELU": torch.relu,
    "MM": torch.mm,
    "LINEAR": torch.nn.functional.linear,
}
"""What computes each opcode: a function of the arguments that its operator has in its schema."""


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """A payload that is ready to be executed: what `compile` returns and `execute` gets."""

    program: Instructions
    weights: list[torch.Tensor]  # buffers, too, with their current values
    context: DelegateContext


class TinyvecDelegate(Delegate):
    """Executes what `TinyvecBackend` compiled."""

    delegate_id = "tinyvec"

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> Machine:
        """Read the instructions and the weights; InputError if the payload is no valid one."""
        program = Instructions.from_bytes(processed, MAGIC, VERSION)
        for one in program.code:
            if one.opcode not in COMPUTE:
                raise InputError(f"A payload calls {one.opcode}, which this version of tinyvec does not have.")
        return Machine(program, [ref.load(context.named_data) for ref in program.weights], context)

    def execute(self, handle: Machine, inputs: list[Any]) -> Sequence[torch.Tensor]:
        """Run the instructions; BackendFailure, with the debug handle, for one that fails."""
        program = handle.program
        if len(inputs) != program.inputs:
            raise InputError(f"A payload of tinyvec takes {program.inputs} inputs, got {len(inputs)}.")
        values = [*inputs, *handle.weights]
        for event, one in program.events.items():
            try:
                with handle.context.event(event):
                    result = COMPUTE[one.opcode](*one.operands(values))
            except Exception as error:
                raise BackendFailure(f"tinyvec: {event} failed: {error}", debug_handle=one.handle) from error
            values.extend(result if isinstance(result, (tuple, list)) else [result])
        written = [(buffer, values[number].clone()) for buffer, number in program.states]  # it may be an input
        for buffer, value in written:
            handle.weights[buffer - program.inputs] = value
        return [values[number] for number in program.outputs]
