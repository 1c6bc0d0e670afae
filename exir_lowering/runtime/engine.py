"""Run the methods of a file in the ExecuTorch runtime that comes with the wheel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from exir_lowering._upstream import installed, locks
from exir_lowering._upstream.ambient import neutral
from exir_lowering._upstream.runtime import load_language_model_kernels
from exir_lowering._upstream.stderr import without_noise
from exir_lowering.errors import BackendUnavailableError, InputError, LoweringError, explained, ignoring_errors
from exir_lowering.plugins.availability import Missing
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.pte.format import MethodSpec
from exir_lowering.pte.saving import TemporaryFolder
from exir_lowering.runtime.native.bridge import bridge
from exir_lowering.runtime.profiling import TraceEvent, read_etdump
from exir_lowering.runtime.source import ProgramFile, Unavailable, find_delegates, rename_backends


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """A file that is open in ExecuTorch's runtime; `open_engine` makes it. Methods raise what `LoadedProgram.run` does.

    They are called with the lock of `locks.engine` held.
    """

    file: ProgramFile
    delegates: Mapping[str, Delegate]  # in Python, by id
    # The runtime's program for each method. Methods of one program share all memory, so that one method's intermediate
    # values overwrite another's state: each has a program of its own, unless they share their state.
    programs: dict[str, Any]
    ready: dict[str, Any] = field(default_factory=dict)  # the methods that were set up
    # The methods that are running, each after the number of `locks.epoch`.
    running: set[tuple[int, str]] = field(default_factory=set)
    ran: set[str] = field(default_factory=set)  # the methods that have run, and let the runtime set up its threads
    missing: Mapping[str, Missing] = field(default_factory=dict)  # backends that nothing here executes

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """What is held while a method runs: the lock of all engines."""
        return locks.engine()  # type: ignore[no-any-return]

    def run(self, method: MethodSpec, inputs: Sequence[Any]) -> list[Any]:
        """Run a method, with inputs as `inputs.prepare` returns them; no later run changes what this returns.

        A delegate cannot run the method that it is called from: both would write into the same memory.
        """
        entry = locks.epoch(), method.name  # what another thread of the parent ran, a forked child does not run
        running = [name for number, name in self.running if number == entry[0]]
        shared = method.name in self.file.sharing and not self.file.sharing.isdisjoint(running)
        if method.name in running or shared:
            raise InputError(
                f"run: {self.file.where(method.name)} is running: a delegate that it calls cannot run it again"
                f"{', nor a method that shares its memory' if shared else ''}. Load the file once more for that."
            )
        try:  # what comes first in it: an interrupt may come anywhere
            self.running.add(entry)
            ready = self.prepare(method)
            quiet: Any = nullcontext() if method.name in self.ran else without_noise()
            self.ran.add(method.name)
            listening = bridge().listening() if self.calls_delegates(method) else nullcontext()
            what = f"{self.file.where(method.name)} failed in the ExecuTorch runtime"
            with explaining(what, f"{_STDERR} say where.", inputs), listening, quiet:
                return list(ready(inputs, clone_outputs=True))
        finally:
            self.running.discard(entry)

    def restart(self) -> None:
        """Open the file again, in its initial state; nothing changes when that fails."""
        if any(number == locks.epoch() for number, _ in self.running):
            raise InputError(f"reset: {self.file.name} is running: a delegate cannot reset the program that calls it.")
        fresh = open_engine(self.file, self.delegates, "later")
        self.ready.clear()
        self.programs.update(fresh.programs)
        self.ready.update(fresh.ready)

    def record(self, method: MethodSpec, inputs: Sequence[Any], runs: int) -> list[TraceEvent]:
        """Run a method that often in a separate program, and return what it does; no other run sees its state."""
        where = f"{self.file.where(method.name)} cannot be profiled"
        with explaining(f"{where}: the ExecuTorch runtime refuses its file"):
            program = self.file.open(profiled=True)
        others = dict.fromkeys(self.file.methods.keys() - {method.name})  # not to be set up, as what shares state is
        engine = Engine(self.file, self.delegates, {method.name: program}, ready=others, missing=self.missing)
        for _ in range(runs):
            engine.run(method, inputs)
        with explaining(f"{where}: what the runtime recorded cannot be read"), TemporaryFolder() as folder:
            path = folder / "profile.etdp"
            program.write_etdump_result_to_file(str(path))
            return read_etdump(path.read_bytes())

    def calls_delegates(self, method: MethodSpec) -> bool:
        """Return whether a method calls Python delegates."""
        return not self.delegates.keys().isdisjoint(method.backends)

    def prepare(self, method: MethodSpec) -> Any:
        """Return a method, set up at its first use; raise an InputError when the runtime lacks a kernel for it."""
        if method.name in self.ready:
            return self.ready[method.name]
        for backend in self.missing.keys() & set(method.backends):
            raise BackendUnavailableError(
                f"{self.file.where(method.name)} cannot run: it needs the backend {backend!r}, and "
                f"{self.missing[backend].reason}. {self.missing[backend].advice}"
            )
        missing = missing_kernels(method)
        if missing:
            raise InputError(
                f"{self.file.where(method.name)} cannot run: the ExecuTorch runtime here has no kernel for "
                f"{', '.join(missing)}. Import the library that has it (custom operators have one), or "
                "change the model so that the operator is decomposed or delegated."
            )
        with neutral():
            self.ready[method.name] = self._set_up(method)
            # Setting up a method writes its initial state. Those that share it are set up at once, before one changes
            # it; one that fails here fails again when it is run.
            for name in self.file.sharing if method.name in self.file.sharing else ():
                if name not in self.ready and self.missing.keys().isdisjoint(self.file.methods[name].backends):
                    with ignoring_errors():  # whoever runs it is told
                        self.ready[name] = self._set_up(self.file.methods[name])
        return self.ready[method.name]

    def _set_up(self, method: MethodSpec) -> Any:
        """Make a method ready to run, in its initial state."""
        where, program = self.file.where(method.name), self.programs[method.name]
        needs = f" It calls {', '.join(method.backends)}." if method.backends else ""
        serving: Any = nullcontext()
        if self.calls_delegates(method):
            serving = bridge().setting_up(where, method.delegations, self.delegates, self.file.debug.lines(method.name))
        hint = (
            f"{needs}{_STDERR} say why: the file may be damaged, be made for another version of a backend, or keep "
            "weights in a .ptd data file that was not given as data=."
        )
        what = f"{where} cannot be set up by the ExecuTorch runtime"
        with explaining(what, hint), serving, without_noise():
            return program.load_method(method.name)


def missing_kernels(method: MethodSpec) -> list[str]:
    """Return the operators of a method that the runtime has no kernel for; none when it cannot be asked."""
    if any(name.startswith("llama::") for name in method.operators) and installed.runtime_failure() is None:
        load_language_model_kernels()
    kernels = installed.kernels()
    return [] if kernels is None else sorted(set(method.operators) - kernels)


_STDERR = " The runtime's own lines above this one, on stderr,"


def explaining(what: str, hint: str = "", inputs: Sequence[Any] | None = None) -> AbstractContextManager[None]:
    """Make an InputError that says what failed of what is raised; errors of ours pass as they are."""

    def explain(error: Exception) -> InputError:
        if inputs is None:
            return InputError(f"{what}: {error}.{hint}")
        shapes = ", ".join(str(list(item.shape)) for item in inputs if isinstance(item, torch.Tensor))
        return InputError(
            f"{what}: {error}.{hint} The inputs have the types that the file asks for (tensors of shapes "
            f"{shapes or 'none'}), so look at their values, and at sizes that were fixed when the model was exported: "
            "a file says only how large a dynamic shape may be."
        )

    return explained(explain, LoweringError)


def open_engine(file: ProgramFile, given: Mapping[str, Any], unavailable: Unavailable | Literal["later"]) -> Engine:
    """Open a file, with its methods that call Python delegates set up; the errors are those of `load`.

    With "later", a method whose backend is missing is an error when it is run.
    """
    failure = installed.runtime_failure()
    if failure is not None:
        raise BackendUnavailableError(
            f"{file.name} cannot be loaded: {failure}. Install executorch again from its wheel for this platform."
        )
    _check_given(given)
    with locks.engine():
        found, missing = find_delegates(file, given, unavailable)
        taken = installed.own_backends().intersection(found)
        if taken:
            file, names = rename_backends(file, sorted(taken))
            found = {names.get(backend, backend): delegate for backend, delegate in found.items()}
        if found:
            try:
                bridge().register(sorted(found))
            except BackendUnavailableError as error:
                missing.update(dict.fromkeys(found, Missing("Python delegates cannot be used here", str(error))))
                if unavailable != "later" and file.needed(missing):
                    raise
                found = {}
        hint = f"{_STDERR} say why: most likely the file is damaged. Make or copy it again."
        with explaining(f"{file.name} cannot be loaded: the ExecuTorch runtime refuses it", hint):
            shared = file.open() if file.sharing else None
            programs = {method: shared if method in file.sharing else file.open() for method in file.methods}
        engine = Engine(file, found, programs, missing=missing)
        # Those of families are set up when they are chosen, and those that lack something fail when they are run.
        families = {line.method for line in file.manifest}
        for method in file.methods.values():
            runs = missing.keys().isdisjoint(method.backends) and not missing_kernels(method)
            if runs and engine.calls_delegates(method) and method.name not in families:
                engine.prepare(method)
        return engine


def serving(delegates: Mapping[str, Delegate]) -> AbstractContextManager[None]:
    """Make the runtime call delegates in programs that something else opens, while the context lasts."""
    _check_given(delegates)
    with locks.engine():
        bridge().register(sorted(delegates))
    return bridge().serving(delegates)


def _check_given(given: Mapping[str, Any]) -> None:
    replaced = sorted(installed.own_backends() & set(given))
    if replaced:
        raise InputError(
            f"delegates: the ExecuTorch runtime has {' and '.join(map(repr, replaced))} itself, which a delegate "
            "cannot replace. Give the delegate another id, also in the backend that makes the file."
        )
