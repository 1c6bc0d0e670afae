"""Run the methods of a file in the ExecuTorch runtime that comes with the wheel."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exir_lowering import _upstream
from exir_lowering._upstream import locks
from exir_lowering.errors import BackendUnavailableError, InputError, LoweringError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.plugins import availability
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.format import MethodSpec
from exir_lowering.runtime.fallback import renamed
from exir_lowering.runtime.find import Unavailable, find_delegates
from exir_lowering.runtime.inputs import look_at
from exir_lowering.runtime.native import etdump
from exir_lowering.runtime.native.bridge import bridge
from exir_lowering.runtime.source import ProgramFile
from exir_lowering.runtime.trace import TraceEvent

_INTERPRETER = 'load(..., engine="interpreter") runs the file without it, in Python: not in the real runtime.'


@dataclass(frozen=True, slots=True, eq=False)
class NativeEngine:
    """A file that is open in ExecuTorch's runtime; `open_native` makes it.

    Attributes:
        file: The file.
        programs: The runtime's program for each method. Methods of one program share all memory, so that one method's
            intermediate values destroy another's state: each has a program of its own, unless they share their state.
        delegates: The file's Python delegates, by id.
        delegated: The methods that call one.
        ready: The runtime's methods that were set up.
    """

    file: ProgramFile
    programs: Mapping[str, Any]
    delegates: Mapping[str, Delegate]
    delegated: frozenset[str]
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What `load` calls it."""
        return "runtime"

    def run(self, method: MethodSpec, inputs: Sequence[Any]) -> list[Any]:
        """Run a method; see `Engine`."""
        where = self.file.where(method.name)
        ready = self._load(method)
        try:
            with bridge().listening() if method.name in self.delegated else contextlib.nullcontext():
                return list(ready(inputs, clone_outputs=True))
        except LoweringError:
            raise  # by a delegate
        except Exception as error:
            let_through(error)
            raise InputError(
                f"{where} failed in the ExecuTorch runtime: {error}. The runtime's own lines above this one, on "
                f"stderr, say where. {look_at(inputs)}"
            ) from error

    def record(self, method: MethodSpec, inputs: Sequence[Any], runs: int) -> list[TraceEvent]:
        """Run a method in a program of its own, and record what it does; see `Engine`."""
        where = self.file.where(method.name)
        try:
            program = self.file.open(profiled=True)
        except InputError:
            raise  # another file has taken its place
        except Exception as error:
            let_through(error)
            raise InputError(
                f"{where} cannot be profiled: the ExecuTorch runtime refuses its file: {error}."
            ) from error
        programs = {**dict.fromkeys(self.file.methods), method.name: program}
        engine = NativeEngine(self.file, programs, self.delegates, self.delegated)
        for _ in range(runs):
            engine.run(method, inputs)
        try:
            with tempfile.TemporaryDirectory(prefix="exir-lowering-") as folder:
                path = Path(folder) / "profile.etdp"
                program.write_etdump_result_to_file(str(path))
                return etdump.read(path.read_bytes())
        except (OSError, RuntimeError, CorruptError) as error:
            let_through(error)
            raise InputError(
                f"{where} cannot be profiled: what the runtime recorded cannot be read: {error}."
            ) from error

    def set_up_delegated(self) -> None:
        """Set up the methods that call Python delegates, but for those that lack a kernel, which say so when run."""
        if not self.delegated:
            return
        kernels = _upstream.executorch_runtime().operator_registry.operator_names
        for name in sorted(self.delegated):
            if kernels.issuperset(self.file.methods[name].operators):
                self._load(self.file.methods[name])

    def _load(self, method: MethodSpec) -> Any:
        """Return the runtime's method, set up at its first use."""
        if method.name in self.ready:
            return self.ready[method.name]
        where = self.file.where(method.name)
        missing = sorted(set(method.operators) - _upstream.executorch_runtime().operator_registry.operator_names)
        if missing:
            raise InputError(
                f"{where} cannot run: the ExecuTorch runtime here has no kernel for {', '.join(missing)}. Import the "
                "library that has it (custom operators have one), or change the model so that "
                "the operator is decomposed or delegated."
            )
        program = self.programs[method.name]
        try:
            self.ready[method.name] = self._set_up(method)
        except LoweringError:
            raise  # by a delegate
        except Exception as error:
            let_through(error)
            needs = f" It calls {', '.join(method.backends)}." if method.backends else ""
            raise InputError(
                f"{where} cannot be set up by the ExecuTorch runtime: {error}.{needs} The runtime's own lines above "
                "this one, on stderr, say why: the file may be damaged, be made for another version of a backend, or "
                "keep weights in a .ptd data file that was not given as data=."
            ) from error
        # Setting up a method writes its initial state. Those that share it are set up at once, before one changes it;
        # one that cannot be says so when it is run.
        for name in self.file.methods:
            if self.programs[name] is program and name not in self.ready:
                try:
                    self.ready[name] = self._set_up(self.file.methods[name])
                except Exception as error:
                    let_through(error)
        return self.ready[method.name]

    def _set_up(self, method: MethodSpec) -> Any:
        program = self.programs[method.name]
        if method.name not in self.delegated:
            return program.load_method(method.name)
        lines = self.file.debug.lines(method.name)
        with bridge().setting_up(self.file.where(method.name), method.delegations, self.delegates, lines):
            return program.load_method(method.name)


def open_native(file: ProgramFile, given: Mapping[str, Any], unavailable: Unavailable) -> NativeEngine:
    """Open a file in ExecuTorch's runtime, and set up its methods that call Python delegates.

    Args:
        file: The file.
        given: The call's delegates, by id.
        unavailable: What to do about a backend that is missing here.

    Raises:
        InputError: The runtime refuses the file, or a delegate was given for a backend that it has itself.
        BackendUnavailableError: Nobody has a backend that the file needs, or Python delegates cannot be used here.
        BackendFailure: A delegate raised.
        PluginLoadError: A delegate could not be made, or its id is provided twice.
    """
    failure = availability.runtime_failure()
    if failure is not None:
        raise BackendUnavailableError(
            f"{file.name} cannot be loaded: {failure}. Install executorch again from its wheel for this platform.\n"
            f"{_INTERPRETER}"
        )
    _check_given(given)
    found = find_delegates(file, given, unavailable)
    taken = availability.own_backends().intersection(found)
    if taken:
        file, names = renamed(file, sorted(taken))
        found = {names.get(backend, backend): delegate for backend, delegate in found.items()}
    if found:
        _register(sorted(found))
    methods = file.methods
    try:
        if file.shares_state:
            programs = dict.fromkeys(methods, file.open())
        else:
            programs = {method: file.open() for method in methods}
    except InputError:
        raise  # another file has taken its place
    except Exception as error:
        let_through(error)
        raise InputError(
            f"{file.name} cannot be loaded: the ExecuTorch runtime refuses it: {error}. The runtime's own lines above "
            "this one, on stderr, say why: most likely the file is damaged. Make or copy it again."
        ) from error
    delegated = frozenset(method for method in methods if not found.keys().isdisjoint(methods[method].backends))
    engine = NativeEngine(file, programs, found, delegated)
    engine.set_up_delegated()
    return engine


@contextmanager
@locks.uses_engine
def serving(delegates: Mapping[str, Delegate]) -> Iterator[None]:
    """Make the runtime call delegates in programs that something else opens, while the context lasts.

    Raises:
        InputError: The runtime has a backend of one of the ids itself.
        BackendUnavailableError: Python delegates cannot be used here.
    """
    _check_given(delegates)
    with locks.engine():
        _register(sorted(delegates))
    with bridge().serving(delegates):
        yield


def _register(ids: Sequence[str]) -> None:
    taken = _upstream.executorch_runtime().backend_registry.registered_backend_names
    try:
        bridge().register(ids, taken)
    except BackendUnavailableError as error:
        raise BackendUnavailableError(f"{error}\n{_INTERPRETER}") from error.__cause__


def _check_given(given: Mapping[str, Any]) -> None:
    replaced = sorted(availability.own_backends() & set(given))
    if replaced:
        raise InputError(
            f"delegates: the ExecuTorch runtime has {' and '.join(map(repr, replaced))} itself, and keeps it. Give the "
            "delegate another id, in the backend that makes the file too."
        )
