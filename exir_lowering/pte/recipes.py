"""How a file's content is made of a model's weights: a named datum that nothing reads when the file runs.

Each place has recipes, one for each weight or computation that had its content. A recipe is calls of operators of the
closed list, whose operands are views of memory: of weights, of what the recipe has itself, and of earlier results.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
import xxhash

from exir_lowering.graphs.operators import pure
from exir_lowering.graphs.operators.budget import check_memory, extent_of
from exir_lowering.graphs.operators.calls import CheckedCall
from exir_lowering.graphs.ranges.analysis import REPLACED_BOUND
from exir_lowering.graphs.serialized.plain import PlainReader
from exir_lowering.pte.flatbuffer import CorruptError

KEY: Final = "exir_lowering.refit"
"""The key among a `.pte` file's named data: a part of the file format."""

RESERVED: Final = b"exir_lowering: reserved for refit"
"""What is emitted in its place."""

_VERSION = 1
_SAME_SIZE = frozenset({"aten._to_copy.default", "aten.clone.default", "aten.zeros_like.default"})
_PACKING = "aten.__lshift__.Scalar"  # of two numbers into a byte


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the model's state_dict."""

    dtype: str
    shape: tuple[int, ...]
    tied: str = ""  # another name of the same tensor
    digest: str = ""  # of its content, if that has to stay
    reason: str = ""  # why it has to


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the bytes of a piece are made; they are those of the last memory."""

    sources: tuple[tuple[Any, Any], ...]  # a name and strides; or None and content in base64
    calls: tuple[tuple[Any, ...], ...] = ()  # operator, arguments as JSON, and which result is the next memory

    @property
    def names(self) -> list[str]:
        """The weights that it takes."""
        return [name for name, _ in self.sources if name is not None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where content is: the constant, initial state or named data of a number."""

    kind: str  # "constant", "initial", "named", or the name of a data file, which has named data
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
    places: Sequence[Place]

    def encode(self) -> bytes:
        """Return it as a file keeps it."""
        return json.dumps({"version": _VERSION, **asdict(self)}, sort_keys=True, separators=(",", ":")).encode()


def decode(content: memoryview) -> Recipes:
    """Read recipes; raise a CorruptError when they are damaged, or of another version."""
    try:
        tree = json.loads(str(content, "utf-8"))
        if tree["version"] != _VERSION:
            raise ValueError(f"version {tree['version']!r}, expected {_VERSION}")
        weights = {name: Weight(**{**one, "shape": tuple(one["shape"])}) for name, one in tree["weights"].items()}
        for place in tree["places"]:
            made = (
                Recipe(tuple(map(tuple, one["sources"])), tuple(map(tuple, one["calls"]))) for one in place["recipes"]
            )
            place["recipes"] = tuple(made)
        places = [Place(**place) for place in tree["places"]]
        if any(type(number) is not int or number < 0 for place in places for number in (place.number, place.size)):
            raise ValueError("a place has no number or size")
        if not weights.keys() >= {name for place in places for name in place.names}:
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


def digest(value: torch.Tensor) -> str:
    """Return the digest of a tensor's elements."""
    return str(xxhash.xxh3_128_hexdigest(raw(value.detach().contiguous().reshape(-1).view(torch.uint8).clone())))


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().data


def find(operator: str) -> CheckedCall:
    """Return an operator of the closed list; ValueError if it is not on it."""
    found = pure.find(operator)
    if found is None:
        raise ValueError(pure.why_not(operator))
    return CheckedCall(operator.split(".")[1], found)


class _Reader(PlainReader):
    """Reads arguments with views of memory."""

    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.readers["view"] = lambda content, depth: self._view(*content)
        self._memories = memories

    def _view(self, memory: int, dtype: str, shape: list[int], strides: list[int], offset: int) -> torch.Tensor:
        kind, storage = self.dtypes[dtype], self._memories[memory].untyped_storage()
        needed = max(offset + extent_of(shape, strides), math.prod(shape)) * kind.itemsize
        if min([0, offset, *shape, *strides]) or needed > storage.nbytes():
            raise ValueError("a view is outside of its memory")
        return torch.empty(0, dtype=kind).set_(storage, offset, shape, strides)


def replay(recipe: Recipe, weights: Mapping[str, torch.Tensor]) -> memoryview:
    """Return the bytes that a recipe makes; raise a CorruptError for a damaged one, or for values it is not for."""
    memories: list[torch.Tensor] = []
    reader = _Reader(memories)
    try:
        for name, content in recipe.sources:
            plain = None if name is None else _lay_out(weights[name], content)
            memories.append(
                torch.tensor(list(base64.b64decode(content)), dtype=torch.uint8) if plain is None else plain
            )
        for operator, args, kwargs, result in recipe.calls:
            call, given, named = find(operator), reader.read(args), reader.read(kwargs)
            if operator not in _SAME_SIZE:
                check_memory(call.needs(given, named))
            if operator == _PACKING and max(raw(given[0]), default=0) > 15:
                raise ValueError("a number is outside of -8 to 7, which four bits hold")
            made = call(*given, **named)
            memories.append(made if isinstance(made, torch.Tensor) else made[result])
        return raw(memories[-1])
    except (ValueError, TypeError, LookupError, RuntimeError, RecursionError) as error:
        raise CorruptError(f"a recipe does not work: {error}") from None


def _lay_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a tensor in memory of its own, with strides."""
    whole = extent_of(tensor.shape, strides) * tensor.element_size()
    if tensor.stride() == tuple(strides) and tensor.untyped_storage().nbytes() == whole:
        return tensor
    check_memory(whole)
    return torch.empty_strided(tuple(tensor.shape), tuple(strides), dtype=tensor.dtype).copy_(tensor)
