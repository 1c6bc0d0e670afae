"""How a file's content is made of a model's weights: a named datum that nothing reads when the file runs.

Each place of the file has recipes, one for each weight that it was once made of. A recipe is a list of calls of
operators of the closed list, whose operands are views of memory: of weights, of what is in the recipe, of results.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final

import torch

from exir_lowering.graphs.operators import pure
from exir_lowering.graphs.operators.budget import check_memory, extent_of
from exir_lowering.graphs.operators.calls import CheckedCall
from exir_lowering.graphs.ranges.analysis import REPLACED_BOUND
from exir_lowering.graphs.serialized.plain import PlainReader, PlainWriter
from exir_lowering.pte.flatbuffer import CorruptError

KEY: Final = "exir_lowering.refit"
"""The key among a `.pte` file's named data: a part of the file format."""

RESERVED: Final = b"exir_lowering: reserved for refit"
"""What is emitted in its place."""

_VERSION = 1
_SAME_SIZE = frozenset({"aten._to_copy.default", "aten.clone.default", "aten.zeros_like.default"})


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the model's state_dict."""

    dtype: str
    shape: tuple[int, ...]
    tied: str = ""  # another name of the same tensor
    bounded: bool = False  # whether the lowering relied on `is_bounded`
    digest: str = ""  # of its content, if that has to stay what it is
    reason: str = ""  # why it has to


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a view of memory."""

    memory: int  # its number: first those of the sources, then those of the results
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the bytes of a piece are made; they are those of the last memory."""

    sources: tuple[tuple[Any, ...], ...]  # a name and strides; or None and content in base64
    calls: tuple[tuple[str, Any, Any, int], ...] = ()  # operator, arguments as JSON, and which result is the memory

    @property
    def names(self) -> list[str]:
        """The weights that it takes."""
        return [name for name, _ in self.sources if name is not None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where content is: constant or named data number so many, initial state, or named data of a data file."""

    kind: str  # "constant", "initial", "named", or the name of a data file
    number: int
    size: int  # in bytes
    prefix: str | None = None  # what comes before the SHA-256 of the content in its key; None for another key
    recipes: tuple[Recipe, ...] = ()  # none for what no weight is in

    @property
    def names(self) -> list[str]:
        """The weights that its recipes take."""
        return [name for one in self.recipes for name in one.names]


@dataclass(frozen=True, slots=True)
class Recipes:
    """What is known of a file's content."""

    weights: Mapping[str, Weight]
    places: tuple[Place, ...]

    def encode(self) -> bytes:
        """Return it as a file keeps it."""
        weights = {name: list(asdict(weight).values()) for name, weight in self.weights.items()}
        places = [
            [place.kind, place.number, place.size, place.prefix, [[one.sources, one.calls] for one in place.recipes]]
            for place in self.places
        ]
        tree = {"version": _VERSION, "weights": weights, "places": places}
        return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def decode(content: memoryview) -> Recipes:
    """Read recipes; raise a CorruptError when they are damaged, or of another version."""
    try:
        tree = json.loads(str(content, "utf-8"))
        if tree["version"] != _VERSION:
            raise ValueError(f"version {tree['version']!r}, expected {_VERSION}")
        weights = {name: Weight(fields[0], tuple(fields[1]), *fields[2:]) for name, fields in tree["weights"].items()}
        places = tuple(
            Place(kind, number, size, prefix, tuple(Recipe(*(tuple(map(tuple, part)) for part in one)) for one in recipes))
            for kind, number, size, prefix, recipes in tree["places"]
        )
        if any(type(number) is not int or number < 0 for place in places for number in (place.number, place.size)):
            raise ValueError("a place has no number or size")
        if not all(name in weights for place in places for one in place.recipes for name in one.names):
            raise ValueError("a recipe takes what is not a weight")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CorruptError(f"its recipes are damaged: {type(error).__name__}: {error}") from None
    return Recipes(weights, places)


def is_bounded(tensor: torch.Tensor) -> bool:
    """Return whether no element of a floating-point tensor is so large that lowering may not rely on its size."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor.detach())
    if bool(low.isnan()):
        low, high = torch.aminmax(torch.nan_to_num(tensor.detach(), 0.0, math.inf, -math.inf))
    return max(-float(low), float(high)) <= REPLACED_BOUND


class _Writer(PlainWriter):
    def __init__(self) -> None:
        super().__init__()
        self.writers[View] = lambda view, depth: {
            "view": [view.memory, self.write(view.dtype)["dtype"], *map(list, (view.shape, view.strides)), view.offset]
        }


class _Reader(PlainReader):
    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.readers["view"] = lambda content, depth: self._view(*content)
        self._memories = memories

    def _view(self, memory: int, dtype: str, shape: list[int], strides: list[int], offset: int) -> torch.Tensor:
        kind, of = self.dtypes[dtype], self._memories[memory]
        whole = of.untyped_storage().nbytes()
        if min([0, offset, *shape, *strides]) or (offset + extent_of(shape, strides)) * kind.itemsize > whole:
            raise ValueError("a view is outside of its memory")
        if math.prod(shape) * kind.itemsize > whole:
            raise ValueError("a view has more elements than its memory")
        return torch.empty(0, dtype=kind).set_(of.untyped_storage(), offset, shape, strides)


def write_call(operator: str, args: Any, kwargs: Any, result: int) -> tuple[str, Any, Any, int]:
    """Return a call for a recipe; NotSerialisableError, or a ValueError, if it cannot be in one."""
    _find(operator)
    writer = _Writer()
    return operator, writer.write(list(args)), writer.write(dict(kwargs)), result


@lru_cache(maxsize=256)
def _find(operator: str) -> CheckedCall:
    found = pure.find(operator)
    if found is None:
        raise ValueError(pure.why_not(operator))
    return CheckedCall(operator.split(".")[1], found)


def write_content(tensor: torch.Tensor) -> tuple[None, str]:
    """Return a source that is in a recipe itself."""
    return None, base64.b64encode(raw(tensor)).decode()


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor."""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return memory.numpy().data


def lay_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a tensor in memory of its own, with strides."""
    whole = extent_of(tensor.shape, strides) * tensor.element_size()
    if tensor.stride() == tuple(strides) and tensor.untyped_storage().nbytes() == whole:
        return tensor
    check_memory(whole)
    return torch.empty_strided(tuple(tensor.shape), tuple(strides), dtype=tensor.dtype).copy_(tensor)


def replay(recipe: Recipe, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a tensor whose memory is the piece that a recipe makes; raise a CorruptError for a damaged one."""
    memories: list[torch.Tensor] = []
    try:
        for name, content in recipe.sources:
            if name is None:
                memories.append(torch.frombuffer(bytearray(base64.b64decode(content)), dtype=torch.uint8))
            else:
                memories.append(lay_out(weights[name], content))
        reader = _Reader(memories)
        for operator, args, kwargs, result in recipe.calls:
            call, given, named = _find(operator), reader.read(args), reader.read(kwargs)
            if operator not in _SAME_SIZE:
                check_memory(call.needs(given, named))
            made = call(*given, **named)
            memories.append(made if isinstance(made, torch.Tensor) else made[result])
        return memories[-1]
    except (ValueError, TypeError, LookupError, RuntimeError, RecursionError) as error:
        raise CorruptError(f"a recipe is damaged: {type(error).__name__}: {error}") from None
