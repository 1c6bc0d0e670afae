"""Run the methods of a file in the ExecuTorch runtime that comes with the wheel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from exir_lowering._upstream import installed, locks
from exir_lowering.errors import BackendUnavailableError, InputError
from exir_lowering.plugins.availability import Missing
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.saving import TemporaryFolder
from exir_lowering.runtime.engine import Engine, TraceEvent, explaining, read_etdump
from exir_lowering.runtime.inputs import look_at
from exir_lowering.runtime.native.bridge import bridge
from exir_lowering.runtime.source import ProgramFile, Unavailable, find_delegates, rename_backends

_INTERPRETER = 'load(..., engine="interpreter") runs the file without it, in Python: not in the real runtime.'


@dataclass(frozen=True, slots=True, eq=False)
class NativeEngine(Engine[Any]):
    """A file that is open in ExecuTorch's runtime; `open_native` makes it."""

    name = "runtime"

    # The runtime's program for each method. Methods of one program share all memory, so that one method's intermediate
    # values overwrite another's state: each has a program of its own, unless they share their state.
    programs: Mapping[str, Any]

    def run(self, method: MethodSpec, inputs: Sequence[Any]) -> list[Any]:
        """Run a method; see `Engine`."""
        ready = self.prepare(method)
        listening = bridge().listening() if self.calls_delegates(method) else contextlib.nullcontext()
        with explaining(lambda error: self._describe_failure(method, inputs, error)), listening:
            return list(ready(inputs, clone_outputs=True))

    def _describe_failure(self, method: MethodSpec, inputs: Sequence[Any], error: Exception) -> str:
        return (
            f"{self.file.where(method.name)} failed in the ExecuTorch runtime: {error}. The runtime's own lines above "
            f"this one, on stderr, say where. {look_at(inputs)}"
        )

    def record(self, method: MethodSpec, inputs: Sequence[Any], runs: int) -> list[TraceEvent]:
        """Run a method in a separate program, and record what it does; see `Engine`."""
        where = f"{self.file.where(method.name)} cannot be profiled"
        with explaining(lambda error: f"{where}: the ExecuTorch runtime refuses its file: {error}."):
            program = self.file.open(profiled=True)
        others = dict.fromkeys(self.file.methods.keys() - {method.name})  # not to be set up, as what shares state is
        engine = NativeEngine(self.file, self.delegates, {method.name: program}, ready=others, missing=self.missing)
        for _ in range(runs):
            engine.run(method, inputs)
        with (
            explaining(lambda error: f"{where}: what the runtime recorded cannot be read: {error}."),
            TemporaryFolder() as folder,
        ):
            path = folder / "profile.etdp"
            program.write_etdump_result_to_file(str(path))
            return read_etdump(path.read_bytes())

    def _set_up(self, method: MethodSpec) -> Any:
        where, program = self.file.where(method.name), self.programs[method.name]
        needs = f" It calls {', '.join(method.backends)}." if method.backends else ""
        serving: Any = contextlib.nullcontext()
        if self.calls_delegates(method):
            serving = bridge().setting_up(where, method.delegations, self.delegates, self.file.debug.lines(method.name))
        with (
            explaining(
                lambda error: (
                    f"{where} cannot be set up by the ExecuTorch runtime: {error}.{needs} The runtime's own lines "
                    "above this one, on stderr, say why: the file may be damaged, be made for another version of a "
                    "backend, or keep weights in a .ptd data file that was not given as data=."
                )
            ),
            serving,
        ):
            return program.load_method(method.name)


def open_native(file: ProgramFile, given: Mapping[str, Any], unavailable: Unavailable) -> NativeEngine:
    """Open a file in ExecuTorch's runtime, and find its Python delegates."""
    failure = installed.runtime_failure()
    if failure is not None:
        raise BackendUnavailableError(
            f"{file.name} cannot be loaded: {failure}. Install executorch again from its wheel for this platform.\n"
            f"{_INTERPRETER}"
        )
    _check_given(given)
    found, missing = find_delegates(file, given, unavailable)
    taken = installed.own_backends().intersection(found)
    if taken:
        file, names = rename_backends(file, sorted(taken))
        found = {names.get(backend, backend): delegate for backend, delegate in found.items()}
    if found:
        try:
            _register(sorted(found))
        except BackendUnavailableError as error:
            missing.update(dict.fromkeys(found, Missing("Python delegates cannot be used here", str(error))))
            if file.needed(missing):
                raise
            found = {}
    methods, sharing = file.methods, file.sharing
    with explaining(
        lambda error: (
            f"{file.name} cannot be loaded: the ExecuTorch runtime refuses it: {error}. The runtime's own lines above "
            "this one, on stderr, say why: most likely the file is damaged. Make or copy it again."
        )
    ):
        shared = file.open() if sharing else None
        programs = {method: shared if method in sharing else file.open() for method in methods}
    return NativeEngine(file, found, programs, missing=missing)


@contextmanager
def serving(delegates: Mapping[str, Delegate]) -> Iterator[None]:
    """Make the runtime call delegates in programs that something else opens, while the context lasts."""
    _check_given(delegates)
    with locks.engine():
        _register(sorted(delegates))
    with bridge().serving(delegates):
        yield


def _register(ids: Sequence[str]) -> None:
    try:
        bridge().register(ids)
    except BackendUnavailableError as error:
        raise BackendUnavailableError(f"{error}\n{_INTERPRETER}") from error.__cause__


def _check_given(given: Mapping[str, Any]) -> None:
    replaced = sorted(installed.own_backends() & set(given))
    if replaced:
        raise InputError(
            f"delegates: the ExecuTorch runtime has {' and '.join(map(repr, replaced))} itself, which a delegate "
            "cannot replace. Give the delegate another id, also in the backend that makes the file."
        )
