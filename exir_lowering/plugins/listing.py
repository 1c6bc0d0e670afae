"""What is installed: every plug-in, with the reason if it cannot be used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from exir_lowering.errors import PluginLoadError
from exir_lowering.plugins import registry


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One installed plug-in."""

    group: str  # the entry-point group
    id: str  # the entry's name
    provider: str  # the distribution and object
    error: str  # why it cannot be used, "" if it can
    missing: str = ""  # the module, of something else, that is not installed, if that is why


def list_installed() -> Iterator[PluginInfo]:
    """Load and describe every plug-in; broken ones have an error."""
    for group in registry.GROUPS:
        for plugin_id in sorted(registry.known_ids(group)):
            error = missing = ""
            try:
                registry.load(group, plugin_id)
            except PluginLoadError as failure:
                error, missing = str(failure), _missing(failure)
            for provider in registry.providers_of(group, plugin_id):
                yield PluginInfo(group, plugin_id, provider, error, missing)


def _missing(failure: PluginLoadError) -> str:
    cause = failure.__cause__
    return cause.name or "" if isinstance(cause, ImportError) and cause.name not in sys.modules else ""
