"""Step preprocess with the cache: backends are called with the partitions whose results are not known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from executorch.exir.backend.backend_details import PreprocessResult

from exir_lowering._upstream import pins
from exir_lowering.errors import BackendFailure
from exir_lowering.graphs import debug_handles
from exir_lowering.model import BackendGroup, LoweredPartition, Partition
from exir_lowering.plugins.backend import Backend, CompileSpec, ExecutorchBackend
from exir_lowering.plugins.payload import CorruptError, PayloadChecks
from exir_lowering.steps.cache.canonical import describe_neighbours, describe_program, list_neighbours
from exir_lowering.steps.cache.identity import Maker, identify, list_versions
from exir_lowering.steps.cache.keys import Key, NoKeyError, join_keys, make_key
from exir_lowering.steps.cache.results import DamagedError, flatten_results, restore_results
from exir_lowering.steps.cache.using import Cache
from exir_lowering.steps.parallel.dispatch import preprocess_parallel
from exir_lowering.steps.session import Session

KIND = "preprocess"


@dataclass(frozen=True, slots=True)
class _Entry:
    """Partitions whose results are kept together."""

    partitions: tuple[Partition, ...]
    key: Key | None  # None if it has none
    handles: Mapping[int, int] | None = None  # the number of each, of a single one; None if they are in the key

    def numbered(self) -> tuple[Partition, ...]:
        """Return what the backend lowers: the partition with its handles numbered."""
        if self.handles is None:
            return self.partitions
        (one,) = self.partitions
        return (replace(one, program=debug_handles.copy_with_numbers(one.program, self.handles)),)

    def own(self, results: Sequence[PreprocessResult], maker: Maker) -> dict[str, PreprocessResult]:
        """Return results by partition, with its own handles in them; CorruptError if a payload is damaged."""
        if self.handles is not None and maker.payloads is not None:
            back = {number: handle for handle, number in self.handles.items()}
            results = [_with_handles(result, back, maker.payloads) for result in results]
        return {partition.id: result for partition, result in zip(self.partitions, results, strict=True)}


def _with_handles(result: PreprocessResult, handles: Mapping[int, int], payloads: PayloadChecks) -> PreprocessResult:
    table = result.debug_handle_map
    table = None if table is None else debug_handles.put_back(table, handles)
    payload = payloads.replace_handles(result.processed_bytes, handles)
    return replace(result, processed_bytes=payload, debug_handle_map=table)


def preprocess_cached(group: BackendGroup, backend: Backend, session: Session) -> list[LoweredPartition]:
    """Lower a group as `preprocess` does, with results of the session's cache where it has them.

    The payloads have the same bytes as without a cache; their order, and errors, are as for `preprocess`.
    """
    cache = session.cache
    if not cache.active:
        return preprocess_parallel(group, backend, session)
    try:
        maker = identify(backend)
    except NoKeyError as error:
        for partition in group.partitions:
            cache.refuse(KIND, partition.method, partition.id, str(error))
        return preprocess_parallel(group, backend, session)
    entries = _list_entries(group, backend, maker, cache)
    done: dict[str, PreprocessResult] = {}
    missing = []
    for entry in entries:
        known = _look_up(entry, maker, cache)
        if known is None:
            missing.append(entry)
        else:
            done |= known
    if missing:
        done |= _lower(group, missing, backend, maker, session)
    return [LoweredPartition(partition, done[partition.id]) for partition in group.partitions]


def _list_entries(group: BackendGroup, backend: Backend, maker: Maker, cache: Cache) -> list[_Entry]:
    """Return one entry for each partition, or one for all that the backend lowers together."""
    # ExecuTorch's classes get no context, and thus no store of the group's weights.
    sharing = () if isinstance(backend, ExecutorchBackend) else group.partitions
    neighbours = describe_neighbours([partition.program for partition in sharing])
    entries = []
    versions = [*list_versions(), *pins.state()]
    for partition in group.partitions:
        replaceable = maker.payloads is not None and maker.independent
        handles = debug_handles.number(partition.program) if replaceable else None
        try:
            parts = describe_program(partition.program, cache.storages, maker.unread, handles)
            parts["specs"] = _describe_specs(partition.compile_specs)
        except NoKeyError as error:
            cache.refuse(KIND, partition.method, partition.id, str(error))
            entries.append(_Entry((partition,), None))
            continue
        if sharing:
            parts["weights"] += list_neighbours(partition.program, neighbours)
        parts["backend"] = list(maker.backend)
        parts["versions"] = versions
        entries.append(_Entry((partition,), make_key(KIND, parts), handles))
    return entries if maker.independent else [_join(group, entries, cache)]


def _join(group: BackendGroup, entries: Sequence[_Entry], cache: Cache) -> _Entry:
    """Return the entry of a group that is lowered together: it has a key if all of its partitions have one."""
    keys = [entry.key for entry in entries if entry.key is not None]
    if len(keys) == len(entries):
        return _Entry(group.partitions, join_keys(keys, [partition.method for partition in group.partitions]))
    for partition, entry in zip(group.partitions, entries, strict=True):
        if entry.key is not None:
            reason = "the backend lowers it together with another partition, which has no key"
            cache.refuse(KIND, partition.method, partition.id, reason)
    return _Entry(group.partitions, None)


def _describe_specs(specs: Sequence[CompileSpec]) -> list[str]:
    for spec in specs:
        if type(spec) is not CompileSpec or not isinstance(spec.value, (bytes, bytearray)):
            raise NoKeyError(f"the compile spec {spec.key!r} has a value of type {type(spec.value).__name__}")
    return [f"{spec.key!r} {bytes(spec.value)!r}" for spec in specs]


def _look_up(entry: _Entry, maker: Maker, cache: Cache) -> dict[str, PreprocessResult] | None:
    """Return the results that the cache has, by partition; None if it has none, or what it has is damaged."""
    if entry.key is None:
        return None
    found, known = cache.read(entry.key), None
    try:
        results = [] if found is None else restore_results(found.value, found.chunks)
        if len(results) == len(entry.partitions):
            known = entry.own(results, maker)
    except (DamagedError, CorruptError):
        pass
    note = cache.miss if known is None else cache.hit
    for partition in entry.partitions:
        note(entry.key, partition.method, partition.id)
    return known


def _lower(
    group: BackendGroup, entries: Sequence[_Entry], backend: Backend, maker: Maker, session: Session
) -> dict[str, PreprocessResult]:
    """Lower partitions with numbered handles in one call, keep the results, and put the handles back."""

    def lower(partitions: Iterable[Partition]) -> list[PreprocessResult]:
        asked = BackendGroup(group.backend_id, tuple(partitions))
        return [one.result for one in preprocess_parallel(asked, backend, session, sharing=group)]

    done: dict[str, PreprocessResult] = {}
    try:
        results = iter(lower(one for entry in entries for one in entry.numbered()))
        made = [(entry, list(islice(results, len(entry.partitions)))) for entry in entries]
        for entry, lowered in made:
            done |= entry.own(lowered, maker)
    except (BackendFailure, CorruptError):
        if all(entry.handles is None for entry in entries):
            raise
        # Once more with the partitions' own handles, so that the failure names the right lines of the model.
        whole = [partition for entry in entries for partition in entry.partitions]
        return {partition.id: result for partition, result in zip(whole, lower(whole), strict=True)}
    for entry, lowered in made:
        flat = None if entry.key is None else flatten_results(lowered)
        if entry.key is not None and flat is not None:
            session.cache.write(entry.key, *flat)
    return done
