"""Load a `.pte` file, and run its methods in ExecuTorch's runtime.

* `source` is mapped, not read, and must not be changed in place while the program is in use. Its tables are checked
  before anything else, as the runtime ends the process on some damaged files; digests find damage in weights and
  payloads.
* `data`: `Artifact.save` writes data files beside the `.pte`, by the names in `Artifact.data_files`. The runtime takes
  one path: several files, and content, are put together in a temporary file for it, which goes with the program.
* `delegates` come before those of the entry points, and need a C++ compiler once. A backend that the runtime has
  itself cannot be replaced.
* `libraries` in C++ register backends and kernels when they are loaded: in this process, which keeps them, or with
  `limits` in the program's. Loading one runs its code, so name only those that you trust. A file never names any.
* `unavailable="fallback"` executes the original graphs of a missing backend's partitions in PyTorch, with a warning,
  if the file was emitted with `keep_originals=True`.
* `verify`: in any case a data file has to be one that was emitted with the program. Files that ExecuTorch has written
  have no digests, and load as they are.
* `limits`: ExecuTorch's runtime keeps Python's lock while it runs: no other thread, signal handler or timeout gets a
  turn. With limits, even `Limits()`, the program is opened and run in a separate process: other threads and Ctrl-C
  work, and a call that goes over a limit is ended with a LimitError. Inputs and outputs are copied; state is lost when
  a call was ended or interrupted, and the next run starts anew. Delegates run there too, so that they are given as
  classes that can be imported, and operators of `torch.ops.load_library` are loaded there, those defined in Python are
  not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exir_lowering._upstream.installed import load_libraries
from exir_lowering.errors import InputError, did_you_mean
from exir_lowering.plugins import registry
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.pte.digests import Verify
from exir_lowering.pte.files import Given
from exir_lowering.pte.format import MethodSpec, program_signatures
from exir_lowering.pte.signatures import MethodSignature
from exir_lowering.runtime import choosing
from exir_lowering.runtime.by_name import Results, bind
from exir_lowering.runtime.choosing import Choice
from exir_lowering.runtime.engine import Engine, open_engine
from exir_lowering.runtime.inputs import prepare
from exir_lowering.runtime.isolated.engine import IsolatedEngine, Limits, open_isolated
from exir_lowering.runtime.profiling import Profile, profile
from exir_lowering.runtime.source import ProgramFile, Unavailable, read_file


@dataclass(frozen=True, slots=True, eq=False)
class LoadedProgram:
    """A `.pte` file that is open in ExecuTorch's runtime; `load` makes it.

    Methods are set up when they first run, those that call Python delegates when the file is loaded, except those of
    families, such as forward@npu and forward@cpu: of them, the one that is chosen. What a method writes into its
    buffers is kept for its next run, and no other method changes it, unless they share state: `emit(share_state=...)`.
    """

    _file: ProgramFile
    _engine: Engine | IsolatedEngine
    _preferred: Sequence[str] = ()

    @property
    def method_names(self) -> tuple[str, ...]:
        """The names of the methods, sorted."""
        return tuple(self._file.methods)

    @property
    def methods(self) -> Mapping[str, MethodSignature]:
        """The inputs, outputs and state of each method, by name, sorted; read-only."""
        return program_signatures(self._file.methods)

    @property
    def runnable(self) -> tuple[str, ...]:
        """The methods whose backends are all available here, sorted; a family has at least one."""
        missing = self._engine.missing.keys()
        return tuple(name for name, method in self._file.methods.items() if missing.isdisjoint(method.backends))

    def run(self, method: str, /, *inputs: Any, **named: Any) -> Results:
        """Run a method.

        Args:
            method: Its name.
            inputs: Its inputs in order, tensors or arrays of NumPy; what a list or dict holds can be given one by one.
                A tensor may be laid out in memory in any way. A number has to be the one at export, or is left out.
            named: Its inputs by name, as `methods` lists them.

        Returns:
            The outputs, flat; what the model returns under a key is `results["key"]` and `results.key` as well.
            Tensors belong to the caller: no later run changes them. An input that the method writes to stays as it is;
            its new value is the first output, as ExecuTorch has it.

        Raises:
            InputError: There is no such method, an input is not what the method takes, the runtime has no kernel for
                one of its operators, or it failed to run. The program can be run again; after a run that failed
                half-way, buffers that the method had written before have their new values.
            BackendFailure: A Python delegate raised; its exception is the `__cause__`.
            BackendContractError: A Python delegate returned something other than the file says.
            LimitError: The program was loaded with limits, and went over one; the next run is in its initial state.
        """
        found, given = self._bind("run", method, inputs, named)
        # Views of the inputs are made and released with the lock held: both release Python's lock, and a
        # thread that waits for it in there when Python exits ends the process.
        with self._engine.lock:
            outputs = self._engine.run(found, self._prepare(found, given))
            outputs = choosing.crop(self._file.bucket(found.name), found, given, outputs)
        return Results(outputs, (one.name for one in found.signature.outputs))

    def __call__(self, *inputs: Any, **named: Any) -> Results:
        """Run the method, or the family, "forward"; see `run`."""
        return self.run("forward", *inputs, **named)

    def reset(self) -> None:
        """Put state back to what the file starts with; an InputError if a delegate calls this while it runs."""
        with self._engine.lock:
            self._engine.restart()

    def profile(self, method: str, /, *inputs: Any, runs: int = 1, **named: Any) -> Profile:
        """Run a method and report where its time goes, per kernel, per delegate and per instruction of a delegate.

        The method is set up again and run from its initial state: the state of this program stays as it is. Delegates
        compile their payloads again, which takes as much memory again. The first run is the slowest one.

        Args:
            method: Its name.
            inputs: Its inputs, as for `run`.
            runs: How often it is run; times are added up.
            named: Inputs by name.

        Returns:
            The times. With the file's debug information each has the model's lines.

        Raises:
            InputError: As for `run`; or `runs` is not a number above 0.
            BackendFailure, BackendContractError, LimitError: As for `run`.
        """
        found, given = self._bind("profile", method, inputs, named)
        if not isinstance(runs, int) or isinstance(runs, bool) or runs < 1:
            raise InputError(f"profile: runs: got {runs!r}, expected a number of at least 1.")
        with self._engine.lock:
            events = self._engine.record(found, self._prepare(found, given), runs)
        return profile(found, runs, events, self._file.debug.methods.get(found.name))

    def choose(self, method: str, /, *inputs: Any, **named: Any) -> Choice:
        """Say which method of a family `run` runs with some inputs, and why.

        Args:
            method: The name of a family, such as "forward" where the file has "forward@npu" and "forward@cpu"; the
                name of a method is that method.
            inputs: The inputs, as for `run`.
            named: Inputs by name.

        Returns:
            The method, and why it is not another one.

        Raises:
            InputError: There is no such method or family, or it has no method for inputs of these sizes.
            BackendUnavailableError: No method of the variants that `load(choose=...)` names can run here.
        """
        return self._choose("choose", method, inputs, named)

    def _choose(self, who: str, name: object, inputs: Sequence[Any], named: Any) -> Choice:
        known = ", ".join(map(repr, self.method_names))
        if not isinstance(name, str):
            got = f"got a {type(name).__name__} as the name of a method of {self._file.name}"
            raise InputError(f"{who}: {got}, expected one of {known}.")
        if name in self._file.methods:
            return Choice(name, "it is named itself")
        if family := self._file.families().get(name):
            first = family[0].method
            given = bind(self._file.where(first), self._file.methods[first], inputs, named) if inputs or named else ()
            return choosing.choose(self._file, name, given, self._engine.missing, self._preferred)
        hint = did_you_mean(name, [*self._file.families(), *self.method_names])
        raise InputError(f"{who}: {self._file.name} has no method {name!r}; it has {known}.{hint}")

    def _bind(self, who: str, name: object, inputs: Sequence[Any], named: Any) -> tuple[MethodSpec, list[Any]]:
        method = self._file.methods[self._choose(who, name, inputs, named).method]
        return method, bind(self._file.where(method.name), method, inputs, named)

    def _prepare(self, method: MethodSpec, inputs: Sequence[Any]) -> list[Any]:
        bucket, where = self._file.bucket(method.name), self._file.where(method.name)
        if misfit := choosing.misfit(bucket, method, inputs):
            raise InputError(f"{where}: {misfit}.")
        return prepare(where, method, choosing.pad(bucket, inputs))

    def __repr__(self) -> str:
        return f"LoadedProgram({self._file.name}: {', '.join(self.method_names)})"

    def __reduce__(self) -> Any:
        raise TypeError("A LoadedProgram is tied to the runtime of its process; load the file in the other one.")


def load(
    source: str | os.PathLike[str] | bytes,
    *,
    data: Given = None,
    delegates: Mapping[str, Delegate | type[Delegate]] | Sequence[Delegate | type[Delegate]] | None = None,
    libraries: Sequence[str | os.PathLike[str]] = (),
    unavailable: Unavailable = "error",
    verify: Verify = True,
    limits: Limits | None = None,
    choose: str | Sequence[str] | None = None,
) -> LoadedProgram:
    """Open a `.pte` file in the ExecuTorch runtime.

    The file is checked first. `exir_lowering.runtime.program` says more about each argument.

    Args:
        source: The path of the file, or its content. A file is mapped, and must not be changed in place.
        data: The `.ptd` data files, if weights were emitted into some: a path, the content of a file, or a sequence.
        delegates: Delegates, by the id of the backend that they execute or in a sequence, before the installed ones.
        libraries: Paths of C++ libraries with backends or kernels. Loading one runs its code: name those you trust.
        unavailable: What to do about a backend that nothing here executes: "error", or "fallback" to PyTorch.
        verify: What to check by digests: True, the tables, and everything if it is at most 32 MB; "full", everything.
        limits: Limits for the program, which then runs in a separate process and can be interrupted; None for this one.
        choose: Which method of a family runs: a variant's name, or a sequence of them in order of preference; None for
            the first that can.

    Returns:
        The program.

    Raises:
        InputError: An argument is invalid; a file or library is damaged or of another program, or a file lacks weights.
        BackendUnavailableError: Nothing here executes a backend of the file, or Python delegates cannot be used here.
        BackendFailure: A delegate raised when it compiled a payload; its exception is the `__cause__`.
        LimitError: Opening the file, or a delegate compiling its payloads, goes over a limit.
        PluginLoadError: A delegate cannot be loaded or is provided twice.
    """
    given = check_arguments(delegates, unavailable)
    if not isinstance(limits, (Limits, type(None))):
        raise InputError(f"load: limits: got {limits!r}, expected Limits(seconds=...), or None.")
    paths = load_libraries("load", libraries, here=limits is None)
    file = read_file(source, data, verify)
    for key in given.keys() - file.backends.keys():  # others may be for other files
        if close := did_you_mean(key, file.backends.keys() - given.keys()):
            raise InputError(f"load: delegates: {file.name} has no backend {key!r}.{close}")
    preferred = choosing.check_preferred(choose, file)
    apart = limits and open_isolated(file, given, unavailable, limits, libraries=paths)
    return LoadedProgram(file, apart or open_engine(file, given, unavailable), preferred)


def open_file(file: ProgramFile, delegates: Any, unavailable: Unavailable = "error") -> LoadedProgram:
    """Open a file that was read; the arguments and errors are those of `load`."""
    return LoadedProgram(file, open_engine(file, check_arguments(delegates, unavailable), unavailable))


def check_arguments(delegates: Any, unavailable: object) -> Mapping[str, Any]:
    """Check arguments of `load`, and return the delegates by id."""
    given = registry.check_delegates(delegates)
    if unavailable not in ("error", "fallback"):
        raise InputError(f'load: got unavailable={unavailable!r}, expected "error" or "fallback".')
    return given
