"""Python delegates behind the backend interface of ExecuTorch's runtime.

The runtime knows a backend by its id for as long as the process lives, so for each id one backend of the shim is
registered. Which `Delegate` it stands for is decided whenever a method is set up, and its handles remember it: two
programs can execute one id with different delegates.

The runtime reduces what goes wrong in a backend to a number. The exception is kept here, and raised again
when the runtime has returned.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from exir_lowering._upstream import installed, locks
from exir_lowering._upstream.runtime import compile_spec
from exir_lowering.errors import BackendContractError, BackendUnavailableError, InputError, LoweringError
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.pte.debug_info import Lines, no_lines
from exir_lowering.pte.format import Delegation
from exir_lowering.runtime.contract import DAMAGED, Handle, compile_payload, describe_output, destroy, execute
from exir_lowering.runtime.inputs import show
from exir_lowering.runtime.native import abi, shim
from exir_lowering.runtime.native.abi import describe_argument, read_argument, view_tensor

_FAILED, _DONE, _UNKNOWN = 0, 1, -1
_NOT_FOUND, _ROOM, _EXIT_SECONDS = 0x20, 16, 30.0


@dataclass(slots=True, eq=False)
class _Setup:
    """A method that the runtime is setting up."""

    where: str  # the method and its file, for messages
    delegates: Mapping[str, Delegate]  # the file's, by their ids
    plans: Iterator[Delegation]  # what they execute and is still to come, in the runtime's order
    lines: Lines  # returns the lines of the model that a failure is about


class _Thread(threading.local):
    """The state of a thread."""

    def __init__(self) -> None:
        self.setups: list[_Setup] = []  # one may be set up while another one is compiled
        self.failure: BaseException | None = None  # what was raised in a callback and is to be raised again
        self.listeners = 0  # how many callers will raise it again


class Bridge:
    """The process's one connection between delegates and the runtime; `bridge` returns it."""

    def __init__(self) -> None:
        self._library = shim.library()
        self._ids: list[str] = []
        self._handles: dict[int, tuple[Handle, _EventRecorder]] = {}
        self._keys = itertools.count(1)
        self._thread = _Thread()
        self._serving: list[Mapping[str, Delegate]] = []
        # Kept here, as the shim calls them as long as the process lives. What an interrupt raises before a callback
        # could catch it is given to sys.unraisablehook, with one of these objects.
        self._entries = self._available, self._compile, self._execute, self._destroy
        kinds: tuple[Any, ...] = (abi.AVAILABLE, abi.COMPILE, abi.EXECUTE, abi.DESTROY)
        self._callbacks = abi.Callbacks(*(kind(entry) for kind, entry in zip(kinds, self._entries, strict=True)))
        for name, types in abi.FUNCTIONS.items():
            getattr(self._library, name).argtypes = types
        self._ticks, self._event = abi.event_functions(self._library)
        self._library.exir_start(ctypes.byref(self._callbacks))
        atexit.register(self._close)

    def register(self, ids: Sequence[str]) -> None:
        """Register ids in the runtime; those that are already registered stay as they are."""
        taken = installed.backends()
        missing = [name for name in ids if name not in self._ids]
        if len(taken) + len(missing) > _ROOM:
            raise BackendUnavailableError(
                f"The delegates {', '.join(map(repr, missing))} cannot be registered: the ExecuTorch runtime has room "
                f"for {_ROOM} backends in a process, never removes one, and has {len(taken)}: {', '.join(taken)}. Use "
                "fewer ids in one process, or start another one."
            )
        for name in missing:
            self._ids.append(name)
            if error := self._library.exir_register(name.encode(), len(self._ids) - 1):
                self._ids.pop()
                raise BackendUnavailableError(
                    f"The delegate {name!r} cannot be registered: the ExecuTorch runtime refuses it with error "
                    f"{error:#x}. It has {', '.join(taken)}."
                )
            installed.bridged.add(name)

    @contextmanager
    def setting_up(
        self,
        where: str,  # the method and its file, to begin messages with
        plans: Sequence[Delegation],  # the parts of the method that backends execute
        delegates: Mapping[str, Delegate],  # the file's, by their ids
        lines: Lines = no_lines,  # returns the lines of the model that a failure is about
    ) -> Iterator[None]:
        """Serve delegates while the context lasts, in which the runtime sets up a method."""
        setups = self._thread.setups
        setups.append(_Setup(where, delegates, iter([plan for plan in plans if plan.backend in delegates]), lines))
        try:
            with self.listening():
                yield
        finally:
            setups.pop()

    @contextmanager
    def serving(self, delegates: Mapping[str, Delegate]) -> Iterator[None]:
        """Serve, by registered ids, programs that something other than `load` sets up, in any thread."""
        # Contexts may overlap, and end in any order.
        self._serving.append(delegates)
        try:
            yield
        finally:
            self._serving = [each for each in self._serving if each is not delegates]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Raise, when the runtime has returned with an error, what a delegate raised."""
        thread = self._thread
        thread.failure = None
        thread.listeners += 1
        previous = sys.unraisablehook

        def hook(unraisable: Any) -> None:
            if any(unraisable.object is entry for entry in self._entries):
                thread.failure = unraisable.exc_value
            else:
                previous(unraisable)

        sys.unraisablehook = hook
        failed = False
        try:
            yield
        except MemoryError:
            raise
        except Exception:
            if thread.failure is None:
                raise
            failed = True
        finally:
            sys.unraisablehook = previous
            thread.listeners -= 1
        failure, thread.failure = thread.failure, None
        # What ends a program, or a want of memory, counts even if the runtime took no notice of it.
        if failure is not None and (failed or not isinstance(failure, Exception) or isinstance(failure, MemoryError)):
            raise failure

    # What the shim calls. Nothing may be raised there, and 0 means failure.

    def _available(self, slot: int) -> int:
        setups = self._thread.setups
        return int(self._ids[slot] in (setups[-1].delegates if setups else self._find_served()))

    def _find_served(self) -> dict[str, Delegate]:
        return {name: delegate for delegates in self._serving for name, delegate in delegates.items()}

    def _keep(self, failure: BaseException) -> int:
        """Keep a failure for the listeners, or show it; return the runtime's error number for it."""
        self._thread.failure = failure
        if not self._thread.listeners:
            sys.excepthook(type(failure), failure, failure.__traceback__)
        code = getattr(failure.__cause__ or failure, "executorch_error", None)
        return -code if isinstance(code, int) and 0 < code < 0x100 else _FAILED

    def _compile(
        self, slot: int, context: int, method: bytes | None, processed: int | None, size: int, specs: Any, count: int
    ) -> int:
        try:
            name, setups = self._ids[slot], self._thread.setups
            payload = ctypes.string_at(processed, size) if processed else b""
            options = [
                compile_spec(each.key.decode(), ctypes.string_at(each.value, each.size) if each.size else b"")
                for each in specs[:count]
            ]
            # Of a file that was not read, nothing is known but the payload's size.
            unread = Delegation(_UNKNOWN, name, len(payload), _UNKNOWN, (), ())
            where = "A method that was not set up by exir_lowering.load"
            setup = setups[-1] if setups else _Setup(where, self._find_served(), iter([unread]), no_lines)
            plan = next(setup.plans, None)
            if plan is None or (plan.backend, plan.payload) != (name, len(payload)):
                raise InputError(
                    f"{setup.where}: the runtime asks to compile {len(payload)} bytes by {name!r}, not {plan}: "
                    f"{DAMAGED}"
                )
            recorder, find_data = _EventRecorder(self._ticks, self._event), partial(self._find_data, context)
            called = (method or b"").decode()
            job = setup.where, called, plan, payload, options, find_data, recorder, setup.lines
            handle, key = compile_payload(setup.delegates[name], *job), next(self._keys)
            self._handles[key] = handle, recorder
            return key
        except BaseException as failure:
            return self._keep(failure)

    def _find_data(self, context: int, key: str) -> bytes | None:
        """Return named data of a file, as long as the context lives."""
        found = abi.Data()
        error = self._library.exir_named_data(context, key.encode(), ctypes.byref(found))
        if error == _NOT_FOUND:
            return None
        if error != 0:
            raise RuntimeError(f"named_data({key!r}): the ExecuTorch runtime cannot read it: error {error:#x}.")
        try:
            return ctypes.string_at(found.data, found.size) if found.size else b""
        finally:
            self._library.exir_release(found.buffer)

    def _execute(self, key: int, arguments: Any, count: int, tracer: int | None) -> int:
        try:
            handle, recorder = self._handles[key]
            # A delegate may run its own program again, which may be profiled or not.
            before, recorder.tracer = recorder.tracer, tracer
        except BaseException as failure:
            return self._keep(failure)
        try:
            if handle.plan.arguments == _UNKNOWN:  # each of the values may be an output, and one is
                values, counts = tuple(map(describe_argument, arguments[:count])), tuple(range(1, count + 1))
                handle.plan = replace(handle.plan, arguments=count, outputs=values, counts=counts)
                handle.counts = counts
            if count != handle.plan.arguments:
                raise InputError(f"{handle.who} is called with {count} values, not {handle.plan.arguments}: {DAMAGED}")
            failures: list[LoweringError] = []
            for outputs in handle.counts:  # until one is right, which is kept
                try:
                    self._execute_with(handle, outputs, arguments)
                except LoweringError as error:
                    failures.append(error)
                else:
                    handle.counts = (outputs,)
                    return _DONE
            raise failures[0]
        except BaseException as failure:
            return self._keep(failure)
        finally:
            recorder.tracer = before

    def _execute_with(self, handle: Handle, count: int, arguments: Any) -> None:
        """Execute with a number of outputs, and give these to the runtime."""
        first = handle.plan.arguments - count
        inputs = [read_argument(handle, index, arguments[index]) for index in range(first)]
        for index, (value, output) in enumerate(execute(handle, inputs, count)):
            argument = arguments[first + index]
            if (argument.kind == abi.TENSOR) != isinstance(output, torch.Tensor):
                raise InputError(f"{handle.who}: the runtime cannot take its output {index}: {DAMAGED}")
            if isinstance(output, bool):
                self._library.exir_set_bool(argument, output)
            elif isinstance(output, int):
                self._library.exir_set_int(argument, output)
            elif isinstance(output, float):
                self._library.exir_set_double(argument, output)
            else:
                shape, error = tuple(output.shape), 0
                if tuple(argument.sizes[: argument.rank]) != shape:
                    error = self._library.exir_resize(argument, (ctypes.c_int32 * len(shape))(*shape), len(shape))
                if error != 0:
                    raise BackendContractError(
                        f"{handle.who}: output {index} of execute is {show(output)}, and the runtime cannot give that "
                        f"shape to {describe_output(value)}: error {error:#x}."
                    )
                if argument.bytes:
                    view_tensor(handle, argument).copy_(output.detach() if output.requires_grad else output)

    def _destroy(self, key: int) -> None:
        if found := self._handles.pop(key, None):
            destroy(found[0])

    def _close(self) -> None:
        """Release all handles when Python exits; the lock is kept, so that no other thread is in the runtime then."""
        locks.engine().acquire(timeout=_EXIT_SECONDS)
        self._library.exir_close()
        for key in list(self._handles):
            self._destroy(key)


class _EventRecorder:
    """Records the events of a handle in ExecuTorch's ETDump, while the handle is executed and profiled."""

    __slots__ = ("_event", "_ticks", "tracer")

    def __init__(self, ticks: Callable[[], int], event: Callable[..., None]) -> None:
        self._ticks, self._event = ticks, event
        self.tracer: int | None = None

    @property
    def active(self) -> bool:
        return self.tracer is not None

    def now(self) -> int:
        return self._ticks()

    def record(self, identifier: int | str, start: int, end: int) -> None:
        if isinstance(identifier, str):
            self._event(self.tracer, identifier.encode(), -1, start, end)
        else:
            self._event(self.tracer, None, identifier, start, end)


_bridge: Bridge | None = None


def bridge() -> Bridge:
    """Return the bridge, made at its first use; a BackendUnavailableError if the shim cannot be compiled or loaded."""
    global _bridge
    with locks.engine():
        if _bridge is None:
            _bridge = Bridge()
        return _bridge
