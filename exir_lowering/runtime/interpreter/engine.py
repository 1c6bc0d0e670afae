"""Run the methods of a file in Python: the same results, where ExecuTorch's runtime cannot be used.

It is not the real runtime: operators are PyTorch's. A file that calls a kernel which the runtime does not have is
refused nevertheless, if the runtime is available to be asked.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from exir_lowering._upstream.ambient import neutral
from exir_lowering.errors import BackendUnavailableError, InputError, LimitError, LoweringError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.graphs.operators.budget import STEPS
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.pte.dataflow import DELEGATE, JUMP, KERNEL, MOVE
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.format import Delegation, MethodSpec
from exir_lowering.pte.value_kinds import Tensor
from exir_lowering.runtime import contract, trace
from exir_lowering.runtime.engine import Engine
from exir_lowering.runtime.find import Unavailable, find_delegates
from exir_lowering.runtime.inputs import look_at
from exir_lowering.runtime.interpreter import hosted, memory
from exir_lowering.runtime.interpreter.code import Code, Listing, Payload, read_code
from exir_lowering.runtime.interpreter.kernels import Kernel, MethodState, find_kernel
from exir_lowering.runtime.interpreter.memory import Slot
from exir_lowering.runtime.source import ProgramFile
from exir_lowering.runtime.trace import Trace, TraceEvent

_SHARED = 2
_EVENTS = {KERNEL: trace.KERNEL, DELEGATE: trace.DELEGATE}


@dataclass(frozen=True, slots=True, eq=False)
class PreparedMethod:
    """A method that is set up."""

    code: Code
    state: MethodState  # its values
    kernels: Sequence[Kernel]  # what executes each operator
    calls: Sequence[Kernel]  # what executes each payload
    trace: Trace | None = None  # None when nothing is recorded

    def run(self, inputs: Sequence[Any], steps: int) -> list[Any]:
        """Run the method; raise Stopped if an operator fails, TooLong after some steps, a delegate's LoweringError."""
        values = self.state.values
        for index, given in zip(self.code.inputs, inputs, strict=True):
            if isinstance(given, torch.Tensor):
                self.state.slot(index).write(given)
        left = steps
        for chain in self.code.chains:
            position = 0
            while position < len(chain):
                if not left:
                    raise TooLong(position)
                left -= 1
                position = self._step(position, *chain[position])
        outputs = [values[index] for index in self.code.outputs]
        return [output.tensor.clone() if isinstance(output, Slot) else output for output in outputs]

    def _step(self, position: int, code: int, target: int, arguments: tuple[int, ...]) -> int:
        """Execute an instruction; return the position of the next one."""
        values = self.state.values
        if code in (KERNEL, DELEGATE):
            start = self.trace.begin(position, _EVENTS[code]) if self.trace is not None else 0
            try:
                (self.kernels if code == KERNEL else self.calls)[target](self.state, arguments)
            except LoweringError:
                raise  # raised by a delegate
            except Exception as error:
                let_through(error)
                raise Stopped(self._name(code, target)) from error
            if self.trace is not None:
                self.trace.end(position, _EVENTS[code], start)
        elif code == MOVE:
            values[arguments[1]] = values[arguments[0]]
        elif code == JUMP and not _holds(values[arguments[0]]):
            return target
        return position + 1

    def _name(self, code: int, target: int) -> str:
        if code == DELEGATE:
            return self.code.payloads[target].backend
        return ".".join(part for part in self.code.operators[target] if part)


class Stopped(Exception):
    """An operator failed; its exception is the `__cause__`."""


class TooLong(Exception):
    """A run executed as many instructions as ExecuTorch's runtime allows for one."""

    def __init__(self, position: int) -> None:
        super().__init__(
            f"{STEPS:,} instructions were executed, which is where ExecuTorch's runtime ends a run too; the "
            f"next one is instruction {position}. A loop in the file does not end"
        )


def _holds(value: Any) -> bool:
    return bool(value.tensor.all()) if isinstance(value, Slot) else bool(value)


class PythonCall:
    """A payload that a Python delegate has compiled; it is destroyed when nothing refers to it any more."""

    def __init__(self, handle: contract.Handle) -> None:
        self.handle = handle
        self.close = weakref.finalize(self, contract.destroy, handle)
        _close_at_exit()

    def __call__(self, state: MethodState, arguments: tuple[int, ...]) -> None:
        """Execute the payload with these values of the method."""
        contract.settle(self.handle, lambda count: self._execute(state, arguments, count))

    def _execute(self, state: MethodState, arguments: tuple[int, ...], count: int) -> None:
        first = len(arguments) - count
        inputs = [self._input(state, position, index) for position, index in enumerate(arguments[:first])]
        returned = contract.execute(self.handle, inputs, count)
        for index, (_, output) in zip(arguments[first:], returned, strict=True):
            if not isinstance(output, torch.Tensor):
                state.values[index] = output
            else:
                state.slot(index).write(output.detach())

    def _input(self, state: MethodState, position: int, index: int) -> Any:
        value = state.get(index)
        if isinstance(value, (list, str)):
            raise contract.refuse_list(self.handle, position)
        # An object of its own: the delegate cannot change the shape of the method's.
        return value.detach() if isinstance(value, torch.Tensor) else value


_closes_at_exit = False


def _close_at_exit() -> None:
    """Keep other threads out while handles are released at exit; what is registered later is called before."""
    global _closes_at_exit
    if not _closes_at_exit:
        _closes_at_exit = True
        atexit.register(contract.keep_others_out)


@dataclass(frozen=True, slots=True, eq=False)
class Interpreter(Engine[PreparedMethod]):
    """A file that Python runs; `open_interpreter` makes it."""

    name = "interpreter"
    refusal = "The interpreter refuses what would not run on a device. "

    listing: Listing
    external: Mapping[str, memoryview]  # the named data of its data file
    shared: torch.Tensor | None  # the memory that methods share
    trace: Trace | None = None  # None when nothing is recorded

    def run(self, method: MethodSpec, inputs: Sequence[Any]) -> list[Any]:
        """Run a method; see `Engine`."""
        with neutral():
            return self._run(method, inputs)

    def _run(self, method: MethodSpec, inputs: Sequence[Any]) -> list[Any]:
        ready = self.prepare(method)
        try:
            return ready.run(inputs, self.steps)
        except LoweringError:
            raise  # raised by a delegate
        except Stopped as stopped:
            error = stopped.__cause__
            raise InputError(
                f"{self.file.where(method.name)} failed in the interpreter, at {stopped}: {error}. {look_at(inputs)}"
            ) from error
        except Exception as error:
            let_through(error)
            where = self.file.where(method.name)
            if isinstance(error, TooLong) and self.steps < STEPS:
                raise LimitError(
                    f"{where} was ended: it executed {self.steps:,} instructions, which is limits.steps. Raise the "
                    "limit if it needs more.",
                    limit="steps",
                ) from error
            raise InputError(f"{where} failed in the interpreter: {error}. {look_at(inputs)}") from error

    def record(self, method: MethodSpec, inputs: Sequence[Any], runs: int) -> list[TraceEvent]:
        """Run a method in memory of its own, and record what it does; see `Engine`."""
        recorded = Trace()
        shared = None if self.shared is None else torch.zeros_like(self.shared)
        engine = replace(self, shared=shared, ready={}, trace=recorded)
        for _ in range(runs):
            start = recorded.begin(-1, trace.METHOD)
            engine.run(method, inputs)
            recorded.end(-1, trace.METHOD, start)
        return recorded.events

    def _sharing(self, method: MethodSpec) -> Collection[str]:
        return self.file.sharing if method.name in self.file.sharing else ()

    def _set_up(self, method: MethodSpec) -> PreparedMethod:
        with neutral():
            return self._set_up_neutrally(method)

    def _set_up_neutrally(self, method: MethodSpec) -> PreparedMethod:
        where, code = self.file.where(method.name), self.listing.methods[method.name]
        try:
            shared = self.shared if method.name in self.file.sharing else None
            arenas = memory.allocate_arenas(code.arenas if shared is None else code.arenas[:_SHARED])
            if shared is not None:
                arenas.append(shared)
            values = [
                memory.make_slot(value.content, storage, arenas)
                if isinstance(value.content, Tensor) and storage is not None
                else value.content
                for value, storage in zip(code.values, code.storage, strict=True)
            ]
        except Exception as error:
            let_through(error)
            raise InputError(
                f"{where} cannot be set up by the interpreter: {error}. The file may be damaged. Make or copy it again."
            ) from error
        kernels = [self._kernel(where, *operator) for operator in code.operators]
        return PreparedMethod(code, MethodState(code.values, values), kernels, self._calls(method, code), self.trace)

    def _kernel(self, where: str, name: str, overload: str) -> Kernel:
        found = find_kernel(name, overload)
        if found is None:
            shown = f"{name}.{overload}" if overload else name
            raise InputError(
                f"{where} cannot run: PyTorch has no operator {shown} here, which the interpreter calls in its place. "
                "Import the library that has it."
            )
        return found

    def _calls(self, method: MethodSpec, code: Code) -> list[Kernel]:
        """Return what executes each payload of a method; one that fails destroys those before it."""
        calls: list[Kernel] = []
        try:
            for number, (payload, plan) in enumerate(zip(code.payloads, method.delegations, strict=True)):
                delegate = self.delegates.get(payload.backend)
                if delegate is not None:
                    calls.append(self._compile(method.name, delegate, payload, plan))
                else:
                    calls.append(self._host(method.name, code, number, plan))
        except BaseException:
            for call in calls:
                if isinstance(call, PythonCall):
                    call.close()
            raise
        return calls

    def _compile(self, method: str, delegate: Delegate, payload: Payload, plan: Delegation) -> PythonCall:
        job = contract.Compilation(
            self.file.where(method),
            method,
            plan,
            bytes(payload.content),
            payload.specs,
            self._find_data,
            self.trace,
            self.file.debug.lines(method),
        )
        return PythonCall(contract.compile_payload(delegate, job))

    def _find_data(self, key: str) -> bytes | None:
        return next((bytes(data[key]) for data in (self.listing.named, self.external) if key in data), None)

    def _host(self, method: str, code: Code, number: int, plan: Delegation) -> Kernel:
        payload = code.payloads[number]
        called = (
            arguments
            for chain in code.chains
            for kind, target, arguments in chain
            if kind == DELEGATE and target == number
        )
        values = [code.values[index] for index in next(called, ())]
        where = f"{self.file.where(method)}: the payload of {payload.backend!r}"
        try:
            call = hosted.host(method, payload, plan, values, self.listing.named, self.file.data.path())
            self.file.data.check()
            return call
        except InputError:
            raise  # another data file has taken the place of one
        except hosted.NotHosted as error:
            raise BackendUnavailableError(
                f'{where} cannot be executed by the interpreter: {error}. Load the file with engine="runtime".'
            ) from None
        except Exception as error:
            let_through(error)
            raise InputError(
                f"{where} is refused by the ExecuTorch runtime, which executes it for the interpreter: {error}. The "
                "runtime's own lines above this one, on stderr, say why: the file may be damaged, be made for another "
                "version of a backend, or keep weights in a .ptd data file that was not given as data=."
            ) from error


def open_interpreter(file: ProgramFile, given: Mapping[str, Any], unavailable: Unavailable) -> Interpreter:
    """Open a file for the interpreter, and find its Python delegates; raise what `find_delegates` raises.

    Raise an InputError when the file has changed in the meantime, or needs more memory than there is.
    """
    found = find_delegates(file, given, unavailable)
    external = file.data.content()
    try:
        listing = read_code(file.content(), external)
    except CorruptError as error:
        raise InputError(f"{file.name} cannot be loaded: it has changed in the meantime: {error}.") from None
    shared = None
    if file.sharing:
        try:
            (shared,) = memory.allocate_arenas([max(file.methods[name].arenas[_SHARED] for name in file.sharing)])
        except memory.DoesNotFit as error:
            raise InputError(f"{file.name} cannot be loaded by the interpreter: {error}.") from None
    return Interpreter(file, found, listing, external, shared)
