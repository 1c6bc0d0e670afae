"""Load a `.pte` file, and run its methods in the ExecuTorch runtime that comes with the wheel."""

from __future__ import annotations

import contextlib
import difflib
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from exir_lowering import _upstream, registry
from exir_lowering.delegate import Delegate
from exir_lowering.errors import BackendFailure, BackendUnavailableError, InputError, LoweringError, UnknownPluginError
from exir_lowering.runtime import format as file_format
from exir_lowering.runtime.bridge import LOCK, bridge, registered
from exir_lowering.runtime.flatbuffer import CorruptError
from exir_lowering.runtime.inputs import prepare

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedProgram:
    """A `.pte` file that is open in the runtime; `load` makes it.

    Methods are set up when they first run, those that call Python delegates when the file is loaded. What a method
    writes into its buffers it finds there at its next run, and no other method changes it, unless the file was made
    with `share_mutable_buffers`: then its methods share them.
    """

    _name: str
    _source: str | bytes
    _data: str | None
    _methods: Mapping[str, file_format.Method]
    _programs: dict[str, Any]
    _delegates: Mapping[str, Delegate]
    _delegated: frozenset[str]
    _ready: dict[str, Any] = field(default_factory=dict)

    @property
    def method_names(self) -> tuple[str, ...]:
        """The names of the methods, sorted."""
        return tuple(self._methods)

    def run(self, method: str, *inputs: Any) -> list[Any]:
        """Run a method.

        Args:
            method: Its name.
            inputs: Its inputs as they were at export, flat: what a list or dict holds one by one. A tensor may be
                laid out in memory in any way, and may require a gradient. A number has to be the one at export.

        Returns:
            The outputs, flat. Tensors belong to the caller: no later run changes them.

        Raises:
            InputError: There is no such method, an input is not what the method takes, the runtime has no kernel for
                one of its operators, or it failed to run. The program can be run again; after a run that failed
                half-way, buffers that the method had written before have their new values.
            BackendFailure: A Python delegate raised; its exception is the `__cause__`.
            BackendContractError: A Python delegate returned something else than the file says.
        """
        found = self._methods.get(method) if isinstance(method, str) else None
        if found is None:
            raise InputError(self._unknown(method))
        where = self._where(found)
        given = prepare(where, found, inputs)
        with LOCK:
            ready = self._load(found)
            try:
                if found.name in self._delegated:
                    with bridge().listening():
                        outputs = ready(given, clone_outputs=True)
                else:
                    outputs = ready(given, clone_outputs=True)
            except LoweringError:
                raise  # by a delegate
            except Exception as error:
                shapes = ", ".join(str(list(item.shape)) for item in given if isinstance(item, torch.Tensor))
                raise InputError(
                    f"{where} failed in the ExecuTorch runtime: {error}. The runtime's own lines above this one, on "
                    f"stderr, say where. The inputs have the types that the file asks for (tensors of shapes "
                    f"{shapes or 'none'}), so look at their values, and at sizes that were fixed when the model was "
                    "exported: a file tells only how large a dynamic shape may be."
                ) from error
            return list(outputs)

    def _load(self, method: file_format.Method) -> Any:
        """Return the runtime's method, set up at its first use."""
        if method.name in self._ready:
            return self._ready[method.name]
        where = self._where(method)
        missing = sorted(set(method.operators) - _upstream.executorch_runtime().operator_registry.operator_names)
        if missing:
            raise InputError(
                f"{where} cannot run: the ExecuTorch runtime here has no kernel for {', '.join(missing)}. Import the "
                "library that has it (custom and quantized operators have one), or change the model so that the "
                "operator is decomposed or delegated."
            )
        program = self._programs[method.name]
        try:
            self._ready[method.name] = self._set_up(method)
        except LoweringError:
            raise  # by a delegate
        except Exception as error:
            needs = f" It calls {', '.join(method.backends)}." if method.backends else ""
            raise InputError(
                f"{where} cannot be set up by the ExecuTorch runtime: {error}.{needs} The runtime's own lines above "
                "this one, on stderr, say why: the file may be damaged, be made for another version of a backend, or "
                "keep weights in a .ptd data file that was not given as data=."
            ) from error
        # Setting up a method writes its initial state. Those that share it are set up at once, before one changes it;
        # one that cannot be says so when it is run.
        for name in self._methods:
            if self._programs[name] is program and name not in self._ready:
                with contextlib.suppress(Exception):
                    self._ready[name] = self._set_up(self._methods[name])
        return self._ready[method.name]

    def _set_up(self, method: file_format.Method) -> Any:
        program = self._programs[method.name]
        if method.name not in self._delegated:
            return program.load_method(method.name)
        with bridge().setting_up(self._where(method), method.delegations, self._delegates):
            return program.load_method(method.name)

    def __post_init__(self) -> None:
        """Set up the methods that call Python delegates, but for those that lack a kernel, which say so when run."""
        if not self._delegated:
            return
        kernels = _upstream.executorch_runtime().operator_registry.operator_names
        for name in sorted(self._delegated):
            if kernels.issuperset(self._methods[name].operators):
                self._load(self._methods[name])

    def _where(self, method: file_format.Method) -> str:
        return f"Method {method.name!r} of {self._name}"

    def _unknown(self, method: object) -> str:
        known = ", ".join(map(repr, self.method_names))
        if not isinstance(method, str):
            return (
                f"run: got a {type(method).__name__} as the name of a method of {self._name}, expected one of {known}."
            )
        close = difflib.get_close_matches(method, self.method_names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return f"run: {self._name} has no method {method!r}; it has {known}.{hint}"

    def __repr__(self) -> str:
        return f"LoadedProgram({self._name}: {', '.join(self.method_names)})"

    def __reduce__(self) -> Any:
        raise TypeError("A LoadedProgram is tied to the runtime of its process; load the file in the other one.")


def load(
    source: str | os.PathLike[str] | bytes,
    *,
    data: str | os.PathLike[str] | None = None,
    delegates: Mapping[str, Delegate | type[Delegate]] | Sequence[Delegate | type[Delegate]] | None = None,
) -> LoadedProgram:
    """Open a `.pte` file in the ExecuTorch runtime.

    The file's tables are checked first, as the runtime ends the process on some damaged files. Damage inside of weights
    or of a backend's payload cannot be seen there: weights are just numbers, a payload only its backend can judge.

    Args:
        source: The path of the file, or its content. A file is mapped, not read; it must not be changed in place while
            the program is in use.
        data: The path of the `.ptd` data file, needed if the file was emitted with `external_constants`. There is no
            search for it: `Artifact.save` writes it beside the `.pte` file, by the name in `Artifact.data_files`.
        delegates: Delegates, by the id of the backend that they execute or in a sequence. They come before those of
            the entry points. A backend that the runtime has itself cannot be replaced. Those that the file does not
            need are not used.

    Returns:
        The program. Its methods are set up when they first run; those that call Python delegates are set up here, so
        that the delegates compile their payloads now.

    Raises:
        InputError: The file cannot be read, is damaged, or is no `.pte` file; weights are in a data file that was not
            given, or are not in the one that was.
        BackendUnavailableError: A method needs a backend that neither the runtime of this machine nor a delegate has,
            its delegate is not available here, or Python delegates cannot be used here: they need a C++ compiler once.
        BackendFailure: A delegate raised when it compiled a payload; its exception is the `__cause__`.
        PluginLoadError: A delegate could not be made, or its id is provided twice.
    """
    given = registry.check_delegates(delegates)
    name, opened = _source(source)
    if isinstance(opened, str):
        methods = _read(name, Path(opened), file_format.read_program)
    else:
        methods = _parse(name, memoryview(opened), file_format.read_program)
    found = _find_delegates(name, methods, given)
    data_path = _check_data(name, opened, data, methods)
    with LOCK:
        if found:
            bridge().register(sorted(found), _upstream.executorch_runtime().backend_registry.registered_backend_names)
        try:
            if _shares_state(methods):
                one = _upstream.open_program(opened, data_path)
                programs = dict.fromkeys(methods, one)
            else:
                programs = {method: _upstream.open_program(opened, data_path) for method in methods}
        except Exception as error:
            raise InputError(
                f"{name} cannot be loaded: the ExecuTorch runtime refuses it: {error}. The runtime's own lines above "
                "this one, on stderr, say why: most likely the file is damaged. Make or copy it again."
            ) from error
        delegated = frozenset(method for method in methods if not found.keys().isdisjoint(methods[method].backends))
        return LoadedProgram(name, opened, data_path, methods, programs, found, delegated)


def _source(source: object) -> tuple[str, str | bytes]:
    """Return how to call a source in messages, and its path or content."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        content = bytes(source)
        return f"the .pte content of {len(content)} bytes", content
    path = _path(source, "load", "the path or the content of a .pte file")
    return repr(path), path


def _path(given: object, who: str, expected: str) -> str:
    if isinstance(given, (str, os.PathLike)):
        return os.fsdecode(given)
    raise InputError(f"{who}: got a {type(given).__name__}, expected {expected}.")


def _read(name: str, path: Path, parse: Callable[[memoryview], Result]) -> Result:
    """Parse a file in place: it is mapped, and only its tables are read."""
    if not path.exists():
        raise InputError(f"{name} cannot be loaded: there is no such file.")
    if not path.is_file():
        kind = "a directory" if path.is_dir() else "not a regular file"
        raise InputError(f"{name} cannot be loaded: it is {kind}.")
    try:
        with path.open("rb") as file:
            empty = os.fstat(file.fileno()).st_size == 0
            content = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise InputError(f"{name} cannot be loaded: {error}.") from error
    return _parse(name, memoryview(content), parse)


def _parse(name: str, content: memoryview, parse: Callable[[memoryview], Result]) -> Result:
    if not content:
        raise InputError(f"{name} cannot be loaded: it is empty.")
    try:
        return parse(content)
    except CorruptError as error:
        # Without the cause, whose frames would keep the file mapped.
        message = str(error)
    raise InputError(
        f"{name} cannot be loaded: it is damaged, or not what ExecuTorch writes: {message}. Make or copy it again."
    )


def _find_delegates(
    name: str, methods: Mapping[str, file_format.Method], given: Mapping[str, Any]
) -> Mapping[str, Delegate]:
    """Find a delegate for each backend that the runtime does not have itself."""
    runtime = _upstream.executorch_runtime().backend_registry
    own = sorted(set(runtime.registered_backend_names) - set(registered()))
    replaced = sorted(set(own) & set(given))
    if replaced:
        raise InputError(
            f"delegates: the ExecuTorch runtime has {' and '.join(map(repr, replaced))} itself, and keeps it. Give the "
            "delegate another id, in the backend that makes the file too."
        )
    found: dict[str, Delegate] = {}
    for method in methods.values():
        for backend in method.backends:
            if backend in found or (backend in own and runtime.is_available(backend)):
                continue
            needs = f"{name} cannot be loaded: method {method.name!r} needs the backend {backend!r}, and"
            if backend in own:
                raise BackendUnavailableError(
                    f"{needs} the ExecuTorch runtime here says that it is not available. It has {', '.join(own)}. "
                    "Lower the model for another one, or install what the backend needs."
                )
            try:
                found[backend] = registry.find_delegate(backend, given)
            except UnknownPluginError as error:
                raise BackendUnavailableError(
                    f"{needs} the ExecuTorch runtime here does not have it. It has {', '.join(own) or 'none'}. {error} "
                    "Or lower the model for one of the runtime's backends."
                ) from None
            _check_available(needs, backend, found[backend])
    return found


def _check_available(needs: str, backend: str, delegate: Delegate) -> None:
    who = f"{type(delegate).__module__}.{type(delegate).__qualname__}"
    try:
        available = delegate.is_available()
    except Exception as error:
        raise BackendFailure(
            f"{needs} its delegate {who} failed in is_available: {type(error).__name__}: {error}"
        ) from error
    if not available:
        raise BackendUnavailableError(
            f"{needs} its delegate {who} says that it is not available on this machine. Install what it needs, or load "
            "the file where it is available."
        )


def _check_data(name: str, source: str | bytes, data: object, methods: Mapping[str, file_format.Method]) -> str | None:
    """Check that the data file has the weights that the program asks for; return its path."""
    needed = {weight: method.name for method in methods.values() for weight in method.external}
    if data is None:
        if not needed:
            return None
        beside = sorted(file.name for file in Path(source).parent.glob("*.ptd")) if isinstance(source, str) else []
        found = f" Beside it are: {', '.join(beside)}." if beside else ""
        raise InputError(
            f"{name} cannot be loaded: it lacks {len(needed)} of its weights ({_some(sorted(needed))}), which are in a "
            f".ptd data file. Pass its path as data=; saving an artifact writes it beside the .pte file.{found}"
        )
    path = _path(data, "load: data", "the path of a .ptd file")
    names = _read(repr(path), Path(path), file_format.read_data_names)
    missing = sorted(set(needed) - names)
    if missing:
        raise InputError(
            f"{name} cannot be loaded: the data file {path!r} lacks {len(missing)} of the {len(needed)} weights that "
            f"are to be in it ({_some(missing)}); it has {_some(sorted(names)) or 'none'}. Pass the data file that was "
            "saved with this program."
        )
    return path


def _shares_state(methods: Mapping[str, file_format.Method]) -> bool:
    """Tell whether methods were planned to share their buffers: each has the same memory 2 for them, and no memory 3.

    They work on one memory only in one program of the runtime. In all other files each method gets a program of its
    own, as methods of one program share all memory, so that one method's intermediate values destroy another's state.
    """
    arenas = [method.arenas for method in methods.values()]
    return len(arenas) > 1 and all(len(sizes) == 3 and sizes[2] == arenas[0][2] > 0 for sizes in arenas)


def _some(names: Any) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
