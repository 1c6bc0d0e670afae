"""Steps with the cache: only programs whose Edge programs it lacks are converted; backends only get new partitions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig
from executorch.exir.backend.backend_details import PreprocessResult
from torch.export import ExportedProgram

from exir_lowering._upstream import locks, pins
from exir_lowering.errors import BackendFailure, InputError
from exir_lowering.graphs import serialized
from exir_lowering.graphs.debug_handles import number_handles, put_back, with_handles
from exir_lowering.graphs.serialized import Encoded, NotSerialisableError
from exir_lowering.model import BackendGroup, EdgeMethod, LoweredPartition, Partition
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins.backend import Backend, CompileSpec, ExecutorchBackend
from exir_lowering.plugins.payload import CorruptError, PayloadChecks
from exir_lowering.steps.arguments import RequestedMethod
from exir_lowering.steps.cache.keys import (
    UNIMPORTANT,
    Forms,
    Key,
    NoKeyError,
    Storages,
    describe_neighbours,
    describe_program,
    join_keys,
    list_neighbours,
    make_key,
)
from exir_lowering.steps.cache.plugin_identity import Maker, identify, identify_partitioner, list_versions
from exir_lowering.steps.cache.results import DamagedError, flatten_results, restore_results
from exir_lowering.steps.cache.store import Cache, Found
from exir_lowering.steps.conversion_context import settings
from exir_lowering.steps.parallel.dispatch import preprocess_parallel
from exir_lowering.steps.session import Session

KIND = "preprocess"


@dataclass(frozen=True, slots=True)
class _Task:
    """What has one entry in the cache: a partition, or all of a backend that lowers them together."""

    partitions: tuple[Partition, ...]
    key: Key | None  # None if it has none
    # the number of each handle of the one partition, with the checks that put them back; None if they are in the key
    handles: tuple[Mapping[int, int], PayloadChecks] | None = None

    def canonical(self) -> tuple[Partition, ...]:
        """Return what the backend lowers: the partitions, with their handles numbered."""
        if self.handles is None:
            return self.partitions
        return tuple(replace(one, program=with_handles(one.program, self.handles[0])) for one in self.partitions)

    def own(self, results: Sequence[PreprocessResult]) -> dict[str, PreprocessResult]:
        """Return results by partition, with their own handles; CorruptError if a payload is damaged."""
        if self.handles is not None:
            results = [put_back(result, *self.handles) for result in results]
        return {one.id: result for one, result in zip(self.partitions, results, strict=True)}


def preprocess_cached(group: BackendGroup, backend: Backend, session: Session) -> list[LoweredPartition]:
    """Lower a group as `preprocess` does, to the same bytes; what the cache does not have, in one call."""
    cache = session.cache
    if not cache.active:
        return preprocess_parallel(group, backend, session)
    try:
        maker = identify(backend)
    except NoKeyError as error:
        for partition in group.partitions:
            cache.refuse(KIND, partition.method, partition.id, str(error))
        return preprocess_parallel(group, backend, session)
    tasks = _make_tasks(group, backend, maker, cache)
    if not maker.independent:
        tasks = [_join(tasks, cache)]
    done: dict[str, PreprocessResult] = {}
    left = []
    for task in tasks:
        found = _look_up(task, cache)
        if found is None:
            left.append(task)
        else:
            done |= found
    if left:
        done |= _lower(group, left, backend, session)
    return [LoweredPartition(partition, done[partition.id]) for partition in group.partitions]


def _make_tasks(group: BackendGroup, backend: Backend, maker: Maker, cache: Cache) -> list[_Task]:
    # ExecuTorch's classes get no context, and thus no store of the group's weights.
    sharing = () if isinstance(backend, ExecutorchBackend) else group.partitions
    neighbours = describe_neighbours([partition.program for partition in sharing])
    tasks = []
    versions = [*list_versions(), *pins.state()]
    for partition in group.partitions:
        checks = maker.payloads if maker.independent else None
        numbers = number_handles(partition.program) if checks is not None else None
        try:
            parts = describe_program(partition.program, cache.storages, maker.unread, numbers)
            parts["specs"] = _describe_specs(partition.compile_specs)
        except NoKeyError as error:
            cache.refuse(KIND, partition.method, partition.id, str(error))
            tasks.append(_Task((partition,), None))
            continue
        if sharing:
            parts["weights"] += list_neighbours(partition.program, neighbours)
        parts["backend"] = list(maker.backend)
        parts["versions"] = versions
        handles = None if checks is None or numbers is None else (numbers, checks)
        tasks.append(_Task((partition,), make_key(KIND, parts), handles))
    return tasks


def _describe_specs(specs: Sequence[CompileSpec]) -> list[str]:
    for spec in specs:
        if type(spec) is not CompileSpec or not isinstance(spec.value, (bytes, bytearray)):
            raise NoKeyError(f"the compile spec {spec.key!r} has a value of type {type(spec.value).__name__}")
    return [f"{spec.key!r} {bytes(spec.value)!r}" for spec in specs]


def _join(tasks: Sequence[_Task], cache: Cache) -> _Task:
    """Make one task of those of a group that a backend lowers together."""
    partitions = tuple(partition for task in tasks for partition in task.partitions)
    keys = [task.key for task in tasks if task.key is not None]
    if len(keys) == len(tasks):
        return _Task(partitions, join_keys(keys, [partition.method for partition in partitions]))
    for task in tasks:
        if task.key is not None:
            reason = "the backend lowers it together with another partition, which has no key"
            cache.refuse(KIND, task.partitions[0].method, task.partitions[0].id, reason)
    return _Task(partitions, None)


def _look_up(task: _Task, cache: Cache) -> dict[str, PreprocessResult] | None:
    """Return what the cache has for a task, None if that is nothing whole."""
    if task.key is None:
        return None
    found, note = cache.read(task.key), cache.miss
    done = None
    if found is not None:
        with suppress(DamagedError, CorruptError):
            results = restore_results(found.value, found.chunks)
            if len(results) == len(task.partitions):
                done, note = task.own(results), cache.hit
    for partition in task.partitions:
        note(task.key, partition.method, partition.id)
    return done


def _lower(
    group: BackendGroup, tasks: Sequence[_Task], backend: Backend, session: Session
) -> dict[str, PreprocessResult]:
    """Lower partitions with numbered handles, keep the results, and put the handles back."""

    def lower(partitions: Iterable[Partition]) -> list[LoweredPartition]:
        return preprocess_parallel(BackendGroup(group.backend_id, tuple(partitions)), backend, session, sharing=group)

    done: dict[str, PreprocessResult] = {}
    try:
        lowered = iter(lower(partition for task in tasks for partition in task.canonical()))
        results = [[next(lowered).result for _ in task.partitions] for task in tasks]
        for task, made in zip(tasks, results, strict=True):
            done |= task.own(made)
    except (BackendFailure, CorruptError):
        if all(task.handles is None for task in tasks):
            raise
        # Once more with the partitions' own handles, so that the failure names the right lines of the model.
        again = lower(partition for task in tasks for partition in task.partitions)
        return {one.partition.id: one.result for one in again}
    for task, made in zip(tasks, results, strict=True):
        flat = flatten_results(made) if task.key is not None else None
        if task.key is not None and flat is not None:
            session.cache.write(task.key, *flat)
    return done


EDGE = "edge"


def convert_cached(method: RequestedMethod, session: Session, convert: Callable[[], EdgeMethod]) -> EdgeMethod:
    """Take a method's Edge program from the cache, or convert it; the result is equal, with the given tensors."""
    cache = session.cache
    if not cache.active:
        return convert()
    try:
        key, given = _identify(method, session.options, cache.storages)
    except (NoKeyError, NotSerialisableError) as error:
        cache.refuse(EDGE, method.name, "", _reason(error))
        return convert()
    found = cache.read(key)
    known = None if found is None else _restore(found, method, given)
    if known is not None:
        cache.hit(key, method.name)
        return known
    converted = convert()
    try:
        flat = _flatten(converted, given)
    except NotSerialisableError as error:
        cache.refuse(EDGE, method.name, "", f"its Edge program has {_reason(error)}")
        return converted
    cache.miss(key, method.name)
    cache.write(key, *flat)
    return converted


def _reason(error: Exception) -> str:
    return str(error).removeprefix("not serialisable: ")


def _identify(
    method: RequestedMethod, options: LoweringOptions, storages: Storages
) -> tuple[Key, Sequence[torch.Tensor]]:
    """Return the key of a method's conversion, and the memory of its tensors; or NoKeyError, NotSerialisableError."""
    if method.passes is not None:
        raise NoKeyError("transform passes run over it")
    forms = Forms(Storages(), named=True)
    config = options.edge_compile_config or EdgeCompileConfig()
    parts: dict[str, Iterable[str]] = {
        "partitioners": [line for one in method.partitioners for line in ("for", *identify_partitioner(one))],
        # Whoever turns off what makes a conversion fast does not want what it made.
        "options": [forms.form(config), str(options.fast)],
        "versions": [*list_versions(), *pins.state()],
    }
    encoded = _encode(method.program)
    # A piece may be a part of its memory; all of that counts, as for partitions, so that it is read once.
    weights = [f"{piece.storage_offset()} {piece.numel()} {storages.hash(piece)}" for piece in encoded.pieces]
    parts |= {"graph": [hashlib.sha256(encoded.graph).hexdigest()], "weights": weights}
    return make_key(EDGE, parts), encoded.pieces


def _encode(program: ExportedProgram) -> Encoded:
    # Torch's settings are those with which the program was exported, here and where it is decoded.
    with locks.conversion(), settings([program], gradients=True):
        return serialized.encode(program, leave_out=UNIMPORTANT)


def _flatten(converted: EdgeMethod, given: Sequence[torch.Tensor]) -> tuple[Any, list[bytes]]:
    """Turn an Edge program into data, without copies of memory that the given program has too."""
    encoded = _encode(converted.program)
    chunks = [encoded.graph]
    known = {piece.untyped_storage().data_ptr(): (number, piece) for number, piece in enumerate(given)}
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


def _restore(found: Found, method: RequestedMethod, given: Sequence[torch.Tensor]) -> EdgeMethod | None:
    """Make the Edge program that an entry describes; None if the entry is damaged, or an operator is not known here."""
    try:
        value, (graph, *_) = found.value, found.chunks
        left = tuple(value["left"])
        if not all(isinstance(reason, str) for reason in left):
            return None
        with locks.conversion(), settings([method.program], gradients=True):
            pieces = [_piece(place, found.chunks, given) for place in value["pieces"]]
            program = serialized.decode(graph, pieces)
    except (KeyError, IndexError, TypeError, ValueError, InputError):
        return None
    _adopt(program.state_dict, method.program.state_dict)
    _adopt(program.constants, method.program.constants)
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


def _adopt(tensors: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Replace tensors by the given ones that are equal and in the same memory, as a conversion passes them on."""
    for name, tensor in tensors.items():
        other = given.get(name)
        if isinstance(other, torch.Tensor) and isinstance(tensor, torch.Tensor) and _facts(other) == _facts(tensor):
            tensors[name] = other


def _facts(tensor: torch.Tensor) -> Any:
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr(), tensor.requires_grad
