"""How a file's content is made of a model's weights: a named datum that nothing reads when the file runs.

Each place has recipes, one for each weight or computation that had its content. A recipe is calls of operators of the
closed list, which only move elements or compute with each; their operands are views of memory by number: first the
sources, then what each call returned.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
import xxhash

from exir_lowering.graphs.operators import pure
from exir_lowering.graphs.operators.budget import extent_of
from exir_lowering.graphs.operators.calls import CheckedCall
from exir_lowering.graphs.ranges.analysis import REPLACED_BOUND
from exir_lowering.graphs.serialized.plain import PlainReader
from exir_lowering.pte.flatbuffer import CorruptError

KEY: Final = "exir_lowering.refit"
"""The key among a `.pte` file's named data: a part of the file format."""

RESERVED: Final = b"exir_lowering: reserved for refit"
"""What is emitted in its place."""

DIGEST: Final = 64
"""The characters at the end of a key that `digest_for` makes."""

_VERSION = 2
_MOST = 1 << 24  # bytes of recipes
_GROWTH, _SLACK = 16, 1 << 12  # a step takes so many times the bytes of the result, and these more
_MOVING = frozenset({"_to_copy", "clone", "zeros_like", "full_like", "constant_pad_nd", "cat", "flip"})
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
    """How content is made: it is the last memory. Without sources, it stays what it is."""

    sources: tuple[tuple[Any, Any], ...] = ()  # a name and strides; or None and content in base64
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
    recipes: tuple[Recipe, ...]
    prefix: str | None = None  # what comes before `digest_for` in its key; None for another key

    @property
    def names(self) -> list[str]:
        """The weights that its recipes take."""
        return [name for one in self.recipes for name in one.names]


def origin_of(recipes: Sequence[Recipe]) -> str:
    """Return what content is made of, without its values: a weight's name, or all that is done to weights.

    Only content of one origin is stored once: all other content that is equal may differ with other values.
    """
    first = recipes[0]
    plain = len(recipes) == len(first.sources) == 1 and not first.calls
    return str(first.sources[0][0]) if plain else json.dumps([[one.sources, one.calls] for one in recipes])


def digest_for(origin: str, content: bytes | memoryview) -> str:
    """Return the end of a key: of the content too, as the runtime may share what it makes of it between files."""
    made = hashlib.sha256(origin.encode())
    made.update(content)
    return made.hexdigest()


@dataclass(frozen=True, slots=True)
class Recipes:
    """What is known of a file's content."""

    weights: Mapping[str, Weight]
    places: Sequence[Place]

    def encode(self) -> bytes:
        """Return it as a file keeps it."""
        return json.dumps({"version": _VERSION, **asdict(self)}, sort_keys=True, separators=(",", ":")).encode()


def decode(content: memoryview, size: int) -> Recipes:
    """Read the recipes of files of so many bytes; a CorruptError, or what Python raises, if they are damaged."""
    if len(content) > _MOST:
        raise CorruptError(f"its recipes have more than {_MOST:,} bytes")
    tree = json.loads(str(content, "utf-8"))
    if tree["version"] != _VERSION:
        raise CorruptError(f"its recipes are of the version {tree['version']!r}, expected {_VERSION}")
    for place in tree["places"]:
        read = ((map(tuple, one["sources"]), map(tuple, one["calls"])) for one in place["recipes"])
        place["recipes"] = tuple(Recipe(tuple(sources), tuple(calls)) for sources, calls in read)
    places = [Place(**place) for place in tree["places"]]
    work = sum((1 + len(recipe.calls)) * place.size for place in places for recipe in place.recipes)
    once = len({(place.kind, place.number) for place in places}) == len(places)
    weights = {name: Weight(**{**one, "shape": tuple(one["shape"])}) for name, one in tree["weights"].items()}
    known = weights.keys() >= {name for place in places for name in place.names}
    if not once or not known or min((place.size for place in places), default=0) < 0 or work > 4 * _GROWTH * size:
        raise CorruptError("its recipes are for content that it does not have")
    return Recipes(weights, places)


def is_bounded(tensor: torch.Tensor) -> bool:
    """Return whether no element of a floating-point tensor is so large that lowering may not rely on its size."""
    if not tensor.numel():
        return True
    plain = tensor.detach() if tensor.dtype.itemsize > 1 else tensor.detach().float()
    low, high = torch.aminmax(plain)
    if bool(low.isnan()):
        low, high = torch.aminmax(torch.nan_to_num(plain, 0.0, math.inf, -math.inf))
    return max(-float(low), float(high)) <= REPLACED_BOUND


def digest(value: torch.Tensor) -> str:
    """Return the digest of a tensor's elements."""
    return str(xxhash.xxh3_128_hexdigest(raw(value.detach().contiguous().reshape(-1).view(torch.uint8).clone())))


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().data


def substitute(content: bytes | memoryview, replaced: Mapping[str, str]) -> bytes:
    """Replace keys, all at once: a new one may be another's old one."""
    if not replaced:
        return bytes(content)
    keys = {old.encode(): new.encode() for old, new in replaced.items()}
    return re.sub(b"|".join(map(re.escape, keys)), lambda found: keys[found[0]], content)


def find(operator: str) -> CheckedCall:
    """Return an operator of the closed list; ValueError if it is not on it."""
    found, name = pure.find(operator), operator.split(".")[1]
    quantising = operator.startswith("quantized_decomposed.")
    if found is None or not (quantising or torch.Tag.pointwise in found.tags or found.views or name in _MOVING):
        raise ValueError(f"{operator} is not on the closed list of operators that only move or compute each element")
    return CheckedCall(name, found)


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


def replay(recipe: Recipe, weights: Mapping[str, torch.Tensor], size: int) -> memoryview:
    """Return the bytes, so many, that a recipe makes; raise a CorruptError, or what Python and torch do, otherwise."""
    memories: list[torch.Tensor] = []
    reader, most = _Reader(memories), _GROWTH * size + _SLACK
    for name, content in recipe.sources:
        plain = base64.b64decode(content) if name is None else b""
        memories.append(_lay_out(weights[name], content) if name else torch.tensor(list(plain), dtype=torch.uint8))
    for operator, args, kwargs, result in recipe.calls:
        call, given, named = find(operator), reader.read(args), reader.read(kwargs)
        if call.needs(given, named) > most:
            raise CorruptError(f"a recipe takes too much memory for its {size} bytes")
        if operator == _PACKING and max(raw(given[0]), default=0) > 15:
            raise CorruptError("a number is outside of -8 to 7, which four bits hold")
        made = call(*given, **named)
        memories.append(made if isinstance(made, torch.Tensor) else made[result])
    made = raw(memories[-1])
    if len(made) != size:
        raise CorruptError(f"a recipe makes {len(made)} bytes, expected {size}")
    return made


def _lay_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a tensor in memory of its own, with strides."""
    extent = extent_of(tensor.shape, strides)
    if extent != tensor.numel() or min(strides, default=0) < 0:
        raise CorruptError("a weight has gaps")
    if tensor.stride() == tuple(strides) and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return torch.zeros(extent, dtype=tensor.dtype).as_strided(tuple(tensor.shape), tuple(strides)).copy_(tensor)
