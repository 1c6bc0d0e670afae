"""Step preprocess with the cache: backends only get the partitions whose results it lacks."""

from __future__ import annotations

import platform
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from exir_lowering import fast
from exir_lowering.errors import BackendContractError
from exir_lowering.model import BackendGroup, LoweredPartition, Partition
from exir_lowering.plans.report import CacheUse
from exir_lowering.plugins.backend import Backend, ExecutorchBackend
from exir_lowering.steps.cache.keys import Forms, NoKeyError, describe_neighbours, describe_partition, digest
from exir_lowering.steps.parallel import preprocess_parallel
from exir_lowering.steps.session import Session


def preprocess_cached(group: BackendGroup, backend: Backend, session: Session) -> list[LoweredPartition]:
    """Lower a group as `preprocess` does, to the same bytes; what the cache does not have, in one call."""
    cache, store, partitions = session.cache, session.cache.store, group.partitions
    if store is None:
        return preprocess_parallel(group, backend, session)
    entries: list[tuple[Partition, ...]] = [(one,) for one in partitions]
    if not (backend.one_by_one or backend.independent):
        entries = [partitions]  # which it lowers together
    keys = _make_keys(entries, group, backend, session)
    found: list[Any] = []
    done: dict[str, Any] = {}
    for entry, key in zip(entries, keys, strict=True):
        found.append(None if isinstance(key, NoKeyError) else store.read(key, len(entry)))
        done.update((one.id, result) for one, result in zip(entry, found[-1] or (), strict=False))
    left = tuple(one for one in partitions if one.id not in done)
    lowered = preprocess_parallel(BackendGroup(group.backend_id, left), backend, session, sharing=group) if left else ()
    done |= {one.partition.id: one.result for one in lowered}
    for entry, key, results in zip(entries, keys, found, strict=True):
        reason = ""
        if isinstance(key, NoKeyError):
            reason = str(key)
        elif results is None and cache.store is not None:
            with cache.guard(store.folder):
                reason = store.write(key, [done[one.id] for one in entry])
        cache.uses += [CacheUse(one.method, one.id, results is not None, reason) for one in entry]
    if left:
        store.trim()
    return [LoweredPartition(one, done[one.id]) for one in partitions]


def _make_keys(
    entries: list[tuple[Partition, ...]], group: BackendGroup, backend: Backend, session: Session
) -> list[str | NoKeyError]:
    """Return the digest of what results depend on, or why that is not known, for each entry."""
    details = backend.details if isinstance(backend, ExecutorchBackend) else None
    # What overlaps with weights of others is one piece with them; ExecuTorch's classes know of no others.
    neighbours = describe_neighbours(one.program for one in group.partitions if details is None)
    made: list[str | NoKeyError] = []
    try:
        common = _identify(backend), _versions(every=False), session.options.fast, fast.state()
    except NoKeyError as error:
        return [error] * len(entries)
    for entry in entries:
        described: list[Any] = [common, [one.method for one in entry if len(entry) > 1]]
        try:
            for one in entry:
                described.append(describe_partition(one, session.cache.storages, backend.unread))
                described.append([neighbours.get(at) for at in describe_neighbours([one.program])])
            made.append(digest(described))
        except NoKeyError as error:
            made.append(error)
    return made


def _identify(backend: Backend) -> list[str]:
    """Return what identifies the code and the settings of a backend; NoKeyError if that is not known."""
    details = backend.details if isinstance(backend, ExecutorchBackend) else None
    kind = details or type(backend)
    name = f"{kind.__module__}.{kind.__qualname__}"
    settings: Any = {} if details is not None else vars(backend)
    if (stated := backend.cache_key) is not None:
        if not isinstance(stated, str):
            expected = "expected a text that identifies its settings, or None"
            raise BackendContractError(f"Backend {backend.backend_id!r}: cache_key is {stated!r}, {expected}.")
        settings = stated
    lines = [backend.backend_id, str(backend.version), name, Forms({}, named=True).form(settings)]
    ours = {kind, type(backend)} - {ExecutorchBackend}
    if any(one.__module__.startswith("exir_lowering.") for one in ours):
        return lines
    if backend.version == Backend.version:
        named = metadata.packages_distributions().get(name.partition(".")[0], ())
        file = Path(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
        # An own module may have the name of an installed one, such as tests.
        found = [one for one in named if file.is_relative_to(str(metadata.distribution(one).locate_file("")))]
        origins = [metadata.distribution(one).read_text("direct_url.json") or "" for one in found]
        if all('"editable":true' in origin.replace(" ", "") for origin in origins):
            raise NoKeyError(f"{name} has no `version`, and is of no installed distribution, except one that is edited")
    return [*lines, *_versions(every=True)]  # what it uses is not known


@lru_cache(maxsize=2)
def _versions(*, every: bool) -> tuple[str, ...]:
    """Return what is installed, all of it or what all results depend on, and the machine, which folds constants."""
    names = [one.name for one in metadata.distributions()] if every else ["torch", "executorch", "exir-lowering"]
    machine = f"{platform.machine()} {sys.byteorder} {torch.backends.cpu.get_cpu_capability()} {sys.version_info[:2]}"
    return (*sorted({f"{name} {metadata.version(name)}" for name in names}), machine)
