"""Where another process finds a plug-in: the module and the name of its class. Objects do not travel."""

from __future__ import annotations

import pkgutil
import sys
import weakref
from typing import TYPE_CHECKING, Any

from exir_lowering.errors import PluginLoadError, exception_text, explained

if TYPE_CHECKING:
    from exir_lowering.plugins.backend import Backend

_made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class NoAddressError(Exception):
    """No other process would find a plug-in; the message says why."""


def note_made(backend: Backend) -> Backend:
    """Remember that a backend was made from its class without arguments, as another process would make it."""
    _made[id(backend)] = backend
    return backend


def find_address(plugin: Any) -> str:
    """Return where another process finds a plug-in, or its class, as "module:class"; NoAddressError if it does not."""
    kind: Any = plugin if isinstance(plugin, type) else type(plugin)
    name = f"{kind.__module__}:{kind.__qualname__}"
    plain = kind.__init__ is object.__init__ and kind.__new__ is object.__new__
    if plugin is not kind and _made.get(id(plugin)) is not plugin and (getattr(plugin, "__dict__", None) or not plain):
        raise NoAddressError(f"an object of {name} was given, whose state stays in this process; pass its class")
    if kind.__module__ == "__main__":
        raise NoAddressError(f"{name} is defined in the script; move it to a module that workers can import")
    if kind.__module__ not in sys.modules or not _is_found(name, kind):
        raise NoAddressError(f"{name} is not found by its name; define it at the top of a module")
    return name


def _is_found(name: str, kind: Any) -> bool:
    try:
        return pkgutil.resolve_name(name) is kind
    except (AttributeError, ImportError, ValueError):
        return False


def load_class(address: str) -> Any:
    """Return the class at an address; PluginLoadError if it cannot be imported here."""
    with explained(lambda error: PluginLoadError(f"{address} cannot be imported: {exception_text(error)}")):
        return pkgutil.resolve_name(address)
