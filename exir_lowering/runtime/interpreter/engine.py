"""Run the methods of a file in Python: the same results, where ExecuTorch's runtime cannot be used.

It is not the real runtime: operators are PyTorch's. A file that calls a kernel which the runtime does not have is
refused nevertheless, if the runtime is available to be asked.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import torch

from exir_lowering._upstream.ambient import neutral
from exir_lowering._upstream.runtime import compile_spec
from exir_lowering.errors import BackendUnavailableError, InputError, LimitError, LoweringError, let_through
from exir_lowering.graphs.operators.budget import STEPS
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.pte.code import Code, Payload, read_code
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.format import SHARED, Delegation, MethodSpec
from exir_lowering.pte.instructions import DELEGATE, JUMP, KERNEL, MOVE
from exir_lowering.pte.value_kinds import Tensor
from exir_lowering.runtime import contract
from exir_lowering.runtime.engine import EVENTS, METHOD_EVENT, Engine, Trace, TraceEvent, explaining
from exir_lowering.runtime.inputs import look_at
from exir_lowering.runtime.interpreter import hosted
from exir_lowering.runtime.interpreter.kernels import (
    DoesNotFit,
    Kernel,
    MethodState,
    Slot,
    allocate_arenas,
    find_kernel,
    make_slot,
)
from exir_lowering.runtime.source import ProgramFile, Unavailable, find_delegates

Watch: TypeAlias = Callable[[MethodState, int, int, tuple[int, ...]], None]
"""Takes the values of a method, and the number, kind and arguments of an instruction."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedMethod:
    """A method that is set up."""

    where: str  # the method and its file, to begin messages with
    code: Code
    state: MethodState  # its values
    kernels: Sequence[Kernel]  # what executes each operator
    calls: Sequence[Kernel]  # what executes each payload
    trace: Trace | None  # None when nothing is recorded
    watch: Watch | None = None  # is shown each kernel and payload when it has been executed

    def run(self, inputs: Sequence[Any], steps: int) -> list[Any]:
        """Run the method; raise an InputError if an operator fails, a LimitError after some steps."""
        code, target = MOVE, 0
        try:
            for index, given in zip(self.code.inputs, inputs, strict=True):
                if isinstance(given, torch.Tensor):
                    self.state.slot(index).write(given)
            left = steps
            for chain in self.code.chains:
                position = 0
                while position < len(chain):
                    if not left:
                        raise self._too_long(steps, position, inputs)
                    left -= 1
                    code, target, arguments = chain[position]
                    position = self._step(position, code, target, arguments)
            code = MOVE
            outputs = [self.state.values[index] for index in self.code.outputs]
            return [output.tensor.clone() if isinstance(output, Slot) else output for output in outputs]
        except LoweringError:
            raise  # raised by a delegate
        except Exception as error:
            let_through(error)
            raise self._failure(f"{self._at(code, target)}: {error}", inputs) from error

    def _step(self, position: int, code: int, target: int, arguments: tuple[int, ...]) -> int:
        """Execute an instruction; return the position of the next one."""
        values = self.state.values
        if code in EVENTS:
            start = self.trace.begin(position, EVENTS[code]) if self.trace is not None else 0
            (self.kernels if code == KERNEL else self.calls)[target](self.state, arguments)
            if self.trace is not None:
                self.trace.end(position, EVENTS[code], start)
            if self.watch is not None:
                self.watch(self.state, position, code, arguments)
        elif code == MOVE:
            values[arguments[1]] = values[arguments[0]]
        elif code == JUMP and not _holds(values[arguments[0]]):
            return target
        return position + 1

    def _at(self, code: int, target: int) -> str:
        """Say at which instruction something failed, if it is one that calls something."""
        if code == KERNEL:
            return f", at {'.'.join(part for part in self.code.operators[target] if part)}"
        return f", at {self.code.payloads[target].backend}" if code == DELEGATE else ""

    def _failure(self, what: str, inputs: Sequence[Any]) -> InputError:
        return InputError(f"{self.where} failed in the interpreter{what}. {look_at(inputs)}")

    def _too_long(self, steps: int, position: int, inputs: Sequence[Any]) -> LoweringError:
        if steps < STEPS:
            return LimitError(
                f"{self.where} was ended: it executed {steps:,} instructions, which is limits.steps. Raise the limit "
                "if it needs more.",
                limit="steps",
            )
        return self._failure(
            f": {STEPS:,} instructions were executed, which is where ExecuTorch's runtime ends a run too; the next one "
            f"is instruction {position}. A loop in the file does not end",
            inputs,
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


@cache
def _close_at_exit() -> None:
    """Keep other threads out while handles are released at exit; what is registered later is called before."""
    atexit.register(contract.keep_others_out)


@dataclass(frozen=True, slots=True, eq=False)
class Interpreter(Engine[PreparedMethod]):
    """A file that Python runs; `open_interpreter` makes it."""

    name = "interpreter"
    refusal = "The interpreter refuses what would not run on a device. "

    codes: Mapping[str, Code]  # of the methods, by name
    own: Mapping[str, memoryview]  # the named data in the file
    named: Mapping[str, memoryview]  # that, and the data of its data file
    shared: torch.Tensor | None  # the memory that methods share
    trace: Trace | None = None  # None when nothing is recorded
    watch: Watch | None = None  # is shown what methods do

    def run(self, method: MethodSpec, inputs: Sequence[Any]) -> list[Any]:
        """Run a method; see `Engine`."""
        with neutral():
            return self.prepare(method).run(inputs, self.steps)

    def record(self, method: MethodSpec, inputs: Sequence[Any], runs: int) -> list[TraceEvent]:
        """Run a method in separate memory, and record what it does; see `Engine`."""
        recorded = Trace()
        shared = None if self.shared is None else torch.zeros_like(self.shared)
        engine = replace(self, shared=shared, ready={}, trace=recorded)
        for _ in range(runs):
            start = recorded.begin(-1, METHOD_EVENT)
            engine.run(method, inputs)
            recorded.end(-1, METHOD_EVENT, start)
        return recorded.events

    def _set_up(self, method: MethodSpec) -> PreparedMethod:
        where, code = self.file.where(method.name), self.codes[method.name]
        with explaining(
            lambda error: (
                f"{where} cannot be set up by the interpreter: {error}. The file may be damaged. Make or copy it again."
            )
        ):
            shared = self.shared if method.name in self.file.sharing else None
            arenas = allocate_arenas(code.arenas if shared is None else code.arenas[:SHARED])
            if shared is not None:
                arenas.append(shared)
            values = [
                make_slot(value.content, storage, arenas, self.named)
                if isinstance(value.content, Tensor) and storage is not None
                else value.content
                for value, storage in zip(code.values, code.storage, strict=True)
            ]
        kernels = [self._kernel(where, *operator) for operator in code.operators]
        state, calls = MethodState(code.values, values), self._calls(method, code)
        return PreparedMethod(where, code, state, kernels, calls, self.trace, self.watch)

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
            [compile_spec(*spec) for spec in payload.specs],
            self._find_data,
            self.trace,
            self.file.debug.lines(method),
        )
        return PythonCall(contract.compile_payload(delegate, job))

    def _find_data(self, key: str) -> bytes | None:
        return bytes(self.named[key]) if key in self.named else None

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
            call = hosted.host(method, payload, plan, values, self.own, self.file.data.path())
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
    """Open a file for the interpreter, and find its Python delegates."""
    found, missing = find_delegates(file, given, unavailable)
    external = file.data.content()
    try:
        codes, data = read_code(file.content())
    except CorruptError as error:
        raise InputError(f"{file.name} cannot be loaded: it has changed in the meantime: {error}.") from None
    shared = None
    if file.sharing:
        try:
            (shared,) = allocate_arenas([max(file.methods[name].arenas[SHARED] for name in file.sharing)])
        except DoesNotFit as error:
            raise InputError(f"{file.name} cannot be loaded by the interpreter: {error}.") from None
    return Interpreter(file, found, codes, data.named, {**external, **data.named}, shared, missing=missing)
