"""What identifies the code that makes a result: versions, and the class, source and settings of a plug-in."""

from __future__ import annotations

import hashlib
import inspect
import platform
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from exir_lowering.plugins import edge_requests, payload
from exir_lowering.plugins.backend import Backend, ExecutorchBackend, Partitioner
from exir_lowering.steps.cache.code import attributes, describe_code
from exir_lowering.steps.cache.keys import FORMAT, Forms, NoKeyError, Storages

_OWN = ("torch", "executorch", "exir-lowering")
_STARTED = time.time()
_MOST_FILES = 2000


@dataclass(frozen=True, slots=True)
class Maker:
    """A backend, as far as the cache is concerned."""

    backend: tuple[str, ...]  # the lines of the key about it
    independent: bool  # whether each partition is lowered without regard to the others
    unread: Collection[str]  # what it does not read of a partition
    payloads: payload.PayloadChecks | None  # what can replace the debug handles in them; None if nothing can


def identify(backend: Backend) -> Maker:
    """Return what identifies a backend, and what it declares; NoKeyError if its code or settings have no identity."""
    maker = backend.stands_for
    kind = maker.details if isinstance(maker, ExecutorchBackend) else type(maker)
    name = f"{kind.__module__}.{kind.__qualname__}"
    facts = [backend.backend_id, str(backend.version), name]
    independent = backend.one_by_one or backend.independent
    if isinstance(maker, ExecutorchBackend):
        checks = payload.find_checks_of(kind)
        if checks is not None:
            unread = checks.unread | backend.unread
            facts += ["declared", *_source(type(checks))]
            return Maker(tuple(facts), independent, unread, checks if checks.replaces_handles else None)
        facts += _outside(kind)
        return Maker(tuple(facts), independent, backend.unread, None)
    if kind.__module__.startswith("exir_lowering."):
        facts += [Forms(Storages(), named=True).form(vars(maker)), *_source(kind)]
    else:
        facts += _outside(kind, attributes(maker))
    return Maker(tuple(facts), independent, maker.unread | backend.unread, None)


def identify_partitioner(partitioner: Partitioner) -> list[str]:
    """Return what a partitioner's requests to the conversion depend on; NoKeyError unless declared by content."""
    kind = type(partitioner)
    name = f"{kind.__module__}.{kind.__qualname__}"
    facts = edge_requests.describe_requests(partitioner)
    if facts is None:
        raise NoKeyError(f"the partitioner {name} does not say what its requests to the conversion depend on")
    lines = [name] if kind.__module__.startswith(("exir_lowering.", "executorch.")) else [name, *_outside(kind)]
    for fact in facts:
        if isinstance(fact, Partitioner):
            lines += ["(", *identify_partitioner(fact), ")"]
        else:
            lines.append(Forms(Storages(), named=True).form(fact))
    return lines


def _outside(kind: type, settings: Mapping[str, Any] | None = None) -> list[str]:
    """Return what identifies the code of a class of others; NoKeyError if it cannot be told apart."""
    if "<locals>" in kind.__qualname__:
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise NoKeyError(f"{name} is defined in a function, on whose variables its results may depend")
    code = _source(kind) if kind.__module__.startswith("executorch.") else describe_code(kind, settings)
    return [*code, *_distributions()]


@lru_cache(maxsize=1)
def list_versions() -> tuple[str, ...]:
    """Return the lines of a key about the software and the machine, whose arithmetic folds constants."""
    versions = [f"{name} {metadata.version(name)}" for name in _OWN]
    machine = f"{platform.machine()} {sys.byteorder} {torch.backends.cpu.get_cpu_capability()}"
    return (*versions, f"python {sys.version_info[0]}.{sys.version_info[1]}", machine, f"format {FORMAT}")


@lru_cache(maxsize=1)
def _distributions() -> tuple[str, ...]:
    """Return what is installed: what a backend uses that declares nothing about itself is not known."""
    return tuple(sorted({f"{found.metadata['Name']} {found.version}" for found in metadata.distributions()}))


def _source(kind: type) -> list[str]:
    """Return digests of the source files beside a class of ours or ExecuTorch's; NoKeyError if changed since start."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    try:
        file = Path(inspect.getfile(kind)).resolve()
        package = getattr(sys.modules.get(kind.__module__), "__package__", "")
        files = sorted(file.parent.rglob("*.py")) if package else [file]
        if len(files) > _MOST_FILES:
            raise NoKeyError(f"the package of {name} has {len(files)} source files")
        if any(one.stat().st_mtime >= _STARTED for one in files):
            raise NoKeyError(f"the source of {name} has changed since this process started")
        return [f"{one.relative_to(file.parent)} {hashlib.sha256(one.read_bytes()).hexdigest()}" for one in files]
    except (TypeError, OSError) as error:
        raise NoKeyError(f"the source of {name} cannot be read: {error}") from None
