"""The checks on the file of a case."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Mapping

from exir_lowering.errors import LoweringError
from exir_lowering.testing.samples import Call
from exir_lowering.testing.trial import Broken, Change, Trial, Unsupported, WatchedDelegate, list_event_names

_CHANGED_BYTES = 8
_LOADS = 2
_THREADS = 4
_ROUNDS = 8
_UNWATCHED = "cannot be watched"
_FRAGILE = "are not given damaged payloads: they may end the process"


def check_numbers(trial: Trial) -> None:
    """Compare every call with eager PyTorch."""
    delegate = trial.watch()
    program = trial.load(delegate)
    for number, call in enumerate(trial.sample.calls, 1):
        trial.run(program, call, f"call {number}")
    _check_seen(delegate)


def check_state(trial: Trial) -> None:
    """Run two programs of one file in turn, then a third one: each has separate state, fresh when loaded."""
    delegate = trial.watch()
    programs = {"the first program": trial.load(delegate), "the second program": trial.load(delegate)}
    for number, call in enumerate(trial.sample.calls, 1):
        for which, program in programs.items():
            trial.run(program, call, f"call {number} (state kept from call to call, in {which} of two)")
    fresh = trial.load(delegate)
    for number, call in enumerate(trial.sample.calls, 1):
        trial.run(fresh, call, f"call {number} (in a program that was loaded after others had run)")
    _check_seen(delegate)


def check_two_programs(trial: Trial) -> None:
    """Drop one of two programs of a file, and run the other one."""
    delegate = trial.watch()
    first, second = trial.load(delegate), trial.load(delegate)
    trial.run(first, trial.sample.calls[0], "call 1")
    del first
    gc.collect()
    for call in trial.sample.calls:
        trial.run(second, call, "a call after another program of the same file was dropped")
    _check_seen(delegate)


def check_handles(trial: Trial) -> None:
    """Load and drop a program several times; what `compile` returned is destroyed once, and must not pile up."""
    delegate = _require(trial.watch(), _UNWATCHED)
    for _ in range(_LOADS):
        program = trial.load(delegate)
        trial.run(program, trial.sample.calls[0], "call 1")
        del program
        gc.collect()
    _check_seen(delegate)
    if delegate.destroyed != delegate.compiled or delegate.again:
        raise Broken(
            "destroy",
            f"{delegate.compiled} handles were compiled, {delegate.destroyed} destroyed, and {delegate.again} of them "
            f"more than once, after {_LOADS} programs were loaded and dropped; expected each to be destroyed once. "
            "Keep no part of the program alive, such as the exception, the frame or the program itself.",
        )
    alive = delegate.count_alive()
    if alive >= _LOADS:
        raise Broken(
            "destroy",
            f"{alive} handles are alive after {_LOADS} programs were loaded and dropped; expected none. "
            "Release in `destroy` what `compile` returned: remove it from lists and caches.",
        )


def check_threads(trial: Trial) -> None:
    """Run one program in several threads."""
    program = trial.load(trial.watch())
    failures: list[Broken] = []

    def work() -> None:
        try:
            for call in trial.sample.calls * _ROUNDS:
                trial.run(program, call, "a call in one of several threads")
        except Broken as broken:
            failures.append(broken)

    workers = [threading.Thread(target=work) for _ in range(_THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]


def check_profile(trial: Trial) -> None:
    """Profile a call: events are recorded then only, so that a wrong identifier is seen here and nowhere else."""
    delegate = _require(trial.watch(), _UNWATCHED)
    program = trial.load(delegate)
    for call in _first_of_each_method(trial.sample.calls):
        try:
            rows = program.profile(call.method, *call.inputs).rows
        except MemoryError:
            raise
        except Exception as error:
            raise Broken("profile", f"profiling method {call.method!r} failed: {error}") from error
        names = {row.name for row in rows if row.kind == "instruction"}
        unknown = sorted(names - list_event_names(trial.lowered))
        if unknown:
            raise Broken(
                "profile",
                f"`execute` recorded {unknown[0]!r}, which is not in the debug_handle_map of any payload. Use the "
                "map's keys as identifiers in `context.event(...)`.",
            )
    _check_seen(delegate)


def check_wrong_number_of_inputs(trial: Trial) -> None:
    """Execute a payload with one input less and one more."""
    delegate = _require(trial.watch(probe=True), _FRAGILE)
    program = trial.load(delegate)
    for call in trial.sample.calls:
        trial.run(program, call, "a call after `execute` was given a wrong number of inputs")
    if delegate.accepted:
        raise Broken(
            "inputs",
            f"`execute` accepted {delegate.accepted[0]} without raising. A file does not say where the inputs of a "
            "call end, so `execute` may be tried with more or fewer: write their number into the payload and compare.",
        )
    _check_seen(delegate)


def check_no_payload(trial: Trial) -> None:
    """Compile bytes that are not a payload."""
    _check_refusals(
        trial, {"an empty payload": lambda p: b"", "bytes of another kind": lambda p: b"no payload of a backend"}
    )


def check_truncated_payload(trial: Trial) -> None:
    """Compile payloads that are cut off."""

    def cut(share: float) -> Change:
        return lambda payload: payload[: max(1, int(len(payload) * share))]

    changes = {f"the first {share:.0%} of a payload": cut(share) for share in (0.1, 0.25, 0.5, 0.75, 0.9)}
    _check_refusals(trial, {**changes, "a payload without its last byte": lambda payload: payload[:-1]})


def check_changed_start(trial: Trial) -> None:
    """Compile payloads with one of the first bytes changed."""

    def change(position: int) -> Change:
        return lambda p: p[:position] + bytes([p[position] ^ 0x55]) + p[position + 1 :] if position < len(p) else b""

    _check_refusals(trial, {f"a payload with byte {i} changed": change(i) for i in range(_CHANGED_BYTES)})


CHECKS: Mapping[str, Callable[[Trial], None]] = {
    check.__name__.removeprefix("check_").replace("_", "-"): check
    for check in (
        check_numbers, check_state, check_two_programs, check_handles, check_threads, check_profile,
        check_wrong_number_of_inputs, check_no_payload, check_truncated_payload, check_changed_start,
    )
}  # fmt: skip
"""The checks, by the name that cases use."""


def _check_refusals(trial: Trial, changes: Mapping[str, Change]) -> None:
    """Load and run changed payloads: something has to be raised, or the numbers have to be right."""
    for what, change in changes.items():
        delegate = _require(trial.watch(change), _FRAGILE)
        calls = _first_of_each_method(trial.sample.calls)
        try:
            program = trial.open(delegate)
            results = [(call, program.run(call.method, *call.inputs)) for call in calls]
        except LoweringError:
            continue
        problems = [problem for call, outputs in results if (problem := trial.describe_difference(outputs, call))]
        if problems:
            raise Broken(
                "payload",
                f"the delegate accepted {what} and gave wrong numbers ({problems[0]}) Raise in `compile`: write a "
                "magic number, a version and the length, or a checksum, into the payload, and compare.",
            )
    good = trial.load(trial.watch())
    for call in trial.sample.calls:
        trial.run(good, call, "a call after damaged payloads were refused")


def _first_of_each_method(calls: Iterable[Call]) -> Iterable[Call]:
    seen: dict[str, Call] = {}
    for call in calls:
        seen.setdefault(call.method, call)
    return seen.values()


def _require(delegate: WatchedDelegate | None, why: str) -> WatchedDelegate:
    if delegate is None:
        raise Unsupported(f"the runtime's own delegates {why}")
    return delegate


def _check_seen(delegate: WatchedDelegate | None) -> None:
    """Check what was seen while a delegate was at work."""
    if delegate is None:
        return
    if delegate.written:
        raise Broken(
            "inputs",
            f"`execute` wrote to {delegate.written[0]}: inputs are the runtime's memory, which other operators read "
            "too. Compute into new tensors.",
        )
    if delegate.raised:
        raise Broken(
            "destroy", f"`destroy` raised {delegate.raised[0]}. It has to release one handle, once, and no other."
        )
