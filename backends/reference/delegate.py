"""The run-time side of the reference backend: executes payloads with torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from exir_lowering import Delegate, DelegateContext, InputError, WeightRef
from exir_lowering.backends.reference.payload import FORMAT, Graph, Reader
from exir_lowering.graphs.serialized.plain import pick
from exir_lowering.plugins import let_through

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec


@dataclass(frozen=True, slots=True, eq=False)
class Executable:
    """A payload that is ready for execution, with its state."""

    program: Graph
    weights: list[torch.Tensor]
    states: list[torch.Tensor]  # each starting from its initial value
    outputs: list[int | None]  # for each result, the number of the state that it replaces; None if it is returned


class ReferenceDelegate(Delegate):
    """Executes the payloads of `ReferenceBackend`. Payloads share weights in memory too."""

    delegate_id = "reference"

    def __init__(self) -> None:
        self._weights: WeakValueDictionary[WeightRef, torch.Tensor] = WeakValueDictionary()

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> Executable:
        """Read a payload, its weights and states; InputError if it is invalid, or an operator or data is missing."""
        tree = FORMAT.unpack(processed)
        try:
            weights = [self._weight(WeightRef.from_json(fields), context) for fields in tree["weights"]]
            states = [WeightRef.from_json(fields).load(context.named_data) for fields in tree["states"]]
            program = Reader(weights, states, context).read_graphs(tree["graphs"])
            outputs = [None if state is None else pick(range(len(states)), state) for state in tree["outputs"]]
            if not isinstance(program.results, (list, tuple)) or len(program.results) != len(outputs):
                raise ValueError(f"it has {len(outputs)} outputs, and other results")
            return Executable(program, weights, states, outputs)
        except InputError:  # already has a message
            raise
        except Exception as error:
            let_through(error)
            raise InputError(
                f"A payload of backend 'reference' of method {context.method!r} cannot be read: "
                f"{type(error).__name__}: {str(error)[:500]}. Its checksum is right, so it was not written by this "
                "version of the backend. Lower the model again."
            ) from error

    def _weight(self, ref: WeightRef, context: DelegateContext) -> torch.Tensor:
        """Load a weight, or reuse a loaded one; the bytes are compared, since a file can choose its keys freely."""
        tensor = ref.load(context.named_data)
        known = self._weights.get(ref)
        if known is not None and torch.equal(_bytes(known), _bytes(tensor)):
            return known
        if ref.key and known is None:
            self._weights[ref] = tensor
        return tensor

    def execute(self, handle: Executable, inputs: list[Any]) -> Sequence[Any]:
        """Run a payload; writes to its states take effect at the end.

        InputError: The number of inputs is wrong. BackendFailure: An operator failed, with its debug handle.
        """
        program = handle.program
        if len(inputs) != program.inputs:
            raise InputError(f"A reference payload takes {program.inputs} inputs, got {len(inputs)}.")
        program.spending.start()
        with torch.no_grad():
            return _return(handle, program.run(*inputs))


def _return(handle: Executable, results: Sequence[Any]) -> list[Any]:
    """Write the states, and return the other results; those that share memory with a state are copied first."""
    written = {_address(handle.states[state]) for state in handle.outputs if state is not None}
    if not written:
        return list(results)
    values = [
        value.clone() if isinstance(value, torch.Tensor) and _address(value) in written else value for value in results
    ]
    for value, state in zip(values, handle.outputs, strict=True):
        if state is not None:
            handle.states[state].copy_(value)
    return [value for value, state in zip(values, handle.outputs, strict=True) if state is None]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a weight's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
