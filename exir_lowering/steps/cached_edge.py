"""Step edge with the cache: only programs whose Edge programs it lacks are converted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig
from torch.export import ExportedProgram

from exir_lowering._upstream import locks, pins
from exir_lowering.errors import InputError
from exir_lowering.graphs import serialized
from exir_lowering.graphs.serialized import Encoded, NotSerialisableError
from exir_lowering.model import EdgeMethod
from exir_lowering.options import LoweringOptions
from exir_lowering.steps.arguments import RequestedMethod
from exir_lowering.steps.cache.canonical_programs import UNIMPORTANT
from exir_lowering.steps.cache.canonical_values import Forms, Storages
from exir_lowering.steps.cache.keys import Key, NoKeyError, make_key
from exir_lowering.steps.cache.plugin_identity import identify_partitioner, list_versions
from exir_lowering.steps.cache.store import Found
from exir_lowering.steps.conversion_context import settings
from exir_lowering.steps.session import Session

KIND = "edge"


@dataclass(frozen=True, slots=True)
class _Given:
    """A program to convert: its key, and the memory of its tensors, which its Edge program shares."""

    method: RequestedMethod
    key: Key
    pieces: Sequence[torch.Tensor]


def convert_cached(method: RequestedMethod, session: Session, convert: Callable[[], EdgeMethod]) -> EdgeMethod:
    """Take a method's Edge program from the cache, or convert it; the result is equal, with the given tensors."""
    cache = session.cache
    if not cache.active:
        return convert()
    try:
        given = _identify(method, session.options, cache.storages)
    except (NoKeyError, NotSerialisableError) as error:
        cache.refuse(KIND, method.name, "", _reason(error))
        return convert()
    found = cache.read(given.key)
    known = None if found is None else _restore(found, given)
    if known is not None:
        cache.hit(given.key, method.name)
        return known
    converted = convert()
    try:
        flat = _flatten(converted, given)
    except NotSerialisableError as error:
        cache.refuse(KIND, method.name, "", f"its Edge program has {_reason(error)}")
        return converted
    cache.miss(given.key, method.name)
    cache.write(given.key, *flat)
    return converted


def _reason(error: Exception) -> str:
    return str(error).removeprefix("not serialisable: ")


def _identify(method: RequestedMethod, options: LoweringOptions, storages: Storages) -> _Given:
    """Find the key of a method's conversion; raise NoKeyError or NotSerialisableError if it has none."""
    if method.passes is not None:
        raise NoKeyError("transform passes run over it")
    if options.edge == "check":
        raise NoKeyError('edge="check" converts it in both ways')
    forms = Forms(Storages(), named=True)
    config = options.edge_compile_config or EdgeCompileConfig()
    parts: dict[str, Iterable[str]] = {
        "partitioners": [line for one in method.partitioners for line in ("for", *identify_partitioner(one))],
        # Whoever turns off what makes a conversion fast does not want what it made.
        "options": [forms.form(config), options.edge, str(options.accelerate)],
        "versions": [*list_versions(), *pins.state()],
    }
    encoded = _encode(method.program)
    # A piece may be a part of its memory; all of that counts, as for partitions, so that it is read once.
    weights = [f"{piece.storage_offset()} {piece.numel()} {storages.hash(piece)}" for piece in encoded.pieces]
    parts |= {"graph": [hashlib.sha256(encoded.graph).hexdigest()], "weights": weights}
    return _Given(method, make_key(KIND, parts), encoded.pieces)


def _encode(program: ExportedProgram) -> Encoded:
    with _reading(program):
        return serialized.encode(program, leave_out=UNIMPORTANT)


@contextmanager
def _reading(program: ExportedProgram) -> Iterator[None]:
    """Hold the lock of conversions, with torch's settings as they were when a program was exported."""
    with locks.conversion(), settings([program], gradients=True):
        yield


def _flatten(converted: EdgeMethod, given: _Given) -> tuple[Any, list[bytes]]:
    """Turn an Edge program into data, without copies of memory that the given program has too."""
    encoded = _encode(converted.program)
    chunks = [encoded.graph]
    known = {piece.untyped_storage().data_ptr(): (number, piece) for number, piece in enumerate(given.pieces)}
    pieces: list[Any] = []
    for piece in encoded.pieces:
        number, other = known.get(piece.untyped_storage().data_ptr(), (0, piece[:0]))
        start = int(piece.data_ptr()) - int(other.data_ptr())
        if 0 <= start <= other.numel() - piece.numel():
            pieces.append([number, start, piece.numel()])
        else:
            pieces.append([len(chunks)])
            chunks.append(piece.numpy().tobytes())
    return {"pieces": pieces, "left": list(converted.left_to_executorch)}, chunks


def _restore(found: Found, given: _Given) -> EdgeMethod | None:
    """Make the Edge program that an entry describes; None if the entry is damaged, or an operator is not known here."""
    try:
        value, (graph, *_) = found.value, found.chunks
        left = tuple(map(_text, value["left"]))
        with _reading(given.method.program):
            pieces = [_piece(place, found.chunks, given.pieces) for place in value["pieces"]]
            program = serialized.decode(graph, pieces)
    except (KeyError, IndexError, TypeError, ValueError, InputError):
        return None
    _adopt(program.state_dict, given.method.program.state_dict)
    _adopt(program.constants, given.method.program.constants)
    method = given.method
    return EdgeMethod(method.name, program, method.partitioners, method.program, left)


def _piece(place: Any, chunks: Sequence[bytes], given: Sequence[torch.Tensor]) -> torch.Tensor:
    if not isinstance(place, list) or not all(type(number) is int and number >= 0 for number in place):
        raise ValueError("a piece of memory is nowhere")
    if len(place) == 1:
        return torch.frombuffer(bytearray(chunks[place[0]]), dtype=torch.uint8)
    number, start, length = place
    found = given[number][start : start + length]
    if found.numel() != length:
        raise ValueError("a piece of memory is not inside a given one")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a reason is a text")
    return value


def _adopt(tensors: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Replace tensors by the given ones that are equal and in the same memory, as a conversion passes them on."""
    for name, tensor in tensors.items():
        other = given.get(name)
        if isinstance(other, torch.Tensor) and isinstance(tensor, torch.Tensor) and _facts(other) == _facts(tensor):
            tensors[name] = other


def _facts(tensor: torch.Tensor) -> Any:
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr(), tensor.requires_grad
