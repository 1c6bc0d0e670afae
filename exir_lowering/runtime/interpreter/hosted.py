"""Payloads of backends that ExecuTorch's runtime has itself, executed there one by one.

For each a program is made in memory that does nothing but call it. No compiler is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executorch.exir import schema
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.scalar_type import ScalarType

from exir_lowering._upstream.files import serialize
from exir_lowering._upstream.runtime import open_program
from exir_lowering.plugins.payload import find_checks
from exir_lowering.pte import payloads
from exir_lowering.pte.dtypes import CODES
from exir_lowering.pte.format import Delegation
from exir_lowering.pte.value_kinds import KINDS, NULL, Tensor, ValueSpec
from exir_lowering.runtime.interpreter.code import Payload
from exir_lowering.runtime.interpreter.kernels import MethodState

_ALIGNMENT = 16


class NotHosted(Exception):
    """A payload takes something that a program of its own cannot be given."""


@dataclass(frozen=True, slots=True, eq=False)
class HostedCall:
    """A payload that is ready in the runtime, in a program of its own.

    Attributes:
        content: The program's file, which the runtime reads.
        run: Runs the program.
        inputs: Which of the values of a call it takes.
        outputs: Which of them it returns.
    """

    content: bytes
    run: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def __call__(self, state: MethodState, arguments: tuple[int, ...]) -> None:
        """Execute the payload.

        Args:
            state: The values of the method.
            arguments: Those that the payload is called with.
        """
        given = [state.get(arguments[position]) for position in self.inputs]
        for position, output in zip(self.outputs, self.run(given, clone_outputs=False), strict=True):
            state.slot(arguments[position]).write(output)


def host(
    method: str,
    payload: Payload,
    plan: Delegation,
    values: Sequence[ValueSpec],
    named: Mapping[str, memoryview],
    data: str | None,
) -> HostedCall:
    """Make a payload ready in ExecuTorch's runtime.

    Args:
        method: The name of its method.
        payload: The payload.
        plan: What the file says of it.
        values: The values that it is called with: inputs, then outputs.
        named: The named data of the file.
        data: The path of its data file.

    Raises:
        NotHosted: It takes or returns something else than tensors.
        Exception: ExecuTorch's own: the backend refuses the payload.
    """
    # What is in doubt is both: an input keeps its value, an output has none that matters.
    inputs = tuple(position for position in range(plan.arguments - min(plan.counts)) if values[position].kind != NULL)
    outputs = tuple(range(plan.arguments - max(plan.counts), plan.arguments))
    program = _Program(method)
    ids = [program.argument(value, position in inputs, position in outputs) for position, value in enumerate(values)]
    program.call(payload, ids)
    checked = payloads.check_payload(payload.backend, payload.content, find_checks)
    if checked is not None:
        names = checked.weights.keys()
        named = {name: content for name, content in named.items() if name in names}
    content = serialize(program.finish(), {name: bytes(view) for name, view in named.items()}, _ALIGNMENT)
    run = open_program(content, data).load_method(method)
    return HostedCall(content, run, inputs, outputs)


class _Program:
    """A program under construction."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._values: list[schema.EValue] = []
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._instructions: list[schema.Instruction] = []
        self._delegates: list[schema.BackendDelegate] = []
        self._payloads: list[bytes] = []
        self._memory = 0

    def argument(self, value: ValueSpec, given: bool, returned: bool) -> int:
        """Add a value that the payload is called with; return its number."""
        if isinstance(value.content, Tensor):
            number = self._tensor(value.content, planned=given and returned)
            self._inputs += [number] * given
        elif value.kind == NULL:
            number = self._add(schema.Null())
        else:
            raise NotHosted(f"it is called with {KINDS[value.kind]}")
        self._outputs += [number] * returned
        return number

    def call(self, payload: Payload, arguments: Sequence[int]) -> None:
        """Add a call of a payload."""
        reference = schema.BackendDelegateDataReference(schema.DataLocation.INLINE, len(self._payloads))
        self._payloads.append(bytes(payload.content))
        self._delegates.append(
            schema.BackendDelegate(
                payload.backend, reference, [CompileSpec(spec.key, spec.value) for spec in payload.specs]
            )
        )
        self._instructions.append(schema.Instruction(schema.DelegateCall(0, list(arguments))))

    def finish(self) -> schema.Program:
        """Return the program."""
        plan = schema.ExecutionPlan(
            name=self._method,
            container_meta_type=schema.ContainerMetadata("", ""),
            values=self._values,
            inputs=self._inputs,
            outputs=self._outputs,
            chains=[schema.Chain(self._inputs, self._outputs, self._instructions, None)],
            operators=[],
            delegates=self._delegates,
            non_const_buffer_sizes=[0, self._memory] if self._memory else [0],
        )
        return schema.Program(
            version=0,
            execution_plan=[plan],
            constant_buffer=[schema.Buffer(b"")],  # the placeholder of number 0
            backend_delegate_data=[schema.BackendDelegateInlineData(payload) for payload in self._payloads],
            segments=[],
            constant_segment=schema.SubsegmentOffsets(0, []),
            named_data=[],
        )

    def _add(self, value: Any) -> int:
        self._values.append(schema.EValue(value))
        return len(self._values) - 1

    def _tensor(self, tensor: Tensor, *, planned: bool) -> int:
        allocation = None
        if planned:
            allocation = schema.AllocationDetails(1, self._memory & 0xFFFFFFFF, self._memory >> 32)
            size = tensor.dtype.itemsize
            for dimension in tensor.sizes:
                size *= dimension
            self._memory += -(-size // _ALIGNMENT) * _ALIGNMENT
        dynamism = schema.TensorShapeDynamism.STATIC
        if tensor.dynamic:
            dynamism = schema.TensorShapeDynamism.DYNAMIC_BOUND
        return self._add(
            schema.Tensor(
                scalar_type=ScalarType(CODES[tensor.dtype]),
                storage_offset=0,
                sizes=list(tensor.sizes),
                dim_order=list(tensor.dim_order),
                requires_grad=False,
                layout=0,
                data_buffer_idx=0,
                allocation_info=allocation,
                shape_dynamism=dynamism,
            )
        )
