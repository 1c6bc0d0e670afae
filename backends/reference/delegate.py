"""The run-time side of the reference backend: executes payloads with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from exir_lowering import BackendFailure, Delegate, DelegateContext, InputError, WeightRef
from exir_lowering.backends.reference import blob, operators, soundness
from exir_lowering.backends.reference.blob import Graph, GraphRef, Instruction, Program, ValueRef
from exir_lowering.backends.reference.soundness import references
from exir_lowering.graphs.operators import budget, calls as checked_calls
from exir_lowering.plugins import let_through

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec

__all__ = ["ReferenceDelegate"]


@dataclass(frozen=True, slots=True, eq=False)
class Executable:
    """A payload that is ready for execution, with its state."""

    program: Program
    graphs: list[_Graph]
    tensors: list[torch.Tensor]
    states: list[torch.Tensor]  # each starting from its initial value
    spending: budget.Budget  # the limits of an execution


class ReferenceDelegate(Delegate):
    """Executes the payloads of `ReferenceBackend`. Payloads share weights in memory too."""

    delegate_id = "reference"

    def __init__(self) -> None:
        self._weights: WeakValueDictionary[WeightRef, torch.Tensor] = WeakValueDictionary()

    def compile(self, processed: bytes, compile_specs: list[CompileSpec], context: DelegateContext) -> Executable:
        """Read a payload, its weights and the initial values of its states.

        Raises:
            InputError: The payload is invalid, or an operator or named data is missing.
        """
        program = blob.parse(processed)
        soundness.check(program)
        try:
            states = [program.tensors[number].load(context.named_data) for number in program.states]
            owned = set(program.states)
            tensors = [
                states[program.states.index(number)] if number in owned else self._weight(ref, context)
                for number, ref in enumerate(program.tensors)
            ]
            graphs: list[_Graph] = []
            spending = budget.Budget()
            first = 0
            for graph in program.graphs:
                graphs.append(_Graph(graph, graphs, tensors, context, first, spending))
                first += len(graph.code)
            return Executable(program, graphs, tensors, states, spending)
        except InputError:  # already has a message
            raise
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            let_through(error)
            raise InputError(
                f"A reference payload of method {context.method!r} is inconsistent: {type(error).__name__}: {error}. "
                "Lower the model again."
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

        Raises:
            InputError: The number of inputs is wrong.
            BackendFailure: An operator failed; the message says which, with its debug handle.
        """
        given = iter(inputs)
        wanted = sum(kind[0] == "user" for kind in handle.program.inputs)
        if len(inputs) != wanted:
            raise InputError(f"A reference payload takes {wanted} inputs, got {len(inputs)}.")
        arguments = [
            next(given) if kind == "user" else (handle.tensors if kind == "tensor" else handle.states)[number[0]]
            for kind, *number in handle.program.inputs
        ]
        handle.spending.start()
        with torch.no_grad():
            results = handle.graphs[0](*arguments)
            return _return(handle, results)


def _return(handle: Executable, results: Sequence[Any]) -> list[Any]:
    """Write the states, and return the other results; those that share memory with a state are copied first."""
    kinds = handle.program.outputs
    if all(kind == "user" for kind, *_ in kinds):
        return list(results)
    written = {_address(handle.states[number[0]]) for kind, *number in kinds if kind == "state"}
    values = [
        value.clone() if isinstance(value, torch.Tensor) and _address(value) in written else value for value in results
    ]
    for value, (kind, *number) in zip(values, kinds, strict=True):
        if kind == "state":
            handle.states[number[0]].copy_(value)
    return [value for value, (kind, *_) in zip(values, kinds, strict=True) if kind == "user"]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a weight's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Graph:
    """A graph that is ready for calls."""

    def __init__(
        self,
        graph: Graph,
        graphs: list[_Graph],
        tensors: list[torch.Tensor],
        context: DelegateContext,
        first: int,
        spending: budget.Budget,
    ) -> None:
        """Prepare a graph; the graphs before it have `first` instructions."""
        self._context, self._events, self._spending = context, blob.events(graph, first), spending
        self._inputs = graph.inputs
        self._constants = [tensors[number] for number in graph.constants]
        self._results = graph.results
        self._code = graph.code
        first = graph.inputs + len(graph.constants)
        last_use = _last_uses(graph, first)
        self._steps = [
            _Step(
                operators.resolve(instruction.operator),
                _bind(instruction.args, graphs, spending),
                _bind(instruction.kwargs, graphs, spending),
                tuple(value for value in last_use.get(number, ()) if value >= first),
            )
            for number, instruction in enumerate(graph.code)
        ]

    def __call__(self, *arguments: Any) -> Any:
        if len(arguments) != self._inputs:
            raise InputError(f"A graph of a reference payload takes {self._inputs} values, got {len(arguments)}.")
        values: list[Any] = [*arguments, *self._constants]
        for step, instruction, event in zip(self._steps, self._code, self._events, strict=True):
            args, kwargs = _fill(step.args, values), _fill(step.kwargs, values)
            try:
                self._spending.step()
                if isinstance(step.function, checked_calls.CheckedCall):
                    self._spending.take(step.function.needs(args, kwargs))
                with self._context.event(event):
                    values.append(step.function(*args, **kwargs))
            except BackendFailure:  # from a nested graph: it already names the innermost operator
                raise
            except Exception as error:
                let_through(error)
                raise _failure(instruction, args, error) from error
            for value in step.dead:
                values[value] = None
        return _fill(self._results, values)


@dataclass(frozen=True, slots=True)
class _Step:
    """An instruction with its operator; `dead` lists the values that nothing reads after it."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    dead: tuple[int, ...]


def _last_uses(graph: Graph, first: int) -> dict[int, list[int]]:
    """Return, for each instruction, the values that no later one reads."""
    last = {first + number: number for number in range(len(graph.code))}  # a result that is never read is dead at once
    for number, instruction in enumerate(graph.code):
        last.update(dict.fromkeys(_values((instruction.args, instruction.kwargs)), number))
    for value in _values(graph.results):
        last.pop(value, None)
    dying: dict[int, list[int]] = {}
    for value, number in last.items():
        dying.setdefault(number, []).append(value)
    return dying


def _values(argument: Any) -> list[int]:
    return [reference.index for reference in references(argument) if isinstance(reference, ValueRef)]


def _bind(argument: Any, graphs: list[_Graph], spending: budget.Budget) -> Any:
    """Replace the graphs in an argument by functions; they are looked up when they are called."""
    if isinstance(argument, GraphRef):
        return partial(_call, graphs, argument.index, spending)
    if isinstance(argument, dict):
        return {key: _bind(item, graphs, spending) for key, item in argument.items()}
    return [_bind(item, graphs, spending) for item in argument] if isinstance(argument, (list, tuple)) else argument


def _call(graphs: list[_Graph], index: int, spending: budget.Budget, *arguments: Any) -> Any:
    """Call a graph, and count its results at full size: the caller may stack them, even if they are views."""
    spending.step()
    results = graphs[index](*arguments)
    spending.take(checked_calls.size_of(results))
    return results


def _fill(argument: Any, values: list[Any]) -> Any:
    if isinstance(argument, ValueRef):
        return values[argument.index]
    if isinstance(argument, list):
        return [_fill(item, values) for item in argument]
    if isinstance(argument, dict):
        return {key: _fill(item, values) for key, item in argument.items()}
    return argument


def _failure(instruction: Instruction, args: Any, error: Exception) -> BackendFailure:
    shown = ", ".join(
        f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}" if isinstance(a, torch.Tensor) else repr(a)
        for a in args
        if not callable(a)
    )
    return BackendFailure(
        f"Delegate 'reference': {instruction.operator}({shown[:400]}), debug handle {instruction.handle}, failed: "
        f"{type(error).__name__}: {error}",
        debug_handle=instruction.handle,
    )
