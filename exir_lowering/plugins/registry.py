"""Find plug-ins: registered in this process, entry points (loaded on demand), ExecuTorch's backend classes.

Looking for a delegate is part of running a file, so the base classes of backends and partitioners are only imported
when one of these is requested.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from exir_lowering._upstream.stderr import without_logs
from exir_lowering.errors import (
    InputError,
    PluginLoadError,
    UnknownPluginError,
    did_you_mean,
    exception_text,
    explained,
    ignoring_errors,
)
from exir_lowering.plugins.addresses import load_class, note_made
from exir_lowering.plugins.delegate import Delegate

if TYPE_CHECKING:
    from executorch.exir.backend.backend_details import BackendDetails

    from exir_lowering.plugins.backend import Backend, Partitioner

_Plugin = TypeVar("_Plugin")

BACKENDS = "exir_lowering.backends"
DELEGATES = "exir_lowering.delegates"
PARTITIONERS = "exir_lowering.partitioners"
REWRITES = "exir_lowering.rewrites"
GROUPS = (BACKENDS, DELEGATES, PARTITIONERS, REWRITES)

_XNNPACK = "exir_lowering.backends.xnnpack.backend:XnnpackBackend"
_CORRECTED = {"executorch.backends.xnnpack.xnnpack_preprocess.XnnpackBackend": _XNNPACK}
"""What stands for classes of ExecuTorch whose preprocess is wrong for some partitions.

No entry points: an installation whose list of these is old must not turn the corrections off.
"""

_Class = TypeVar("_Class", bound=type)
_Factory = TypeVar("_Factory", bound=Callable[[], Any])
_registered: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}


def register_backend(backend: _Class) -> _Class:
    """Return a `Backend` class, registered in this process under its `backend_id`; a class decorator.

    Raises:
        PluginLoadError: It is not a Backend class, has no id or no `preprocess`, or its id is already taken.
    """
    from exir_lowering.plugins.backend import Backend

    register(BACKENDS, check_class("register_backend", backend, Backend, "backend_id"), backend)
    return backend


def register_delegate(delegate: _Class) -> _Class:
    """Return a `Delegate` class, registered in this process under its `delegate_id`; a class decorator.

    Raises:
        PluginLoadError: It is not a Delegate class, has no id or no `execute`, or its id is already taken.
    """
    register(DELEGATES, check_class("register_delegate", delegate, Delegate, "delegate_id"), delegate)
    return delegate


def register_partitioner(plugin_id: str) -> Callable[[_Factory], _Factory]:
    """Return a decorator that registers a `Partitioner` class, or a function that makes one, under a name for `lower`.

    Raises:
        PluginLoadError: The name is invalid or already taken, or what is decorated cannot be called.
    """
    if not isinstance(plugin_id, str) or not plugin_id:
        raise PluginLoadError(
            f"register_partitioner: got {plugin_id!r}, expected a name, as in @register_partitioner('mine')."
        )

    def decorate(factory: _Factory) -> _Factory:
        if not callable(factory):
            raise PluginLoadError(
                f"register_partitioner({plugin_id!r}): got {factory!r}, expected a Partitioner class or a function "
                "without arguments that returns a partitioner."
            )
        register(PARTITIONERS, plugin_id, factory)
        return factory

    return decorate


def check_class(who: str, plugin: object, kind: type, attribute: str) -> str:
    """Return the id of a plug-in class; PluginLoadError if it has none, cannot be created, or is not of that kind."""
    if not isinstance(plugin, type) or not issubclass(plugin, kind):
        raise PluginLoadError(f"{who}: got {plugin!r}, expected a subclass of exir_lowering.{kind.__name__}.")
    plugin_id = getattr(plugin, attribute, None)
    if not isinstance(plugin_id, str) or not plugin_id:
        raise PluginLoadError(
            f'{who}: {_place(plugin)} has the {attribute} {plugin_id!r}, expected a name: {attribute} = "..."'
        )
    missing = sorted(getattr(plugin, "__abstractmethods__", ()))
    if missing:
        raise PluginLoadError(
            f"{who}: {_place(plugin)} has no {' and no '.join(missing)}, which every {kind.__name__} needs: no "
            "object of it can be created. Write it, or register the subclass that has it."
        )
    return plugin_id


def register(group: str, plugin_id: str, plugin: Any) -> None:
    """Register a plug-in. One that is defined again in the same place, as in a notebook, replaces the older one."""
    earlier = _registered[group].get(plugin_id)
    if earlier is not None and _place(earlier) != _place(plugin):
        raise PluginLoadError(
            f"{plugin_id!r} in group {group!r} is already registered, by {_place(earlier)}; now by {_place(plugin)}. "
            "Register only one of them, or give one of them another id."
        )
    _registered[group][plugin_id] = plugin


def _place(plugin: Any, separator: str = ":") -> str:
    """Return where a plug-in is defined, or its repr if that is not known, as for functools.partial."""
    name = getattr(plugin, "__qualname__", None)
    return f"{plugin.__module__}{separator}{name}" if isinstance(name, str) else repr(plugin)


def find_partitioner(plugin_id: str) -> Partitioner:
    """Make the partitioner of a plug-in; UnknownPluginError or PluginLoadError if it cannot be found or made."""
    from exir_lowering.plugins.backend import Partitioner

    partitioner = factory = load(PARTITIONERS, plugin_id)
    if callable(factory) and not isinstance(factory, Partitioner):
        partitioner = create(f"Partitioner {plugin_id!r}: calling {factory!r}", factory)
    if not isinstance(partitioner, Partitioner):
        raise PluginLoadError(
            f"Partitioner {plugin_id!r}: got {type(partitioner).__name__}, expected an ExecuTorch Partitioner or a "
            f"function without arguments that returns one. Correct the entry point in group {PARTITIONERS!r}."
        )
    return partitioner


def find_backend(backend_id: str, given: Mapping[str, Any] | None = None) -> Backend:
    """Find a backend: in the call's `backends=`, among the plug-ins, then among ExecuTorch's classes by name."""
    if given is not None and backend_id in given:
        return as_backend(backend_id, given[backend_id])
    if backend_id in known_ids(BACKENDS):
        return as_backend(backend_id, load(BACKENDS, backend_id))
    classes = _details_classes()
    named = classes.get(backend_id, [])
    if len(named) > 1:
        listed = " and ".join(sorted(f"{one.__module__}.{one.__qualname__}" for one in named))
        raise PluginLoadError(
            f"Two ExecuTorch backend classes are called {backend_id!r}: {listed}. A class is found by its name alone, "
            f"so rename one of them, or choose one with backends={{{backend_id!r}: TheClass}}."
        )
    if named:
        return as_backend(backend_id, named[0])
    known = sorted({*(given or ()), *known_ids(BACKENDS), *classes})
    raise UnknownPluginError(
        f"Backend {backend_id!r} was not found: not in backends=, not registered, in no entry point of group "
        f"{BACKENDS!r}, and no imported ExecuTorch BackendDetails class has that name.{_suggest(backend_id, known)} "
        f"Import the module that defines the class, install the package that provides it, or pass backends={{...}}.",
        plugin_id=backend_id,
    )


def as_backend(backend_id: str, candidate: Any) -> Backend:
    """Turn a Backend object, a Backend class or a BackendDetails class into a Backend, or raise a PluginLoadError."""
    from executorch.exir.backend.backend_details import BackendDetails

    from exir_lowering.plugins.backend import PARALLEL, Backend, ExecutorchBackend

    if isinstance(candidate, type) and issubclass(candidate, BackendDetails):
        if isinstance(adapted := getattr(candidate, "backend", None), Backend):  # by `as_backend_details`
            return adapted
        own = _CORRECTED.get(f"{candidate.__module__}.{candidate.__qualname__}")
        return (ExecutorchBackend if own is None else load_class(own))(candidate)
    backend = candidate
    if isinstance(candidate, type) and issubclass(candidate, Backend):
        backend = note_made(create(f"Backend {backend_id!r}: creating {_place(candidate, '.')}", candidate))
    if not isinstance(backend, Backend):
        raise PluginLoadError(
            f"Backend {backend_id!r}: got {candidate!r}, expected an exir_lowering.Backend (object or class) or an "
            f"ExecuTorch BackendDetails class."
        )
    if backend.parallel not in PARALLEL:
        raise PluginLoadError(
            f"Backend {backend_id!r}: {_place(type(backend), '.')} has parallel = {backend.parallel!r}, expected one "
            f"of {', '.join(map(repr, PARALLEL))}."
        )
    return backend


def create(what: str, factory: Callable[[], _Plugin]) -> _Plugin:
    """Make a plug-in without arguments; PluginLoadError, which begins with `what`, if that raises."""
    with explained(lambda error: PluginLoadError(f"{what} raised {exception_text(error)}")):
        return factory()


def find_delegate(delegate_id: str, given: Mapping[str, Any] | None = None) -> Delegate:
    """Find a delegate by the id of a backend in a file: in the call's `delegates=`, then among the plug-ins."""
    if given is not None and delegate_id in given:
        return as_delegate(delegate_id, given[delegate_id])
    if delegate_id in known_ids(DELEGATES):
        return as_delegate(delegate_id, load(DELEGATES, delegate_id))
    known = sorted({*(given or ()), *known_ids(DELEGATES)})
    raise UnknownPluginError(
        f"A Python delegate {delegate_id!r} was not found: not in delegates=, not registered, and in no entry point of "
        f"group {DELEGATES!r}.{_suggest(delegate_id, known)} Install the package that provides it, or pass "
        f"delegates={{{delegate_id!r}: TheDelegate()}}.",
        plugin_id=delegate_id,
    )


def as_delegate(delegate_id: str, candidate: Any) -> Delegate:
    """Turn a Delegate object or class into a Delegate; PluginLoadError for anything else, or if creating it raises."""
    delegate = candidate
    if isinstance(candidate, type) and issubclass(candidate, Delegate):
        delegate = create(f"Delegate {delegate_id!r}: creating {_place(candidate, '.')}", candidate)
    if not isinstance(delegate, Delegate):
        raise PluginLoadError(
            f"Delegate {delegate_id!r}: got {candidate!r}, expected an exir_lowering.Delegate (object or class)."
        )
    return delegate


def check_delegates(given: Any) -> Mapping[str, Any]:
    """Return the `delegates=` of a call, a mapping or a sequence, by id; InputError if it is something else."""
    if given is None:
        return {}
    if isinstance(given, Mapping) and all(isinstance(key, str) and key for key in given):
        return given
    expected = "expected a mapping from ids to delegates, or a sequence of delegates, such as [MyDelegate()]"
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise InputError(f"delegates={given!r}: {expected}.")
    by_id: dict[str, Any] = {}
    for candidate in given:
        kind = candidate if isinstance(candidate, type) else type(candidate)
        delegate_id = getattr(candidate, "delegate_id", None)
        if not issubclass(kind, Delegate) or not isinstance(delegate_id, str) or not delegate_id:
            raise InputError(
                f"delegates: got {candidate!r}, which is not a delegate or has no delegate_id; {expected}."
            )
        if delegate_id in by_id:
            raise InputError(f"delegates: two have the id {delegate_id!r}: {by_id[delegate_id]!r} and {candidate!r}.")
        by_id[delegate_id] = candidate
    return by_id


def check_backends(given: Any) -> None:
    """Check the `backends=` argument of a call; InputError if it is not a mapping from ids."""
    if given is not None and (not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given)):
        raise InputError(f"backends={given!r}: expected a mapping from ids to backends, such as {{'My': My()}}.")


@lru_cache(maxsize=len(GROUPS))
def _entries(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def known_ids(group: str) -> set[str]:
    """Return the ids of a group: registered ones, and those of entry points."""
    return {*_registered[group], *(entry.name for entry in _entries(group))}


def registered(group: str) -> Mapping[str, Any]:
    """Return what was registered for a group in this process, by id."""
    return dict(_registered[group])


def load(group: str, plugin_id: str) -> Any:
    """Return a plug-in. A class may be both registered and the object of an entry point of its package."""
    providers = providers_of(group, plugin_id)
    if not providers:
        raise UnknownPluginError(
            f"No installed distribution provides {plugin_id!r} in group {group!r}."
            f"{_suggest(plugin_id, sorted(known_ids(group)))} `exir-lower plugins` lists what is installed.",
            plugin_id=plugin_id,
        )
    if len(providers) > 1:
        raise PluginLoadError(
            f"{plugin_id!r} in group {group!r} is provided twice: by {' and '.join(providers)}. Uninstall one of them, "
            "or remove its registration."
        )
    if plugin_id in _registered[group]:
        return _registered[group][plugin_id]
    entry = next(entry for entry in _entries(group) if entry.name == plugin_id)
    try:
        with without_logs():
            return entry.load()
    except MemoryError:
        raise
    except Exception as error:
        # A plug-in that raises an ImportError itself says what to do.
        if type(error) is ImportError and error.name and error.name not in sys.modules:
            raise PluginLoadError(str(error)) from error
        raise PluginLoadError(
            f"{plugin_id!r} in group {group!r}, provided by {_provider(entry)}, could not be imported: "
            f"{exception_text(error)}"
        ) from error


def providers_of(group: str, plugin_id: str) -> list[str]:
    """Return who provides an id, sorted: distributions with their objects, and other registrations."""
    entries = [entry for entry in _entries(group) if entry.name == plugin_id]
    providers = {_provider(entry) for entry in entries}
    if plugin_id in _registered[group]:
        plugin, same = _registered[group][plugin_id], False
        for entry in entries:  # one may lead to the registered object, by the name of a re-export
            with ignoring_errors():
                same = same or entry.load() is plugin
        providers |= set() if same else {f"this process ({_place(plugin)})"}
    return sorted(providers)


@lru_cache(maxsize=64)
def _provider(entry: EntryPoint) -> str:
    """Return a distribution's name and version, which are read from its files, and what of it is meant."""
    known = entry.dist
    return f"{'an unknown distribution' if known is None else f'{known.name} {known.version}'} ({entry.value})"


def _details_classes() -> dict[str, list[type[BackendDetails]]]:
    """Return ExecuTorch's classes by name. One that is defined again in the same place replaces the older one."""
    from executorch.exir.backend.backend_details import BackendDetails

    places = {(one.__module__, one.__qualname__): one for one in BackendDetails.__subclasses__()}
    found: dict[str, list[type[BackendDetails]]] = {}
    for one in places.values():
        found.setdefault(one.__name__, []).append(one)
    return found


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One installed plug-in."""

    group: str  # the entry-point group
    id: str  # the entry's name
    provider: str  # the distribution and object
    error: str  # why it cannot be used, "" if it can
    missing: str = ""  # the module, of something else, that is not installed, if that is why


def list_installed(*, check: bool = True) -> Iterator[PluginInfo]:
    """Describe every plug-in; when it is checked it is imported, and a broken one has an error."""
    for group in GROUPS:
        for plugin_id in sorted(known_ids(group)):
            error = missing = ""
            try:
                if check:
                    load(group, plugin_id)
            except PluginLoadError as failure:
                cause, error = failure.__cause__, str(failure)
                if isinstance(cause, ImportError) and cause.name not in sys.modules:
                    missing = cause.name or ""
            for provider in providers_of(group, plugin_id):
                yield PluginInfo(group, plugin_id, provider, error, missing)


def _suggest(wanted: str, known: list[str]) -> str:
    stems = {wanted.lower().removesuffix(kind) for kind in ("", "partitioner", "backend", "delegate")}
    sure = [name for name in known if name.lower() in stems]
    return did_you_mean(wanted, known, f" Known: {', '.join(known) or 'none'}.", most=3, sure=sure)
