"""Any public call from any thread: results are those of one thread, and nothing stays behind in the process."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from executorch.exir.backend import backend_api
from interrupts import interrupted_after
from lowering_support import TagPartitioner
from torch.export import ExportedProgram

from exir_lowering import (
    Backend,
    CompileSpec,
    Delegate,
    LoweredMethods,
    LoweringOptions,
    PreprocessResult,
    compat,
    load,
    lower,
    plan,
)
from exir_lowering._upstream import locks
from exir_lowering._upstream.tracing import ConversionState

CALLS = int(os.environ.get("EXIR_LOWERING_EXAMPLES", "16"))
"""How often four threads together lower and emit."""

SECONDS = 120
"""After which a thread or a child counts as hanging."""


class _Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu().sin()


class _Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + x) * 2


@dataclass(frozen=True)
class Job:
    """A program and what lowers it, with the file that one thread alone makes of it."""

    program: ExportedProgram
    partitioner: str
    file: bytes

    def run(self) -> bytes:
        return lower(self.program, self.partitioner).emit().buffer


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    torch.manual_seed(0)
    given = (torch.ones(2, 4),)
    programs = [torch.export.export(module.eval(), given) for module in (_Linear(), _Sum())]
    both = itertools.product(programs, ("xnnpack", "reference"))
    return [Job(program, partitioner, lower(program, partitioner).emit().buffer) for program, partitioner in both]


@pytest.fixture
def small(jobs: list[Job]) -> Job:
    """The linear layer, which torch traces: it is composite."""
    return jobs[1]


def _in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run something in threads, and raise what the first of them raised."""
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work, number) for number in range(count)]:
            future.result(SECONDS * 10)


def _in_child(work: Callable[[], object]) -> None:
    """Run something in a forked child, which has to end well."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(SECONDS)
    if child.is_alive():
        child.kill()
        pytest.fail("the forked child hangs")
    assert child.exitcode == 0


def _free_for_others() -> bool:
    """Tell whether another thread gets the locks at once."""
    got: list[bool] = []

    def take() -> None:
        for lock in (locks._locks.conversions, locks._locks.engine):
            got.append(lock.acquire(timeout=1))
            if got[-1]:
                lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(SECONDS)
    return got == [True, True]


def _state() -> list[tuple[str, int]]:
    return [(name, id(value)) for _, name, value in ConversionState()._switches if name != "current_meta"]


# -- four threads ------------------------------------------------------------------------------------------------------


def test_what_four_threads_make_is_what_one_makes(jobs: list[Job]) -> None:
    """Different programs and the same one, XNNPACK and reference, beside plans and programs that run."""
    turns, done = itertools.count(), threading.Event()
    linear = load(jobs[0].file)
    given = torch.ones(2, 4)
    (expected,) = linear.run("forward", given)
    ran = []

    def run() -> None:
        while not done.wait(0.01):
            ran.append(torch.equal(linear.run("forward", given)[0], expected))

    def work(number: int) -> None:
        while (turn := next(turns)) < CALLS:
            job = jobs[(turn + number) % len(jobs)]
            if turn % 10 == 9:
                assert plan(job.program, job.partitioner).methods
            assert job.run() == job.file

    beside = threading.Thread(target=run)
    beside.start()
    try:
        _in_threads(4, work)
    finally:
        done.set()
        beside.join(SECONDS)
    assert ran and all(ran)
    assert jobs[0].run() == jobs[0].file


def test_executorchs_own_functions_wait_too_where_it_is_patched(small: Job) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    def make(number: int = 0) -> bytes:
        manager = to_edge_transform_and_lower(small.program, partitioner=[XnnpackPartitioner()])
        return bytes(manager.to_executorch().buffer)

    alone = make()
    with compat.patch_executorch():
        _in_threads(2, lambda number: _equal(make(), alone))


def _equal(got: object, expected: object) -> None:
    assert got == expected


def test_patches_of_several_threads_end_in_any_order() -> None:
    original = backend_api.to_backend.dispatch(ExportedProgram)
    first, second = compat.patch_executorch(), compat.patch_executorch(convex_proposals=True)
    with ExitStack() as stack:
        stack.enter_context(second)
        with first:
            pass
        assert backend_api.to_backend.dispatch(ExportedProgram) is not original
    assert backend_api.to_backend.dispatch(ExportedProgram) is original


# -- plug-ins that lower -----------------------------------------------------------------------------------------------


class _Lowering(Backend):
    """Runs something before it returns an empty payload."""

    backend_id = "lowering"

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work

    def preprocess(self, program: ExportedProgram, compile_specs: list[CompileSpec]) -> PreprocessResult:
        self.work()
        return PreprocessResult(b"")


class _Parallel(_Lowering):
    parallel = "thread"


def _lower_with(job: Job, backend: Backend, **options: Any) -> LoweredMethods:
    partitioner, found = TagPartitioner(backend="lowering"), {"lowering": backend}
    return lower(job.program, partitioner, backends=found, options=LoweringOptions(**options))


def _joined(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _pooled(work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(3) as pool:
        assert len(list(pool.map(lambda _: work(), range(3)))) == 3


@pytest.mark.filterwarnings("ignore::exir_lowering.BackendUnavailableWarning")
@pytest.mark.parametrize(
    ("kind", "way"),
    [(_Lowering, lambda work: work()), (_Parallel, _joined), (_Parallel, _pooled)],
    ids=["itself", "thread", "pool"],
)
def test_a_backend_may_lower_itself_or_if_it_is_parallel_in_threads_that_it_waits_for(
    small: Job, kind: type[_Lowering], way: Callable[[Any], object]
) -> None:
    made: list[bytes] = []
    backend = kind(lambda: way(lambda: made.append(small.run())))
    work = threading.Thread(target=_lower_with, args=(small, backend), daemon=True)
    work.start()
    work.join(SECONDS)
    assert not work.is_alive(), "lower waits for a thread that waits for it"
    assert made and set(made) == {small.file}
    assert _free_for_others()


@pytest.mark.filterwarnings("ignore::exir_lowering.BackendUnavailableWarning")
def test_what_lowers_in_threads_does_it_alone_where_they_would_wait_for_it(jobs: list[Job]) -> None:
    """The threads of `jobs=` would wait for the lock of the backend that lowers, and that for them."""
    ran: list[threading.Thread] = []

    def lower_in_jobs() -> None:
        backend = _Parallel(lambda: ran.append(threading.current_thread()))
        lower(
            {"one": jobs[-1].program, "two": jobs[-1].program},
            TagPartitioner(backend="lowering"),
            backends={"lowering": backend},
            options=LoweringOptions(jobs=2),
        )

    lower_in_jobs()
    assert len(ran) == 2 and threading.current_thread() not in ran
    ran.clear()
    work = threading.Thread(target=_lower_with, args=(jobs[-1], _Lowering(lower_in_jobs)), daemon=True)
    work.start()
    work.join(SECONDS)
    assert ran == [work, work]


@pytest.mark.filterwarnings("ignore::exir_lowering.BackendUnavailableWarning")
def test_nobody_waits_for_a_backend_that_declares_itself_parallel(small: Job) -> None:
    others = threading.Event()
    seen: list[bool] = []
    inside = threading.Event()

    def wait() -> None:
        inside.set()
        seen.append(others.wait(SECONDS))

    work = threading.Thread(target=_lower_with, args=(small, _Parallel(wait)), daemon=True)
    work.start()
    assert inside.wait(SECONDS)
    assert small.run() == small.file
    others.set()
    work.join(SECONDS)
    assert seen == [True]


class _Running(Delegate):
    """Does something when it executes, and returns its input."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work

    def execute(self, handle: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.work()
        return [inputs[0]]


@pytest.mark.filterwarnings("ignore::exir_lowering.BackendUnavailableWarning")
def test_a_delegate_that_lowers_and_a_parallel_backend_that_runs_do_not_wait_for_each_other(small: Job) -> None:
    """One has the runtime and wants to convert, the other wants the runtime: it must not have the lock of the first."""
    converting, running = threading.Event(), threading.Event()
    made: list[Any] = []
    loaded = load(small.file)

    def run() -> None:
        converting.set()
        assert running.wait(SECONDS)
        made.append(loaded.run("forward", torch.ones(2, 4)))

    def convert() -> None:
        running.set()
        assert converting.wait(SECONDS)
        made.append(small.run() == small.file)

    file = _lower_with(small, _Lowering(lambda: None)).emit().buffer
    program = load(file, delegates={"lowering": _Running(convert)})
    threads = [
        threading.Thread(target=_lower_with, args=(small, _Parallel(run)), daemon=True),
        threading.Thread(target=program.run, args=("forward", torch.ones(2, 4)), daemon=True),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert len(made) == 2 and True in made


# -- what fails leaves nothing behind ----------------------------------------------------------------------------------


def test_an_interrupt_at_any_moment_leaves_nothing_behind(small: Job) -> None:
    before = _state()
    for number in range(12):
        with interrupted_after(0.01 + 0.03 * number):
            small.run()
        assert _state() == before
        assert _free_for_others()
    assert small.run() == small.file


def test_an_interrupt_while_torch_replaces_kernels_leaves_none(small: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch puts them back only if it got as far as having replaced all of them."""
    from torch.export import exported_program

    from exir_lowering._upstream.value_keys import MEMORY
    from exir_lowering.fast import lookups

    MEMORY.clear()  # what is known is not converted again
    lookups._KERNELS.clear()
    find = exported_program._get_decomp_for_cia
    asked = []

    def interrupt(operator: Any) -> Any:
        asked.append((operator, dict(operator.py_kernels)))
        if len(asked) == 300:
            raise KeyboardInterrupt
        return find(operator)

    tables = {op: dict(op.py_kernels) for op in exported_program._collect_all_valid_cia_ops()}
    monkeypatch.setattr(exported_program, "_get_decomp_for_cia", interrupt)
    with pytest.raises(KeyboardInterrupt):
        small.run()
    monkeypatch.undo()
    assert len(asked) == 300
    assert {op: dict(op.py_kernels) for op in tables} == tables
    assert small.run() == small.file


@pytest.mark.filterwarnings("ignore::exir_lowering.BackendUnavailableWarning")
@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_backend_that_fails_in_the_middle_of_tracing_leaves_nothing_behind(
    small: Job, failure: type[BaseException]
) -> None:
    before = _state()

    def fail() -> None:
        from torch.fx import _symbolic_trace

        patcher = _symbolic_trace._Patcher()
        _symbolic_trace.CURRENT_PATCHER = patcher
        if hasattr(_symbolic_trace, "_is_fx_tracing_flag"):
            _symbolic_trace._is_fx_tracing_flag = True
        else:
            _symbolic_trace._set_is_fx_tracing(True)
        patcher.patch_method(torch.nn.Module, "__call__", lambda *given: None)
        raise failure

    with pytest.raises(BaseException):  # noqa: B017
        _lower_with(small, _Lowering(fail))
    assert _state() == before
    assert _free_for_others()


# -- forked children ---------------------------------------------------------------------------------------------------


@contextmanager
def _busy(work: Callable[[Callable[[], None]], object]) -> Iterator[None]:
    """Keep a thread at some point of its work while the context lasts."""
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        inside.set()
        assert leave.wait(SECONDS)

    thread = threading.Thread(target=work, args=(stay,), daemon=True)
    thread.start()
    try:
        assert inside.wait(SECONDS)
        yield
    finally:
        leave.set()
        thread.join(SECONDS)


@pytest.mark.filterwarnings("ignore::exir_lowering.BackendUnavailableWarning")
def test_a_child_that_is_forked_while_a_thread_runs_a_program_runs_programs(small: Job) -> None:
    file = _lower_with(small, _Lowering(lambda: None)).emit().buffer
    other = load(small.file)
    given = torch.ones(2, 4)
    expected = other.run("forward", given)[0]
    stay: list[Callable[[], None]] = []
    program = load(file, delegates={"lowering": _Running(lambda: stay[-1]())})

    def run(stays: Callable[[], None]) -> None:
        stay.append(stays)
        program.run("forward", given)

    def child() -> None:
        stay.append(lambda: None)
        assert torch.equal(other.run("forward", given)[0], expected)
        assert torch.equal(program.run("forward", given)[0], given)

    with _busy(run):
        _in_child(child)
    stay.append(lambda: None)
    assert torch.equal(program.run("forward", given)[0], given)


class _Pausing(torch.nn.Module):
    """Stops while it is traced."""

    def __init__(self, stay: Callable[[], None]) -> None:
        super().__init__()
        self.stay = stay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stay()
        return x + 1


@pytest.mark.filterwarnings("ignore::exir_lowering.BackendUnavailableWarning")
def test_a_child_that_is_forked_in_the_middle_of_a_conversion_converts(small: Job) -> None:
    before = _state()

    def trace(stay: Callable[[], None]) -> None:
        with compat.patch_executorch():
            _lower_with(small, _Lowering(lambda: torch.fx.symbolic_trace(_Pausing(stay))))

    original = backend_api.to_backend.dispatch(ExportedProgram)

    def child() -> None:
        assert _state() == before
        assert backend_api.to_backend.dispatch(ExportedProgram) is original
        assert small.run() == small.file
        assert _free_for_others()

    with _busy(trace):
        assert _state() != before
        assert backend_api.to_backend.dispatch(ExportedProgram) is not original
        _in_child(child)
    assert _state() == before


@pytest.mark.filterwarnings("ignore::exir_lowering.BackendUnavailableWarning")
def test_a_backend_that_forks_keeps_its_lock_in_the_child(small: Job) -> None:
    forked: list[bool] = []

    def fork() -> None:
        _in_child(lambda: _equal((_free_for_others(), small.run()), (False, small.file)))
        forked.append(True)

    _lower_with(small, _Lowering(fork))
    assert forked == [True]
    assert _free_for_others()
