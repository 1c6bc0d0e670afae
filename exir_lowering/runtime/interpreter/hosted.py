"""Payloads of backends that ExecuTorch's runtime has itself, executed there one by one.

For each a program is made in memory that does nothing but call it. No compiler is needed, neither a C++ one nor
ExecuTorch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exir_lowering._upstream.runtime import open_program
from exir_lowering.plugins.payload import find_checks
from exir_lowering.pte import payloads
from exir_lowering.pte.code import Payload
from exir_lowering.pte.format import Delegation
from exir_lowering.pte.program_writer import PayloadCall, write_call
from exir_lowering.pte.value_kinds import KINDS, NULL, TENSOR, ValueSpec
from exir_lowering.runtime.interpreter.kernels import MethodState


class NotHosted(Exception):
    """A payload takes something that a program of its own cannot be given."""


@dataclass(frozen=True, slots=True, eq=False)
class HostedCall:
    """A payload that is ready in the runtime, in a separate program."""

    content: bytes  # the program's file, which the runtime reads
    run: Any  # runs the program
    inputs: tuple[int, ...]  # which of the values of a call it takes
    outputs: tuple[int, ...]  # which of them it returns

    def __call__(self, state: MethodState, arguments: tuple[int, ...]) -> None:
        """Execute the payload with these values of the method."""
        given = [state.get(arguments[position]) for position in self.inputs]
        for position, output in zip(self.outputs, self.run(given, clone_outputs=False), strict=True):
            state.slot(arguments[position]).write(output)


def host(
    method: str,
    payload: Payload,
    plan: Delegation,  # what the file says of it
    values: Sequence[ValueSpec],  # that it is called with: inputs, then outputs
    named: Mapping[str, memoryview],  # of the file
    data: str | None,  # the path of the data file
) -> HostedCall:
    """Make a payload ready in ExecuTorch's runtime; raise what that raises when the backend refuses it."""
    # What is in doubt is both: an input keeps its value, an output has none that matters.
    inputs = tuple(position for position in range(plan.arguments - min(plan.counts)) if values[position].kind != NULL)
    outputs = tuple(range(plan.arguments - max(plan.counts), plan.arguments))
    for value in values:
        if value.kind not in (TENSOR, NULL):
            raise NotHosted(f"it is called with {KINDS[value.kind]}")
    checked = payloads.check_payload(payload.backend, payload.content, find_checks)
    if checked is not None:
        names = checked.weights.keys()
        named = {name: content for name, content in named.items() if name in names}
    call = PayloadCall(method, payload.backend, payload.content, payload.specs, values, inputs, outputs)
    content = write_call(call, named)
    run = open_program(content, data).load_method(method)
    return HostedCall(content, run, inputs, outputs)
