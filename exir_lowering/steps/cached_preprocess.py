"""Step preprocess with the cache: backends are called with the partitions whose results are not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from executorch.exir.backend.backend_details import PreprocessResult

from exir_lowering._upstream import pins
from exir_lowering.errors import BackendFailure
from exir_lowering.model import BackendGroup, LoweredPartition, Partition
from exir_lowering.plugins.backend import Backend, CompileSpec, ExecutorchBackend
from exir_lowering.plugins.payload import CorruptError
from exir_lowering.steps.cache.canonical import describe_neighbours, describe_program, list_neighbours
from exir_lowering.steps.cache.handles import number_handles, put_back, with_handles
from exir_lowering.steps.cache.identity import Maker, identify, list_versions
from exir_lowering.steps.cache.keys import Key, NoKeyError, join_keys, make_key
from exir_lowering.steps.cache.results import DamagedError, flatten_results, restore_results
from exir_lowering.steps.cache.using import Cache
from exir_lowering.steps.parallel.dispatch import preprocess_parallel
from exir_lowering.steps.session import Session

KIND = "preprocess"


@dataclass(frozen=True, slots=True)
class _Task:
    """A partition whose result is looked for."""

    partition: Partition
    key: Key | None  # None if it has none
    handles: Mapping[int, int] | None = None  # the number of each; None if they are in the key

    def canonical(self) -> Partition:
        """Return what the backend lowers: the partition with its handles numbered."""
        if self.handles is None:
            return self.partition
        return replace(self.partition, program=with_handles(self.partition.program, self.handles))


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
    tasks = _make_tasks(group, backend, maker, cache)
    if maker.independent:
        return _each(group, tasks, backend, maker, session)
    return _together(group, tasks, backend, session)


def _make_tasks(group: BackendGroup, backend: Backend, maker: Maker, cache: Cache) -> list[_Task]:
    # ExecuTorch's classes get no context, and thus no store of the group's weights.
    sharing = () if isinstance(backend, ExecutorchBackend) else group.partitions
    neighbours = describe_neighbours([partition.program for partition in sharing])
    tasks = []
    versions = [*list_versions(), *pins.state()]
    for partition in group.partitions:
        replaceable = maker.payloads is not None and maker.independent
        handles = number_handles(partition.program) if replaceable else None
        try:
            parts = describe_program(partition.program, cache.storages, maker.unread, handles)
            parts["specs"] = _describe_specs(partition.compile_specs)
        except NoKeyError as error:
            cache.refuse(KIND, partition.method, partition.id, str(error))
            tasks.append(_Task(partition, None))
            continue
        if sharing:
            parts["weights"] += list_neighbours(partition.program, neighbours)
        parts["backend"] = list(maker.backend)
        parts["versions"] = versions
        tasks.append(_Task(partition, make_key(KIND, parts), handles))
    return tasks


def _describe_specs(specs: Sequence[CompileSpec]) -> list[str]:
    for spec in specs:
        if type(spec) is not CompileSpec or not isinstance(spec.value, (bytes, bytearray)):
            raise NoKeyError(f"the compile spec {spec.key!r} has a value of type {type(spec.value).__name__}")
    return [f"{spec.key!r} {bytes(spec.value)!r}" for spec in specs]


def _each(
    group: BackendGroup, tasks: Sequence[_Task], backend: Backend, maker: Maker, session: Session
) -> list[LoweredPartition]:
    """Take what the cache has, partition by partition, and lower the rest in one call."""
    done: dict[str, PreprocessResult] = {}
    for task in tasks:
        result = _look_up(task, maker, session.cache)
        if result is not None:
            done[task.partition.id] = result
    left = [task for task in tasks if task.partition.id not in done]
    if left:
        done |= _lower(group, left, backend, maker, session)
    return [LoweredPartition(partition, done[partition.id]) for partition in group.partitions]


def _look_up(task: _Task, maker: Maker, cache: Cache) -> PreprocessResult | None:
    if task.key is None:
        return None
    results = _read(task.key, 1, cache)
    if results is not None:
        try:
            result = _own(results[0], task, maker)
            cache.hit(task.key, task.partition.method, task.partition.id)
            return result
        except CorruptError:
            pass
    cache.miss(task.key, task.partition.method, task.partition.id)
    return None


def _lower(
    group: BackendGroup, tasks: Sequence[_Task], backend: Backend, maker: Maker, session: Session
) -> dict[str, PreprocessResult]:
    """Lower partitions with numbered handles, keep the results, and put the handles back."""
    whole = [task.partition for task in tasks]
    try:
        lowered = preprocess_parallel(
            BackendGroup(group.backend_id, tuple(task.canonical() for task in tasks)), backend, session, sharing=group
        )
        done = {task.partition.id: _own(one.result, task, maker) for task, one in zip(tasks, lowered, strict=True)}
    except (BackendFailure, CorruptError):
        if all(task.handles is None for task in tasks):
            raise
        # Once more with the partitions' own handles, so that the failure names the right lines of the model.
        again = preprocess_parallel(BackendGroup(group.backend_id, tuple(whole)), backend, session, sharing=group)
        return {one.partition.id: one.result for one in again}
    for task, one in zip(tasks, lowered, strict=True):
        if task.key is not None:
            _write(task.key, [one.result], session.cache)
    return done


def _own(result: PreprocessResult, task: _Task, maker: Maker) -> PreprocessResult:
    """Put a partition's own handles into its result."""
    if task.handles is None or maker.payloads is None:
        return result
    return put_back(result, task.handles, maker.payloads)


def _together(
    group: BackendGroup, tasks: Sequence[_Task], backend: Backend, session: Session
) -> list[LoweredPartition]:
    """Take the results of the whole group from the cache, or lower it."""
    keys = [task.key for task in tasks if task.key is not None]
    if len(keys) < len(tasks):
        for task in tasks:
            if task.key is not None:
                reason = "the backend lowers it together with another partition, which has no key"
                session.cache.refuse(KIND, task.partition.method, task.partition.id, reason)
        return preprocess_parallel(group, backend, session)
    key = join_keys(keys, [partition.method for partition in group.partitions])
    results = _read(key, len(tasks), session.cache)
    note = session.cache.miss if results is None else session.cache.hit
    for partition in group.partitions:
        note(key, partition.method, partition.id)
    if results is not None:
        return [LoweredPartition(*pair) for pair in zip(group.partitions, results, strict=True)]
    lowered = preprocess_parallel(group, backend, session)
    _write(key, [one.result for one in lowered], session.cache)
    return lowered


def _read(key: Key, count: int, cache: Cache) -> list[PreprocessResult] | None:
    found = cache.read(key)
    try:
        results = None if found is None else restore_results(found.value, found.chunks)
    except DamagedError:
        return None
    return results if results is not None and len(results) == count else None


def _write(key: Key, results: Sequence[PreprocessResult], cache: Cache) -> None:
    flat = flatten_results(results)
    if flat is not None:
        cache.write(key, *flat)
