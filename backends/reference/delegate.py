"""The run-time side of the reference backend: executes payloads with torch.

A payload is a container with

    weights, states  references to named data: what is read only, and the initial values of what the delegate keeps
    graphs           each [number of inputs, code, results]; the first one is the program
    outputs          for each result of the program, null if it is returned, or the number of the state that it replaces

and `code` is a list of [operator, arguments, arguments by name, debug handle or -1]. Arguments are plain values, or

    {"%": n}       a value of the graph: the inputs are numbered first, then the result of each instruction
    {"weight": n}  and {"state": n}
    {"graph": n}   for what calls graphs; only graphs after the caller, so that none calls itself

The checksum only detects damage: anyone may have written the payload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from exir_lowering import BackendFailure, Delegate, DelegateContext, InputError, WeightRef
from exir_lowering.graphs.operators import functions, pure as pure_operators
from exir_lowering.graphs.serialized.plain import Container, PlainReader, pick

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec


def _to_dim_order(tensor: torch.Tensor, *, dtype: Any = None, dim_order: Any = None, **rest: Any) -> torch.Tensor:
    """Copy a tensor, to another dtype and dimension order if requested."""
    if dim_order is None:
        return tensor.to(dtype=dtype or tensor.dtype, copy=True)
    return torch.empty_permuted(tensor.shape, dim_order, dtype=dtype or tensor.dtype).copy_(tensor)


def _empty_dim_order(size: Any, *, dtype: Any = None, dim_order: Any = None, **rest: Any) -> torch.Tensor:
    return torch.empty_permuted(size, tuple(dim_order or range(len(size))), dtype=dtype)


EDGE: Mapping[str, Callable[..., Any]] = {
    "dim_order_ops._to_dim_order_copy.default": _to_dim_order,
    "dim_order_ops._clone_dim_order.default": _to_dim_order,
    "dim_order_ops._empty_dim_order.default": _empty_dim_order,
}
"""The operators of Edge dialect that torch does not have."""


def cond(predicate: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: Any = ()) -> Any:
    """Call one of two graphs."""
    return (yes if bool(predicate) else no)(*operands)


def map_rows(body: Callable[..., Any], columns: Any, unchanged: Any = ()) -> Any:
    """Call a graph for each row of some tensors, and stack the results."""
    return scan(body, (), columns, unchanged)


def scan(step: Callable[..., Any], init: Any, columns: Any, unchanged: Any = ()) -> Any:
    """Call a graph for each row of some tensors, carrying values from row to row."""
    carry, rows = list(init), []
    for i in range(len(columns[0])):
        results = step(*carry, *(column[i] for column in columns), *unchanged)
        carry = list(results[: len(carry)])
        rows.append(results[len(carry) :])
    if rows:
        return [*carry, *(torch.stack(list(results)) for results in zip(*rows, strict=True))]
    row = [torch.zeros(column.shape[1:], dtype=column.dtype) for column in columns]
    results = step(*carry, *row, *unchanged)[len(carry) :]
    return [*carry, *(torch.empty((0, *result.shape), dtype=result.dtype) for result in results)]


def while_loop(condition: Callable[..., Any], body: Callable[..., Any], carried: Any, unchanged: Any = ()) -> Any:
    """Call a graph as long as another one returns true."""
    values = list(carried)
    while True:
        go_on = condition(*values, *unchanged)
        if not bool(go_on[0] if isinstance(go_on, (list, tuple)) else go_on):
            return values
        values = list(body(*values, *unchanged))


HIGHER_ORDER: Mapping[str, Callable[..., Any]] = {
    "cond": cond,
    "map_impl": map_rows,
    "scan": scan,
    "while_loop": while_loop,
}
"""Operators that call graphs, by torch's name."""


def resolve(name: str) -> Callable[..., Any]:
    """Find an operator by the name in a payload; InputError if it is not one on the closed list, registered here."""
    own = HIGHER_ORDER.get(name) or EDGE.get(name) or functions.find_function(name)
    if own is not None:
        return own
    found = pure_operators.find(name)
    if found is not None:
        call: Callable[..., Any] = found.call
        return call
    raise InputError(
        f"Operator {pure_operators.why_not(name)}, so a reference payload cannot call it. Lower the model again with "
        f"this version of exir-lowering and of torch ({torch.__version__}): what the backend cannot call stays on the "
        "host."
    )


FORMAT = Container(
    b"EXIRREF\0",
    2,
    "payload of backend 'reference'",
    " Lower the model with this version of exir-lowering, or run it with the version that it was lowered with.",
)


@dataclass(frozen=True, slots=True)
class Value:
    """A computed argument: the number of a value of the graph."""

    index: int


def list_events(graphs: Sequence[Any]) -> Iterator[list[str]]:
    """Yield the identifiers of the profile events of each graph in a payload; debug handles may occur twice."""
    count = 0
    for _, code, _ in graphs:
        yield [f"{operator} #{number}" for number, (operator, *_) in enumerate(code, count)]
        count += len(code)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A graph that is ready for calls."""

    inputs: int
    code: list[tuple[Any, ...]]  # name, event, debug handle or -1, function, args, kwargs, values that are dead then
    results: Any
    context: DelegateContext

    def __call__(self, *arguments: Any) -> Any:
        """Execute its code; BackendFailure if an operator fails, with its debug handle."""
        if len(arguments) != self.inputs:
            raise InputError(f"A graph of a reference payload takes {self.inputs} values, got {len(arguments)}.")
        values: list[Any] = list(arguments)
        for name, event, handle, function, read, named, dead in self.code:
            args, kwargs = _fill(read, values), _fill(named, values)
            try:
                with self.context.event(event):
                    values.append(function(*args, **kwargs))
            except (BackendFailure, MemoryError):  # from a nested graph: it already names the innermost operator
                raise
            except Exception as error:
                shown = ", ".join(
                    f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}" if isinstance(a, torch.Tensor) else repr(a)
                    for a in args
                    if not callable(a)
                )
                raise BackendFailure(
                    f"Delegate 'reference': {name}({shown:.400}), debug handle {handle}, failed: "
                    f"{type(error).__name__}: {error}",
                    debug_handle=handle,
                ) from error
            for value in dead:
                values[value] = None
        return _fill(self.results, values)


def _fill(argument: Any, values: list[Any]) -> Any:
    kind = type(argument)
    if kind is Value:
        return values[argument.index]
    if kind is list or kind is tuple:
        return kind([_fill(item, values) for item in argument])
    if kind is dict:
        return {key: _fill(item, values) for key, item in argument.items()}
    return argument


def read_graphs(
    trees: Sequence[Any], weights: Sequence[torch.Tensor], states: Sequence[torch.Tensor], context: DelegateContext
) -> Graph:
    """Return the first graph of a payload; ValueError, LookupError or TypeError for what the backend does not write."""
    reader, graphs, events = PlainReader(), dict[int, Graph](), list(list_events(trees))
    number = step = known = 0  # the graph, its instruction, and how many values it has so far
    calls = False  # whether the instruction calls graphs
    last: dict[int, int] = {}  # for each value, the number of the last instruction that reads it

    def read_value(index: Any, depth: int) -> Value:
        made = Value(pick(range(known), index))
        last[index] = step
        return made

    def read_callee(index: Any, depth: int) -> Graph:
        if not calls:
            raise ValueError("a graph where none is called")
        if type(index) is int and index <= number:
            raise ValueError(f"its graphs call each other in a cycle: {number} calls {index}")
        return graphs[index]

    reader.readers |= {
        "%": read_value,
        "weight": lambda content, depth: pick(weights, content),
        "state": lambda content, depth: pick(states, content),
        "graph": read_callee,
    }
    for number in reversed(range(len(trees))):
        inputs, tree, returned = trees[number]
        if type(inputs) is not int or not 0 <= inputs < 1 << 20:
            raise ValueError(f"a graph of {str(inputs)[:20]} inputs")
        known, last, code = inputs, {}, []
        for step, (name, args, kwargs, handle) in enumerate(tree):
            if type(name) is not str or type(handle) is not int or type(kwargs) is not dict:
                raise ValueError(f"the instruction {str(name)[:80]!r} with the options {str(kwargs)[:80]}")
            if kwargs.get("pin_memory"):
                raise ValueError(f"{name} makes pinned memory, which only other devices need")
            calls = name in HIGHER_ORDER
            given = reader.many(args, 0), {key: reader.read(value) for key, value in kwargs.items()}
            code.append((name, events[number][step], handle, resolve(name), *given))
            last[known] = step  # a result that is never read is dead at once
            known += 1
        step, calls = len(code), False
        results = reader.read(returned)
        dead: list[list[int]] = [[] for _ in range(len(code) + 1)]
        for value, at in last.items():
            dead[at].append(value)
        instructions = [(*one, tuple(dying)) for one, dying in zip(code, dead, strict=False)]
        graphs[number] = Graph(inputs, instructions, results, context)
    reader.readers.clear()  # they refer to the reader: weights would stay until a collection
    return graphs[0]


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
            program = read_graphs(tree["graphs"], weights, states, context)
            outputs = [None if state is None else pick(range(len(states)), state) for state in tree["outputs"]]
            if not isinstance(program.results, (list, tuple)) or len(program.results) != len(outputs):
                raise ValueError(f"it has {len(outputs)} outputs, and other results")
            return Executable(program, weights, states, outputs)
        except (InputError, MemoryError):  # already has a message
            raise
        except Exception as error:
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
        """Run a payload; writes to its states take effect at the end, unless an operator fails (BackendFailure)."""
        program, outputs = handle.program, handle.outputs
        if len(inputs) != program.inputs:
            raise InputError(f"A reference payload takes {program.inputs} inputs, got {len(inputs)}.")
        with torch.no_grad():
            results = list(program(*inputs))
            written = {_address(handle.states[state]) for state in outputs if state is not None}
            for place, value in enumerate(results if written else ()):
                if isinstance(value, torch.Tensor) and _address(value) in written:
                    results[place] = value.clone()  # all states are read before one is written
            for value, state in zip(results, outputs, strict=True):
                if state is not None:
                    handle.states[state].copy_(value)
            return [value for value, state in zip(results, outputs, strict=True) if state is None]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a weight's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
