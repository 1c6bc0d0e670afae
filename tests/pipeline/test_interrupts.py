"""What is nobody's mistake passes through every place that catches the exceptions of others."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from interrupts import interrupted_after
from lowering_support import TagPartitioner
from scripted import ScriptBackend, ScriptDelegate

import exir_lowering
from exir_lowering import Backend
from exir_lowering.partitioners import SupportPartitioner, where


class Late(BaseException):
    """What a caller's own timeout raises, to pass through everything."""


def late(number: int, frame: object) -> None:
    raise Late("time is over")


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def interrupt(*_: Any, **__: Any) -> Any:
    """Do what is interrupted by a timeout."""
    signal.raise_signal(signal.SIGUSR1)
    return list(range(10))


def run_out(*_: Any, **__: Any) -> Any:
    raise MemoryError("cannot allocate")


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


X = torch.ones(3)
PROGRAM = torch.export.export(Model(), (X,))


def lowered() -> exir_lowering.LoweredMethods:
    return exir_lowering.lower(PROGRAM, TagPartitioner(backend="script"), backends={"script": ScriptBackend})


def backend(**methods: Any) -> Callable[[], Any]:
    kind = type("Interrupted", (Backend,), {"backend_id": "interrupted", "preprocess": interrupt, **methods})
    return lambda: exir_lowering.lower(PROGRAM, TagPartitioner(backend="interrupted"), backends={"interrupted": kind})


def partitioner(name: str) -> Callable[[Any], Callable[[], Any]]:
    def make(happens: Any) -> Callable[[], Any]:
        kind: Any = type("Interrupted", (TagPartitioner,), {name: happens})
        return lambda: exir_lowering.lower(PROGRAM, kind(), backends={"echo": ScriptBackend})

    return make


def delegate(name: str) -> Callable[[Any], Callable[[], Any]]:
    def make(happens: Any) -> Callable[[], Any]:
        kind: Any = type("Interrupted", (ScriptDelegate,), {name: happens})
        buffer = lowered().emit().buffer
        return lambda: exir_lowering.load(buffer, delegates={"script": kind}).run("forward", X)

    return make


def making(happens: Any) -> Callable[[], Any]:
    kind: Any = type("Interrupted", (ScriptBackend,), {"__init__": happens})
    return lambda: exir_lowering.lower(PROGRAM, TagPartitioner(backend="script"), backends={"script": kind})


PLACES: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "a backend's preprocess": lambda happens: backend(preprocess=happens),
    "a backend's preprocess_all": lambda happens: backend(preprocess_all=happens),
    "a backend's copy": lambda happens: backend(copy_program=happens),
    "making a backend": making,
    "a partitioner": partitioner("partition"),
    "the conversion to Edge dialect": partitioner("ops_to_not_decompose"),
    "a support": lambda happens: lambda: exir_lowering.lower(PROGRAM, SupportPartitioner({"echo": where(happens)})),
    "a policy for weights": lambda happens: (
        lambda: exir_lowering.lower(Weighted.program()).emit(external_weights=happens)
    ),
    **{f"{name} of a delegate": delegate(name) for name in ("is_available", "compile", "execute")},
}


class Weighted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    @classmethod
    def program(cls) -> torch.export.ExportedProgram:
        return torch.export.export(cls().eval(), (torch.ones(64),))


@pytest.mark.parametrize("place", PLACES)
def test_a_timeout_and_a_want_of_memory_are_what_they_are(place: str) -> None:
    with handled_by(late), pytest.raises(Late):
        PLACES[place](interrupt)()
    with pytest.raises(MemoryError, match="cannot allocate"):
        PLACES[place](run_out)()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("place", ["a backend's preprocess", "a partitioner", "execute of a delegate"])
def test_what_ends_a_program_is_what_it_is(place: str, stop: type[BaseException]) -> None:
    def happens(*_: Any, **__: Any) -> Any:
        raise stop

    with pytest.raises(stop):
        PLACES[place](happens)()


def test_after_a_timeout_all_works_as_before() -> None:
    buffer = lowered().emit().buffer

    class Once(ScriptDelegate):
        late = True

        def execute(self, handle: Any, inputs: Any) -> Any:
            if Once.late:
                Once.late = False
                interrupt()
            return super().execute(handle, inputs)

    Once.late = True
    program = exir_lowering.load(buffer, delegates={"script": Once})
    with handled_by(late), pytest.raises(Late):
        program.run("forward", X)
    torch.testing.assert_close(program.run("forward", X)[0], X + X)


def test_after_any_interrupt_of_a_run_the_next_one_works() -> None:
    program = exir_lowering.load(lowered().emit().buffer, delegates={"script": ScriptDelegate})
    program.run("forward", X)
    start = time.perf_counter()
    program.run("forward", X)
    lasts = time.perf_counter() - start
    for number in range(400):
        with interrupted_after(1e-5 + 1.5 * lasts * number / 400):
            program.run("forward", X)
        torch.testing.assert_close(program.run("forward", X)[0], X + X)
