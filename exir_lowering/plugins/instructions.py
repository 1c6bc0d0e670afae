"""A payload for backends: a numbered list of instructions. To read it, no compiler is imported.

It starts with a header, little-endian: 8 bytes that name it, the version and the CRC-32 of the rest in 4 bytes
each, its length in 8. The rest is JSON: `[inputs, weights, states, code, outputs]`, with the fields below in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from exir_lowering.errors import InputError
from exir_lowering.graphs.serialized.plain import Container, PlainReader
from exir_lowering.graphs.weights import WeightRef


@dataclass(frozen=True, slots=True)
class Instruction:
    """One call of an operator.

    Attributes:
        opcode: The operator's name on the machine.
        arguments: In the order of the operator's schema: `{"value": number}` for what is computed, and immediates, such
            as numbers, texts, None and lists of these, `{"dtype": "float32"}` and `{"float": "inf"}`.
        results: How many values it returns.
        handle: The debug handle of the operator in the model, if it has one.
    """

    opcode: str
    arguments: Sequence[Any]
    results: int = 1
    handle: int | None = None

    def operands(self, values: Sequence[Any]) -> list[Any]:
        """Return the arguments as PyTorch takes them, given all values that were computed before."""
        reader = PlainReader()
        reader.readers["value"] = lambda number, depth: values[_natural(number, len(values))]
        return [reader.read(argument) for argument in self.arguments]


@dataclass(frozen=True, slots=True)
class Instructions:
    """A partition as instructions. Values are numbered: the inputs, the weights, then what instructions return.

    Attributes:
        inputs: How many inputs a call has.
        weights: Where the weights are, and what buffers start with.
        states: For each buffer that a call writes, the number of its value and that of its next one.
        code: The instructions.
        outputs: The numbers of the values that are returned.
    """

    inputs: int
    weights: Sequence[WeightRef]
    states: Sequence[Sequence[int]]
    code: Sequence[Instruction]
    outputs: Sequence[int]

    @property
    def events(self) -> dict[str, Instruction]:
        """The instructions by their names in profiles, such as "ADD #0"."""
        return {f"{one.opcode} #{number}": one for number, one in enumerate(self.code)}

    @property
    def debug_handle_map(self) -> dict[str, tuple[int, ...]]:
        """The debug handles of the events, for `PreprocessResult`."""
        return {event: (one.handle,) for event, one in self.events.items() if one.handle is not None}

    def to_bytes(self, magic: bytes, version: int) -> bytes:
        """Return the payload; it starts with `magic`, at most 8 bytes, and the version of your opcodes."""
        refs, code = [ref.to_json() for ref in self.weights], [astuple(one) for one in self.code]
        return _container(magic, version).pack([self.inputs, refs, self.states, code, self.outputs])

    @classmethod
    def from_bytes(cls, payload: bytes, magic: bytes, version: int) -> Instructions:
        """Return the instructions of a payload; InputError if it is of another backend or version, or damaged."""
        tree = _container(magic, version).unpack(payload)
        try:
            inputs, refs, states, code, outputs = tree
            made = cls(inputs, [*map(WeightRef.from_json, refs)], states, [Instruction(*one) for one in code], outputs)
            held = _natural(inputs, 1 << 16) + len(refs)
            count = held + sum(_natural(one.results, 1 << 16) for one in made.code)
            for buffer, value in states:
                _natural(buffer - inputs, len(refs)), _natural(value, count)
            for output in outputs:
                _natural(output, count)
        except (TypeError, ValueError, LookupError) as error:
            raise InputError(f"A payload of {magic!r} is damaged: {error}. Lower the model again.") from error
        return made


def _natural(number: Any, end: int) -> int:
    """Return a number from 0 up to another one; IndexError for anything else."""
    if type(number) is not int or not 0 <= number < end:
        raise IndexError(f"it has {number!r} where a number below {end} was expected")
    return number


def _container(magic: bytes, version: int) -> Container:
    return Container(magic[:8].ljust(8), version, f"payload of {magic!r}", " Lower the model again.", compressed=False)
