"""Python delegates behind the backend interface of ExecuTorch's runtime.

The runtime knows a backend by its id for as long as the process lives, so for each id one backend of the shim is
registered. Which `Delegate` it stands for is said whenever a method is set up, and its handles remember it: two
programs can execute one id with different delegates.

The runtime reduces what goes wrong in a backend to a number. The exception is kept here meanwhile, and raised again
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
from typing import Any

import torch
from executorch.exir.backend.compile_spec_schema import CompileSpec

from exir_lowering._upstream import locks
from exir_lowering.errors import (
    BackendContractError,
    BackendFailure,
    BackendUnavailableError,
    InputError,
)
from exir_lowering.errors.interrupts import let_through, passing
from exir_lowering.plugins import availability
from exir_lowering.plugins.delegate import Delegate, DelegateContext
from exir_lowering.pte.dtypes import DTYPES
from exir_lowering.pte.format import Delegation
from exir_lowering.pte.value_kinds import NULL, TENSOR, Tensor, ValueSpec
from exir_lowering.runtime.contract import (
    DAMAGED,
    Handle,
    compile_payload,
    describe_output,
    execute,
    no_list,
    reporting,
    settle,
)
from exir_lowering.runtime.debugging import Lines, no_lines
from exir_lowering.runtime.inputs import show
from exir_lowering.runtime.native import shim

_NONE, _TENSOR, _INT, _DOUBLE, _BOOL = range(5)
_FAILED, _DONE = 0, 1
_WRITABLE = 0x200  # PyBUF_WRITE
_NOT_FOUND = 0x20
_PLACES = 16
_UNKNOWN = -1
_ELSEWHERE = "A method that was not set up by exir_lowering.load"
_EXIT_SECONDS = 30.0


class _Spec(ctypes.Structure):
    _fields_ = (("key", ctypes.c_char_p), ("value", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Argument(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("sizes", ctypes.POINTER(ctypes.c_int32)),
        ("strides", ctypes.POINTER(ctypes.c_int32)),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("value", ctypes.c_void_p),
    )


class _Data(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p))


_AVAILABLE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)
_COMPILE = ctypes.CFUNCTYPE(
    ctypes.c_int64,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.POINTER(_Spec),
    ctypes.c_size_t,
)
_EXECUTE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.POINTER(_Argument), ctypes.c_size_t, ctypes.c_void_p)
_DESTROY = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class _Callbacks(ctypes.Structure):
    _fields_ = (("available", _AVAILABLE), ("compile", _COMPILE), ("execute", _EXECUTE), ("destroy", _DESTROY))


_memory: Callable[[int, int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))


@dataclass(slots=True, eq=False)
class _Setup:
    """A method that the runtime is setting up.

    Attributes:
        where: The method and its file, for messages.
        delegates: The file's delegates, by their ids.
        plans: Those parts of the method that they execute and that are still to come, in the runtime's order.
        lines: Tells the lines of the model that a failure is about.
    """

    where: str
    delegates: Mapping[str, Delegate]
    plans: Iterator[Delegation]
    lines: Lines


class _Thread(threading.local):
    """What a thread is at.

    Attributes:
        setups: The methods that it is setting up; one may be set up while another one is compiled.
        failure: What was raised in a callback and is to be raised again.
        listeners: How many callers there are that raise it again.
    """

    def __init__(self) -> None:
        self.setups: list[_Setup] = []
        self.failure: BaseException | None = None
        self.listeners = 0


class Bridge:
    """The process's one connection between delegates and the runtime; `bridge` returns it."""

    def __init__(self) -> None:
        self._library = shim.library()
        self._ids: list[str] = []
        self._handles: dict[int, Handle] = {}
        self._recorders: dict[int, _Recorder] = {}
        self._keys = itertools.count(1)
        self._thread = _Thread()
        self._serving: list[Mapping[str, Delegate]] = []
        # Kept here, as the shim calls them as long as the process lives. What an interrupt raises before a callback
        # could catch it is given to sys.unraisablehook, with one of these objects.
        self._entries = available, compile_, execute, destroy = (
            self._available,
            self._compile,
            self._execute,
            self._destroy,
        )
        self._callbacks = _Callbacks(_AVAILABLE(available), _COMPILE(compile_), _EXECUTE(execute), _DESTROY(destroy))
        self._library.exir_resize.argtypes = (
            ctypes.POINTER(_Argument),
            ctypes.POINTER(ctypes.c_int32),
            ctypes.c_size_t,
        )
        self._library.exir_set_int.argtypes = (ctypes.POINTER(_Argument), ctypes.c_int64)
        self._library.exir_set_double.argtypes = (ctypes.POINTER(_Argument), ctypes.c_double)
        self._library.exir_set_bool.argtypes = (ctypes.POINTER(_Argument), ctypes.c_int32)
        self._library.exir_named_data.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(_Data))
        self._library.exir_release.argtypes = (ctypes.c_void_p,)
        # Called with the interpreter's lock held: a delegate's threads may record events too.
        self._ticks = ctypes.PYFUNCTYPE(ctypes.c_uint64)(("exir_ticks", self._library))
        self._event = ctypes.PYFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64
        )(("exir_event", self._library))
        self._library.exir_start(ctypes.byref(self._callbacks))
        atexit.register(self._close)

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids that are registered."""
        return tuple(self._ids)

    def register(self, ids: Sequence[str], taken: Sequence[str]) -> None:
        """Make the runtime know ids; those that it knows already stay as they are.

        Args:
            ids: The ids.
            taken: What the runtime has, for messages.

        Raises:
            BackendUnavailableError: The runtime refuses one, or has no room for all; then none is registered.
        """
        missing = [name for name in ids if name not in self._ids]
        if len(taken) + len(missing) > _PLACES:
            raise BackendUnavailableError(
                f"The delegates {', '.join(map(repr, missing))} cannot be registered: the ExecuTorch runtime has room "
                f"for {_PLACES} backends in a process, forgets none, and has {len(taken)}: {', '.join(taken)}. Use "
                "fewer ids in one process, or start another one."
            )
        for name in missing:
            self._ids.append(name)
            error = self._library.exir_register(name.encode(), len(self._ids) - 1)
            if error == 0:
                availability.bridged.add(name)
            else:
                self._ids.pop()
                raise BackendUnavailableError(
                    f"The delegate {name!r} cannot be registered: the ExecuTorch runtime refuses it with error "
                    f"{error:#x}. It has {', '.join(taken)}."
                )

    @contextmanager
    def setting_up(
        self,
        where: str,
        plans: Sequence[Delegation],
        delegates: Mapping[str, Delegate],
        lines: Lines = no_lines,
    ) -> Iterator[None]:
        """Answer for delegates while the context lasts, in which the runtime sets up a method.

        Args:
            where: The method and its file, to begin messages with.
            plans: The parts of the method that backends execute.
            delegates: The file's Python delegates, by their ids.
            lines: Tells the lines of the model that a failure is about.
        """
        setups = self._thread.setups
        setups.append(_Setup(where, delegates, iter([plan for plan in plans if plan.backend in delegates]), lines))
        try:
            with self.listening():
                yield
        finally:
            setups.pop()

    @contextmanager
    def serving(self, delegates: Mapping[str, Delegate]) -> Iterator[None]:
        """Answer, while the context lasts, for programs that something else than `load` sets up, in any thread.

        Args:
            delegates: The delegates, by their ids, which are registered.
        """
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
        except Exception as error:
            let_through(error)
            if thread.failure is None:
                raise
            failed = True
        finally:
            sys.unraisablehook = previous
            thread.listeners -= 1
        failure, thread.failure = thread.failure, None
        # An interrupt counts even if the runtime took no notice of it.
        if failure is not None and (failed or not isinstance(failure, Exception) or passing(failure) is not None):
            raise failure

    # What the shim calls. Nothing may be raised there, and 0 is failure.

    def _available(self, slot: int) -> int:
        setups = self._thread.setups
        return int(self._ids[slot] in (setups[-1].delegates if setups else self._served()))

    def _served(self) -> dict[str, Delegate]:
        return {name: delegate for delegates in self._serving for name, delegate in delegates.items()}

    def _compile(
        self, slot: int, context: int, method: bytes | None, processed: int | None, size: int, specs: Any, count: int
    ) -> int:
        try:
            payload = ctypes.string_at(processed, size) if processed else b""
            told = [
                CompileSpec(
                    specs[i].key.decode(), ctypes.string_at(specs[i].value, specs[i].size) if specs[i].size else b""
                )
                for i in range(count)
            ]
            return self._compiled(self._ids[slot], context, (method or b"").decode(), payload, told)
        except BaseException as failure:
            return self._failed(failure)

    def _failed(self, failure: BaseException) -> int:
        """Keep a failure for who listens, or show it; return the number that the runtime makes of it."""
        self._thread.failure = failure
        if not self._thread.listeners:
            sys.excepthook(type(failure), failure, failure.__traceback__)
        code = getattr(failure.__cause__ or failure, "executorch_error", None)
        return -code if isinstance(code, int) and 0 < code < 0x100 else _FAILED

    def _compiled(self, name: str, context: int, method: str, payload: bytes, specs: list[CompileSpec]) -> int:
        setups = self._thread.setups
        setup = (
            setups[-1] if setups else _Setup(_ELSEWHERE, self._served(), iter([_unknown(name, len(payload))]), no_lines)
        )
        plan = next(setup.plans, None)
        if plan is None or (plan.backend, plan.payload) != (name, len(payload)):
            raise InputError(
                f"{setup.where}: the runtime asks to compile {len(payload)} bytes by {name!r}, not {plan}: {DAMAGED}"
            )
        delegate = setup.delegates[name]
        data = _NamedData(self._library, context)
        recorder = _Recorder(self._ticks, self._event)
        try:
            told_context = DelegateContext(method, data, plan.number, recorder)
            handle = compile_payload(setup.where, delegate, plan, payload, specs, told_context, setup.lines)
        finally:
            data.context = None
        key = next(self._keys)
        self._handles[key], self._recorders[key] = handle, recorder
        return key

    def _execute(self, key: int, arguments: Any, count: int, tracer: int | None) -> int:
        try:
            handle, recorder = self._handles[key], self._recorders[key]
            # A delegate may run its own program again, which may be profiled or not.
            before, recorder.tracer = recorder.tracer, tracer
        except BaseException as failure:
            return self._failed(failure)
        try:
            if handle.plan.arguments == _UNKNOWN:
                handle.plan = _seen(handle.plan, arguments[:count])
                handle.counts = handle.plan.counts
            if count != handle.plan.arguments:
                raise InputError(f"{handle.who} is called with {count} values, not {handle.plan.arguments}: {DAMAGED}")
            settle(handle, lambda outputs: self._executed(handle, outputs, arguments))
            return _DONE
        except BaseException as failure:
            return self._failed(failure)
        finally:
            recorder.tracer = before

    def _executed(self, handle: Handle, count: int, arguments: Any) -> None:
        first = handle.plan.arguments - count
        inputs = [_read(handle, index, arguments[index]) for index in range(first)]
        for index, (value, output) in enumerate(execute(handle, inputs, count)):
            argument = arguments[first + index]
            if (argument.kind == _TENSOR) != isinstance(output, torch.Tensor):
                raise InputError(f"{handle.who}: the runtime has no place for its output {index}: {DAMAGED}")
            if isinstance(output, torch.Tensor):
                self._write(handle, index, value, argument, output)
            elif isinstance(output, bool):
                self._library.exir_set_bool(argument, output)
            elif isinstance(output, int):
                self._library.exir_set_int(argument, output)
            else:
                self._library.exir_set_double(argument, output)

    def _write(self, handle: Handle, index: int, value: ValueSpec, argument: _Argument, output: torch.Tensor) -> None:
        shape = tuple(output.shape)
        if tuple(argument.sizes[: argument.rank]) != shape:
            error = self._library.exir_resize(argument, (ctypes.c_int32 * len(shape))(*shape), len(shape))
            if error != 0:
                raise BackendContractError(
                    f"{handle.who}: output {index} of execute is {show(output)}, and the runtime cannot give that "
                    f"shape to {describe_output(value)}: error {error:#x}."
                )
        if argument.bytes:
            _view(handle, argument).copy_(output.detach() if output.requires_grad else output)

    def _destroy(self, key: int) -> None:
        handle = self._handles.pop(key, None)
        self._recorders.pop(key, None)
        if handle is not None:
            with reporting():
                handle.delegate.destroy(handle.content)

    def _close(self) -> None:
        """Let go of all handles when the interpreter ends; programs that are still alive outlive it.

        The lock is kept, so that no other thread is inside of the runtime when the interpreter goes away.
        """
        locks.engine().acquire(timeout=_EXIT_SECONDS)
        self._library.exir_close()
        for key in list(self._handles):
            self._destroy(key)


def _unknown(backend: str, payload: int) -> Delegation:
    """Return what is known of a payload whose file was not read: nothing but its size."""
    return Delegation(_UNKNOWN, backend, payload, _UNKNOWN, (), ())


def _seen(plan: Delegation, arguments: Sequence[_Argument]) -> Delegation:
    """Return what the first call tells of a payload: what the last values may be, of which at least one is returned."""
    values = []
    for argument in arguments:
        if argument.kind == _TENSOR:
            sizes = tuple(argument.sizes[: argument.rank])
            order = tuple(range(argument.rank))
            values.append(ValueSpec(TENSOR, Tensor(DTYPES[argument.dtype], sizes, order, dynamic=True, unbound=False)))
        else:
            values.append(ValueSpec(NULL, None))
    counts = tuple(range(1, len(values) + 1))
    return replace(plan, arguments=len(values), outputs=tuple(values), counts=counts)


class _Recorder:
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


class _NamedData:
    """Finds named data of a file, as long as its context lives."""

    def __init__(self, library: ctypes.CDLL, context: int) -> None:
        self._library = library
        self.context: int | None = context

    def __call__(self, key: str) -> bytes | None:
        if self.context is None:
            raise RuntimeError(
                f"named_data({key!r}): named data can be read until compile returns, keep it in the handle."
            )
        if not isinstance(key, str) or "\0" in key:
            raise TypeError(f"named_data: got {key!r}, expected a str without null characters.")
        found = _Data()
        error = self._library.exir_named_data(self.context, key.encode(), ctypes.byref(found))
        if error == _NOT_FOUND:
            return None
        if error != 0:
            raise RuntimeError(f"named_data({key!r}): the ExecuTorch runtime cannot read it: error {error:#x}.")
        try:
            return ctypes.string_at(found.data, found.size) if found.size else b""
        finally:
            self._library.exir_release(found.buffer)


def _read(handle: Handle, index: int, argument: _Argument) -> Any:
    kind = argument.kind
    if kind == _TENSOR:
        return _view(handle, argument)
    if kind == _INT:
        return argument.integer
    if kind == _DOUBLE:
        return argument.real
    if kind == _BOOL:
        return bool(argument.integer)
    if kind == _NONE:
        return None
    raise no_list(handle, index)


def _view(handle: Handle, argument: _Argument) -> torch.Tensor:
    """Return a tensor of the runtime as one of torch, on the same memory."""
    rank = argument.rank
    dtype = DTYPES.get(argument.dtype)
    if dtype is None:
        raise BackendFailure(f"{handle.who} is given a tensor of the unknown element type {argument.dtype}.")
    sizes, strides, size = argument.sizes[:rank], argument.strides[:rank], argument.bytes
    if size == 0:
        return torch.empty_strided(sizes, strides, dtype=dtype)
    if not argument.data:
        raise InputError(f"{handle.who}: a tensor of shape {sizes} has no memory: {DAMAGED}")
    return torch.frombuffer(_memory(argument.data, size, _WRITABLE), dtype=dtype).as_strided(sizes, strides)


_bridge: Bridge | None = None


@locks.uses_engine
def bridge() -> Bridge:
    """Return the bridge, made at its first use.

    Raises:
        BackendUnavailableError: The shim cannot be compiled or loaded.
    """
    global _bridge
    with locks.engine():
        if _bridge is None:
            _bridge = Bridge()
        return _bridge
