"""Run the methods of a file in a separate process, which is ended when it goes over a limit."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from exir_lowering import errors
from exir_lowering.errors import InputError, LimitError
from exir_lowering.plugins import registry
from exir_lowering.plugins.addresses import NoAddressError, find_address
from exir_lowering.plugins.availability import Missing
from exir_lowering.plugins.worker_errors import WorkerDiedError, raise_error
from exir_lowering.pte.format import MethodSpec
from exir_lowering.runtime.isolated import transfer
from exir_lowering.runtime.isolated.process import Message, Process, TooLateError, current_folder
from exir_lowering.runtime.profiling import TraceEvent
from exir_lowering.runtime.source import ProgramFile, Unavailable

_FRESH = "What its methods had written into their buffers is lost: the next run begins in a new process."


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a loaded program; `None` is no limit. Even with none set, a run can be interrupted.

    Attributes:
        seconds: How long a single call may take: a run or profile of a method, or opening the file. It holds for any
            program, also in the middle of a kernel.
        memory: By how many bytes the memory of the process may grow, for the file, its methods and what they compute.
            On Linux only. A library's threads count too, each with a stack of about 8 MB. Where a backend does not
            report that memory ran out, the error is an InputError that names the limit.

    Raises:
        InputError: A limit is not a number above 0, or cannot be enforced on this system.
    """

    seconds: float | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        seconds, memory = self.seconds, self.memory
        number = isinstance(seconds, (int, float)) and type(seconds) is not bool
        if seconds is not None and not (number and math.isfinite(seconds) and seconds > 0):
            raise InputError(f"Limits(seconds={seconds!r}): expected a finite number above 0, or None.")
        if memory is not None and (type(memory) is not int or memory < 1):
            raise InputError(f"Limits(memory={memory!r}): expected an int above 0, or None.")
        if memory is not None and sys.platform != "linux":
            raise InputError(f"Limits(memory={memory}): this limit works on Linux only. Leave it out here.")


class IsolatedEngine:
    """A file in a separate process, for one run at a time; after a call that was ended, the next one starts another."""

    def __init__(self, file: ProgramFile, opening: Message, begin: Callable[[], Process], limits: Limits) -> None:
        self._file, self._opening, self._begin, self._limits = file, opening, begin, limits
        self._lock, self._calling, self._process = threading.RLock(), False, os.getpid()
        self._worker: Process | None = None
        self.missing: Mapping[str, Missing] = {}  # the backends that nothing executes there
        self._finalizer: Any = None

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """What is held around a run: nothing, other programs run meanwhile."""
        return contextlib.nullcontext()

    def run(self, method: MethodSpec, inputs: Sequence[Any]) -> list[Any]:
        """Run a method; see `Engine`. Raise a LimitError when it goes over a limit."""
        header, contents = self._call_method("run", method, inputs)
        return transfer.read(header["values"], contents)

    def record(self, method: MethodSpec, inputs: Sequence[Any], runs: int) -> list[TraceEvent]:
        """Record runs of a method; see `Engine`. Raise a LimitError when they go over a limit."""
        header, _ = self._call_method("record", method, inputs, runs=runs)
        return [TraceEvent(*event) for event in header["events"]]

    def restart(self) -> None:
        """Open the file again, in its initial state, and in the same process if that is there; it raises as `start`."""
        self._call(self._file.name, self._opening)

    def _call_method(self, do: str, method: MethodSpec, inputs: Sequence[Any], **more: Any) -> Message:
        (described, contents), where = transfer.write(inputs), self._file.where(method.name)
        header = {"do": do, "where": where, "method": method.name, "values": described, **more}
        return self._call(where, (header, contents))

    def _call(self, where: str, message: Message) -> Message:
        if os.getpid() != self._process:
            raise InputError(
                f"{self._file.name} was loaded with limits in the process that this one was forked from, and runs for "
                "that one. Load it here."
            )
        with self._lock:
            if self._calling:  # by this thread: the process is not to be sent anything until it has replied
                raise InputError(f"{where} is called by a signal handler or a finalizer while a call of it is running.")
            self._calling = True
            try:
                fresh, worker = self._worker is None, self._worker or self.start()
                return ({}, ()) if fresh and message is self._opening else self._ask(where, worker, message)
            finally:
                self._calling = False

    def start(self) -> Process:
        """Start a process, and open the file there; raise what `load` raises, or a LimitError."""
        try:
            worker = self._begin()
        except OSError as error:
            what = f"{self._file.name} cannot be loaded with limits: no process can be started"
            raise InputError(f"{what}: {error}.") from error
        self._worker, self._finalizer = worker, weakref.finalize(self, worker.abandon)
        header, _ = self._ask(self._file.name, worker, self._opening)
        self.missing = {backend: Missing(*texts) for backend, texts in header["missing"].items()}
        return worker

    def _ask(self, where: str, worker: Process, message: Message) -> Message:
        """Send a message, and return the reply; end the process when that does not come, or says that it is over."""
        seconds, done = self._limits.seconds, False
        try:
            header, parts = worker.call(message, seconds)
            if message is self._opening:  # the other process opens paths: what is there still is what was checked
                self._file.file.check()
                self._file.data.check()
            done = header["kind"] == "done" or (message is not self._opening and header.get("type") != "LimitError")
        except TooLateError:
            raise LimitError(
                f"{where} was ended: it took more than {seconds:g} seconds, which is limits.seconds. {_FRESH} Raise "
                "the limit if that is how long it takes.",
                limit="seconds",
            ) from None
        except WorkerDiedError as error:
            memory, suspects = self._limits.memory, ", ".join([*self._opening[0]["libraries"], "a kernel"])
            limit = "" if memory is None else f" An allocation beyond the {memory:,} bytes of limits.memory may end it."
            raise InputError(
                f"{where} ended its process: {error}.{limit} {_FRESH} The file may be damaged, or "
                f"{suspects} or a delegate has a defect."
            ) from error
        finally:
            if not done:  # also after an interrupt
                if self._finalizer is not None:
                    self._finalizer()
                self._worker = self._finalizer = None
        for name, text in header["warnings"]:
            kind = getattr(errors, name, UserWarning)
            warnings.warn(text, kind if issubclass(kind, Warning) else UserWarning, stacklevel=5)
        raise_error(header)
        return header, parts


def open_isolated(
    file: ProgramFile,
    given: Mapping[str, Any],
    unavailable: Unavailable,
    limits: Limits,
    begin: Callable[[Sequence[str]], Process] = Process,
    libraries: Sequence[str] = (),
) -> IsolatedEngine:
    """Open a file in a separate process, which is made with modules imported, and loads libraries.

    It raises what `load` raises, or an InputError if that is impossible.
    """
    if not hasattr(os, "fork"):
        raise InputError(f"{file.name} cannot be loaded with limits: this system is not POSIX.")
    sources = [file.file.source, *(one.file.source for one in file.data.files)]
    # It finds those of entry points itself; those that were registered here may be what a library stands for.
    known = {**({} if libraries else registry.registered(registry.DELEGATES)), **given}
    try:
        addresses = {backend: find_address(known[backend]) for backend in file.backends if backend in known}
    except NoAddressError as error:
        raise InputError(
            f"{file.name} cannot be loaded with limits: its delegates run in another process, and {error}."
        ) from None
    modules = [address.partition(":")[0] for address in addresses.values()]
    paths, operators = [one if isinstance(one, str) else None for one in sources], sorted(torch.ops.loaded_libraries)
    header = {
        **{"do": "open", "where": file.name, "unavailable": unavailable, "sources": paths, "delegates": addresses},
        **{"folder": current_folder(), "threads": torch.get_num_threads(), "operators": operators},
        **{"memory": limits.memory, "libraries": libraries},
    }
    contents = [source for source in sources if isinstance(source, bytes)]
    opened = IsolatedEngine(file, (header, contents), partial(begin, modules), limits)
    opened.start()
    return opened
