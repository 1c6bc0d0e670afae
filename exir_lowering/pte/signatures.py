"""What a method takes, returns and keeps, computed from the tables of its file.

The file numbers the values of a method as ExecuTorch makes them, those that the method is given first: weights and
state, then its inputs. So a tensor with planned memory that is numbered before an input and is none is state; where
there are no inputs, what the file names.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import torch

from exir_lowering.pte.code import Code
from exir_lowering.pte.printing import printable
from exir_lowering.pte.provenance import MethodProvenance, NamedValue
from exir_lowering.pte.value_kinds import BOOL, DOUBLE, INT, KINDS, Allocation, Tensor, short_name

_PLAIN = (BOOL, DOUBLE, INT)


@dataclass(frozen=True, slots=True, repr=False)
class TensorInfo:
    """An input or an output of a method: a tensor, or a plain value.

    Attributes:
        name: What the model calls it, if the file says so; else "input 0" or "output 0".
        kind: "tensor", "int", "bool", "float", "None", and so on; "number" for one that is computed.
        dtype: The type of a tensor's elements; None for other values.
        shape: A tensor's sizes, each the greatest if it is dynamic; None for other values.
        dim_order: A tensor's dimensions from outer to inner, as they lie in memory.
        dynamic: Whether the tensor may be smaller than `shape`. The file does not say in which dimensions.
        unbound: Whether its sizes may be anything, so that `shape` only says how many there are.
        least: The least sizes, if the file's provenance says them.
        value: What an input that is not a tensor has to be, and an output that is not computed is.
        possible: Whether it can be given: not an input that was an integer of any value when the model was exported.
        of: For an output, the input or state that it is the new value of, by name; "" for others.
        greatest: The greatest sizes where they are bounded together: `shape` is one of the largest, and has as many
            elements as there may be.
    """

    name: str
    kind: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    dim_order: tuple[int, ...] = ()
    dynamic: bool = False
    unbound: bool = False
    least: tuple[int, ...] | None = None
    value: object = None
    possible: bool = True
    of: str = ""
    greatest: tuple[int, ...] = ()

    def __repr__(self) -> str:
        after = f", the new value of {self.of}" if self.of else ""
        return f"{printable(self.name)}: {self._type()}{printable(after)}"

    def _type(self) -> str:
        if self.shape is None or self.dtype is None:
            value = f" {self.value!r}" if self.value is not None else ""
            return f"{self.kind}{value}{'' if self.possible else ' (an int of any value, which a file cannot take)'}"
        least = self.least or (None,) * len(self.shape)
        sizes = (self._size(low, high) for low, high in zip(least, self.greatest or self.shape, strict=True))
        most = f" of at most {math.prod(self.shape):,} elements" if self.greatest else ""
        return f"{short_name(self.dtype)}[{', '.join(sizes)}]{_order(self.dim_order)}{most}"

    def _size(self, least: int | None, greatest: int) -> str:
        if self.unbound:
            return "?" if least is None else f">={least}"
        if not self.dynamic or least == greatest:
            return str(greatest)
        return f"<={greatest}" if least is None else f"{least}..{greatest}"


@dataclass(frozen=True, slots=True, repr=False)
class StateInfo:
    """A tensor that a method keeps for later calls.

    Attributes:
        name: What the model calls it, if the file says so; else "state 0".
        dtype: The type of its elements.
        shape: Its sizes.
        dim_order: Its dimensions from outer to inner in memory.
        bytes: Its size in bytes.
        initial: "file" if the file has its first value, else "zeros".
        shared_with: The other methods that share it: each reads what the others write.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    bytes: int
    initial: Literal["file", "zeros"]
    shared_with: tuple[str, ...] = ()

    def __repr__(self) -> str:
        shared = f", shared with {', '.join(self.shared_with)}" if self.shared_with else ""
        start = "starts with values of the file" if self.initial == "file" else "starts with zeros"
        shape = ", ".join(map(str, self.shape))
        layout = f"{short_name(self.dtype)}[{shape}]{_order(self.dim_order)}"
        return f"{printable(self.name)}: {layout}, {start}{printable(shared)}"


@dataclass(frozen=True, slots=True, repr=False)
class MethodSignature:
    """What a method takes, returns, keeps and needs.

    Attributes:
        name: Its name.
        inputs: What it takes, in order.
        outputs: What it returns, in order.
        state: What it keeps on the host for later calls; state that a backend keeps is not listed.
        backends: The backends that it needs, sorted.
    """

    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    state: tuple[StateInfo, ...] = ()
    backends: tuple[str, ...] = ()

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(map(repr, values)) for values in (self.inputs, self.outputs))
        state = f", state ({'; '.join(map(repr, self.state))})" if self.state else ""
        backends = f", on {', '.join(map(printable, self.backends))}" if self.backends else ""
        return f"{printable(self.name)}({inputs}) -> ({outputs}){state}{backends}"

    def __str__(self) -> str:
        lines = [printable(self.name)]
        lines += [f"  takes {value!r}" for value in self.inputs]
        lines += [f"  returns {value!r}" for value in self.outputs]
        lines += [f"  keeps {value!r}" for value in self.state]
        lines += [f"  needs {printable(backend)}" for backend in self.backends]
        return "\n".join(lines)


def find_state(code: Code, known: MethodProvenance) -> dict[int, Allocation]:
    """Return the values of a method that are state, and where they lie."""
    last, found = max(code.inputs, default=-1), {}
    for index, value in enumerate(code.values):
        tensor = value.content
        if not isinstance(tensor, Tensor) or tensor.planned is None or index in code.inputs:
            continue
        if tensor.stored or index < last or index in known.values:
            found[index] = tensor.planned
    return found


def with_greatest(code: Code, known: MethodProvenance) -> Code:
    """Return code whose inputs and outputs have their greatest sizes, if these are bounded together."""
    named = [one.bounds or () for one in (*known.inputs, *known.outputs)]
    places, values = (*code.inputs, *code.outputs), [*code.values]
    if not known.joint or len(places) != len(named):
        return code
    for index, bounds in zip(places, named, strict=True):
        tensor = values[index].content
        if isinstance(tensor, Tensor) and tensor.dynamic and len(bounds) == len(tensor.sizes):
            most = tuple(max(size, bound or 0) for size, (_, bound) in zip(tensor.sizes, bounds, strict=True))
            values[index] = replace(values[index], content=replace(tensor, greatest=most))
    return replace(code, values=tuple(values))


def of_method(
    code: Code, made: Collection[int], lost: frozenset[int], state: Collection[int], known: MethodProvenance
) -> MethodSignature:
    """Return the signature of a method that was checked: `made` is what is computed, `known` what the file says."""
    fits = (len(known.inputs), len(known.outputs)) == (len(code.inputs), len(code.outputs))
    inputs = [known.inputs[place] if fits else NamedValue(f"input {place}") for place in range(len(code.inputs))]
    outputs = [known.outputs[place] if fits else NamedValue(f"output {place}") for place in range(len(code.outputs))]
    kept = []
    for place, index in enumerate(state):
        tensor = code.values[index].content
        if isinstance(tensor, Tensor):
            name = known.values.get(index) or tensor.label or f"state {place}"
            initial: Literal["file", "zeros"] = "file" if tensor.stored else "zeros"
            kept.append(StateInfo(name, tensor.dtype, tensor.sizes, tensor.dim_order, tensor.size, initial))
    written = {index for instruction in code.instructions() for index in code.written(instruction)}
    names = {index: named.name for index, named in zip(code.inputs, inputs, strict=True) if index in written}
    names.update({index: one.name for index, one in zip(state, kept, strict=True)})
    taken = [_value(code, made, index, named) for index, named in zip(code.inputs, inputs, strict=True)]
    returned = ((index, _value(code, made, index, named)) for index, named in zip(code.outputs, outputs, strict=True))
    return MethodSignature(
        code.name,
        tuple(replace(one, possible=place not in lost) for place, one in enumerate(taken)),
        tuple(replace(one, of=names.get(index, "")) for index, one in returned),
        tuple(kept),
        tuple(sorted({payload.backend for payload in code.payloads})),
    )


def _value(code: Code, made: Collection[int], index: int, named: NamedValue) -> TensorInfo:
    value = code.values[index]
    content = value.content
    if isinstance(content, Tensor):
        least = tuple(low for low, _ in named.bounds or ())
        known = named.bounds is not None and content.dynamic and len(least) == len(content.sizes)
        fits = known and (content.unbound or all(map(operator.le, least, content.sizes)))
        return TensorInfo(
            *(named.name, "tensor", content.dtype, content.sizes, content.dim_order, content.dynamic, content.unbound),
            least if fits else None,
            greatest=content.greatest,
        )
    if index in made:
        return TensorInfo(named.name, "number")
    kind = KINDS[value.kind].removeprefix("a ").removeprefix("an ")
    return TensorInfo(named.name, kind, value=content if value.kind in _PLAIN else None)


def _order(dim_order: tuple[int, ...]) -> str:
    if dim_order == tuple(range(len(dim_order))):
        return ""
    return " channels last" if dim_order in ((0, 2, 3, 1), (0, 2, 3, 4, 1)) else f" in the order {list(dim_order)}"
