"""The checks on the file of a case."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from itertools import pairwise

from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering.errors import LimitError, LoweringError
from exir_lowering.lowered import LoweredMethods
from exir_lowering.plugins import registry
from exir_lowering.plugins.backend import NAMES
from exir_lowering.plugins.worker_errors import WorkerDiedError
from exir_lowering.testing.samples import Call
from exir_lowering.testing.trial import (
    Broken,
    Change,
    Trial,
    Unsupported,
    WatchedDelegate,
    list_modules,
    list_payloads,
    lower_case,
)

_LOADS, _THREADS, _ROUNDS = 5, 4, 8
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
    for number, call in enumerate(trial.sample.calls, 1):
        trial.run(program, call, f"call {number} (in a program that was reset after it had run)", reset=number == 1)
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
    trial.run(second, trial.sample.calls[0], "a call after a reset, which destroys handles", reset=True)
    _check_seen(delegate)


def check_handles(trial: Trial) -> None:
    """Load and drop a program several times; what `compile` returned is destroyed once, and must not pile up."""
    delegate = _require(trial.watch(), _UNWATCHED)
    objects = []
    for _ in range(_LOADS):
        program = trial.load(delegate)
        trial.run(program, trial.sample.calls[0], "call 1")
        del program
        gc.collect()
        objects.append(len(gc.get_objects()))
    _check_seen(delegate)
    if delegate.destroyed != delegate.compiled:
        raise Broken(
            "destroy",
            f"{delegate.compiled} handles were compiled and {delegate.destroyed} destroyed when programs were dropped; "
            "expected each to be, once. Keep no part of the program alive, such as an exception, a frame or itself.",
        )
    grown = min(more - less for less, more in pairwise(objects[1:]))  # what is made once, is by the second one
    if grown > 0:
        text = "programs were loaded and dropped; expected none. Release what `compile` makes: remove it from lists,"
        what = f"there are {grown} more objects each time after {_LOADS}"
        raise Broken("destroy", f"{what} {text} tables and caches in `destroy`.")


def check_threads(trial: Trial) -> None:
    """Run one program in several threads."""
    program = trial.load(trial.watch())

    def work(number: int) -> None:
        for call in trial.sample.calls * _ROUNDS:
            trial.run(program, call, "a call in one of several threads")

    with ThreadPoolExecutor(_THREADS) as workers:
        list(workers.map(work, range(_THREADS)))  # which raises what one of them did


def check_profile(trial: Trial) -> None:
    """Profile a call: events are recorded then only, so that a wrong identifier is seen here and nowhere else."""
    delegate = trial.watch() if trial.subject.libraries else _require(trial.watch(), _UNWATCHED)
    program = trial.load(delegate)
    for call in _first_of_each_method(trial.sample.calls):
        try:
            rows = program.profile(call.method, *call.inputs).rows
        except MemoryError:
            raise
        except Exception as error:
            raise Broken("profile", f"profiling method {call.method!r} failed: {error}") from error
        names = {row.name for row in rows if row.kind == "instruction"}
        maps = (module.meta.get("debug_handle_map") or {} for module in list_modules(trial.lowered))
        unknown = sorted(names - {key if isinstance(key, str) else f"event {key}" for found in maps for key in found})
        if unknown:
            text = "is not in the debug_handle_map of any payload. Use its keys as identifiers in `context.event(...)`."
            raise Broken("profile", f"`execute` recorded {unknown[0]!r}, which {text}")
    _check_seen(delegate)


def check_wrong_number_of_inputs(trial: Trial) -> None:
    """Execute a payload with one input less and one more."""
    delegate = _require(trial.watch(probe=True), _FRAGILE)
    program = trial.load(delegate)
    for call in trial.sample.calls:
        trial.run(program, call, "a call after `execute` was given a wrong number of inputs")
    if delegate.accepted:
        text = "A file does not say where the inputs of a call end: write their number into the payload and compare."
        raise Broken("inputs", f"`execute` accepted {delegate.accepted[0]} without raising. {text}")
    _check_seen(delegate)


def check_damaged(changes: Mapping[str, Change], trial: Trial) -> None:
    """Load and run changed payloads: something has to be raised, or the numbers have to be right."""
    for what, change in changes.items():
        delegate = None if trial.subject.libraries else _require(trial.watch(change), _FRAGILE)
        calls = _first_of_each_method(trial.sample.calls)
        try:
            with redirect_stderr(io.StringIO()):  # the runtime logs each payload that is refused, as all should be
                program = trial.open(delegate, change)
                results = [(call, program.run(call.method, *call.inputs)) for call in calls]
        except LoweringError as error:
            if isinstance(error, LimitError) or isinstance(error.__cause__, WorkerDiedError):
                raise Broken("payload", f"{what} is not refused: {error}") from error
            continue
        problems = [problem for call, outputs in results if (problem := trial.describe_difference(outputs, call))]
        if problems:
            text = "Raise in `compile`: write a magic number, version and length, or a checksum, into the payload."
            raise Broken("payload", f"the delegate accepted {what} and gave wrong numbers ({problems[0]}) {text}")
    good = trial.load(trial.watch())
    for call in trial.sample.calls:
        trial.run(good, call, "a call after damaged payloads were refused")


def check_repeated(first: LoweredMethods, second: LoweredMethods) -> None:
    """Check that a program that was lowered twice gave the same: partitions, then what the backend made of them."""
    once, then = (
        [" ".join(one.nodes) for method in lowered.report.methods for one in method.partitions]
        for lowered in (first, second)
    )
    if once != then:
        text = "What it takes may only depend on the program: keep no count or cache between calls."
        raise Broken("partitioner", f"the partitioner does not repeat itself: it took {once}, and then {then}. {text}")
    made = (zip(list_payloads(lowered), list_modules(lowered), strict=True) for lowered in (first, second))
    for number, pair in enumerate(zip(*made, strict=True)):
        maps = [module.meta.get("debug_handle_map") for _, module in pair]
        parts = ((*made, handles) for (made, _), handles in zip(pair, maps, strict=True))
        for what, one, other in zip(("payload", "named data", "debug_handle_map"), *parts, strict=True):
            if one != other:
                text = "no time, id, counter, random number or order of a set may be in it, or files cannot be compared"
                where = f"the {what} of partition {number} differs when the same program is lowered twice"
                raise Broken("determinism", f"{where}: {text} and cached.")


def check_unread(trial: Trial) -> None:
    """Lower the program again with other names and other source lines, as far as the backend does not read them."""
    name, given = trial.subject.backend_id, trial.subject.backend
    unread = (registry.find_backend(name) if given is None else registry.as_backend(name, given)).unread
    if not unread:
        raise Unsupported("the backend's `unread` is empty, so that all that it may read is in the key of its cache")

    def reads(keys: Collection[str]) -> bool:
        aten, edge = (
            {method: _disguise(program, frozenset(keys)) for method, program in programs.items()}
            for programs in (trial.sample.aten, trial.sample.edge)
        )
        again = lower_case(trial.subject, trial.case, replace(trial.sample, aten=aten, edge=edge))
        return list_payloads(again) != list_payloads(trial.lowered)

    if reads(unread):
        read = [key for key in sorted(unread) if reads({key})] or sorted(unread)
        raise Broken(
            "unread",
            f"the payload is another one for the same program with other {', '.join(read)}: the backend says in "
            "`unread` that it does not read that, and the cache would give the payload of another model. Number values "
            "in the payload instead of naming them, or take what is read out of `unread`.",
        )


def _disguise(program: ExportedProgram, unread: frozenset[str]) -> ExportedProgram:
    """Return a copy of a program that a backend which does not read some things cannot tell from it."""
    copied = graphs.copy_program(program)
    nodes, weights = dict[str, str](), dict[str, str]()
    for number, node in enumerate(copied.graph.nodes):
        for key in unread & node.meta.keys():
            node.meta[key] = f"{node.meta[key]}, disguised" if isinstance(node.meta[key], str) else None
        if NAMES in unread and node.op != "output":
            nodes[node.name] = f"disguised_{number}"
            node.name = nodes[node.name]
    for table in (copied.state_dict, copied.constants) if NAMES in unread else ():
        for name in list(table):
            weights[name] = f"disguised_{len(weights)}"
            table[weights[name]] = table.pop(name)
    for spec in (*copied.graph_signature.input_specs, *copied.graph_signature.output_specs):
        if (name := getattr(spec.arg, "name", None)) in nodes:
            spec.arg.name = nodes[name]
        spec.target = weights.get(str(spec.target), spec.target)
    return copied


def _cut(share: float) -> Change:
    return lambda payload: payload[: max(1, int(len(payload) * share))]


def _flip(position: int) -> Change:
    return lambda p: p[:position] + bytes([p[position] ^ 0x55]) + p[position + 1 :] if position < len(p) else b""


CHECKS: Mapping[str, Callable[[Trial], None]] = {
    "numbers": check_numbers,
    "state": check_state,
    "two-programs": check_two_programs,
    "handles": check_handles,
    "threads": check_threads,
    "profile": check_profile,
    "unread": check_unread,
    "wrong-number-of-inputs": check_wrong_number_of_inputs,
    "no-payload": partial(
        check_damaged,
        {"an empty payload": lambda p: b"", "bytes of another kind": lambda p: b"no payload of a backend"},
    ),
    "truncated-payload": partial(
        check_damaged,
        {f"the first {share:.0%} of a payload": _cut(share) for share in (0.1, 0.25, 0.5, 0.75, 0.9)}
        | {"a payload without its last byte": lambda payload: payload[:-1]},
    ),
    "changed-start": partial(check_damaged, {f"a payload with byte {i} changed": _flip(i) for i in range(8)}),
}  # the checks, by the name that cases use

AHEAD_OF_TIME = frozenset({"unread"})  # those that need no delegate


def _first_of_each_method(calls: Iterable[Call]) -> Iterable[Call]:
    return {call.method: call for call in reversed([*calls])}.values()


def _require(delegate: WatchedDelegate | None, why: str) -> WatchedDelegate:
    if delegate is None:
        raise Unsupported(f"the runtime's own delegates {why}", "unwatched")
    return delegate


def _check_seen(delegate: WatchedDelegate | None) -> None:
    """Check what was seen while a delegate was at work."""
    if delegate is None:
        return
    if delegate.written:
        text = "inputs are the runtime's memory, which other operators read too. Compute into new tensors."
        raise Broken("inputs", f"`execute` wrote to {delegate.written[0]}: {text}")
    if delegate.raised:
        text = "It has to release one handle, once, and no other."
        raise Broken("destroy", f"`destroy` raised {delegate.raised[0]}. {text}")
