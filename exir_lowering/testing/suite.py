"""Try a backend: find its partitioner and delegate, run every case, and report."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from exir_lowering._upstream import installed
from exir_lowering._upstream.compiler import BackendDetails, ExecutorchBackendConfig, Partitioner
from exir_lowering.errors import InputError, LoweringError, UnknownPluginError, exception_text
from exir_lowering.lowered import LoweredMethods
from exir_lowering.partitioners import RuledPartitioner, SupportPartitioner, deny, everything
from exir_lowering.plugins import availability, registry
from exir_lowering.plugins.backend import Backend, CompileSpec, TagsNodes
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.testing.case_checks import CHECKS
from exir_lowering.testing.cases import OPERATOR_CASES, PROGRAM_CASES
from exir_lowering.testing.samples import Case, Sample, forget, take_sample
from exir_lowering.testing.suite_report import CaseResult, ConformanceReport
from exir_lowering.testing.trial import (
    Broken,
    Subject,
    Trial,
    Unsupported,
    list_payloads,
    lower_case,
    take_fingerprint,
)

CASES: tuple[Case, ...] = (*OPERATOR_CASES, *PROGRAM_CASES)
"""Every case: operators, element types, layouts and weights first, then whole programs."""

AVAILABLE = "suite/available"
"""The name of the test that fails when the delegate that was given is not available."""

SOMETHING_PASSES = "suite/something-passes"
"""The name of the test that fails when the backend supports no case."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The cases, for one backend."""

    subject: Subject
    cases: tuple[Case, ...]
    note: str  # why nothing is executed, "" when it is
    with_delegate: bool  # whether a delegate was given
    unavailable: CaseResult | None = None  # the failure of a given delegate that is not available here
    results: dict[str, CaseResult] = field(default_factory=dict)  # so far, by case

    def run(self, case: Case) -> CaseResult:
        """Try one case, once."""
        if case.name not in self.results:
            self.results[case.name] = _try_case(self.subject, case, self.note)
        return self.results[case.name]

    def report(self) -> ConformanceReport:
        """Try all cases."""
        first = () if self.unavailable is None else (self.unavailable,)
        results = (*first, *(self.run(case) for case in self.cases))
        return ConformanceReport(self.subject.backend_id, results, self.note)


def make_suite(
    backend: Backend | type[Backend] | type[BackendDetails] | str,
    delegate: Delegate | type[Delegate] | None = None,
    *,
    partitioner: TagsNodes | str | None = None,
    supports: Any = None,
    compile_specs: Sequence[CompileSpec] = (),
    cases: Sequence[Case | str] | None = None,
    atol: float | None = None,
    rtol: float | None = None,
) -> Suite:
    """Check the arguments of `check_backend`, and find what they leave out; none of the cases has been tried yet."""
    chosen = _choose_cases(cases)
    for name, tolerance in (("atol", atol), ("rtol", rtol)):
        number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
        if tolerance is not None and not (number and 0 <= tolerance < math.inf):
            raise InputError(f"check_backend: got {name}={tolerance!r}, expected a number of at least 0, or None.")
    backend_id, given = _find_backend(backend)
    executor, note = _find_delegate(backend_id, delegate)
    make_partitioner, may_refuse = _find_partitioner(backend_id, partitioner, supports, compile_specs)
    subject = Subject(backend_id, given, executor, make_partitioner, may_refuse, atol, rtol)
    unavailable = None
    if delegate is not None and note:  # it would pass because it was never called
        text = (
            f"nothing was executed with {delegate!r}: {note}. Run the suite where `is_available` returns True, or "
            "leave the delegate out to try what the backend makes ahead of time only."
        )
        unavailable = CaseResult(AVAILABLE, "failed", "available", text)
    return Suite(subject, chosen, note, delegate is not None, unavailable)


def _find_backend(backend: Any) -> tuple[str, Any]:
    if isinstance(backend, str):
        registry.find_backend(backend)
        return backend, None
    if isinstance(backend, type) and issubclass(backend, BackendDetails):
        return backend.__name__, backend
    kind = backend if isinstance(backend, type) else type(backend)
    backend_id = getattr(backend, "backend_id", None)
    if not issubclass(kind, Backend) or not isinstance(backend_id, str) or not backend_id:
        raise InputError(
            f"check_backend: got {backend!r} as the backend, expected an exir_lowering.Backend with a backend_id "
            "(object or class), an ExecuTorch BackendDetails class, or the id of an installed backend."
        )
    registry.as_backend(backend_id, backend)
    return backend_id, backend


def _find_delegate(backend_id: str, delegate: Any) -> tuple[Any, str]:
    """Return the delegate, and why nothing executes the files, "" when something does."""
    if backend_id in installed.own_backends() and delegate is not None:
        raise InputError(
            f"check_backend: the ExecuTorch runtime has {backend_id!r} itself, which a delegate cannot replace. Leave "
            "the delegate out, or give the backend another id."
        )
    if getattr(delegate, "delegate_id", backend_id) != backend_id:
        raise InputError(
            f"check_backend: the delegate {delegate!r} has the id {delegate.delegate_id!r}, expected that of the "
            f"backend, {backend_id!r}: a file names the backend, and its delegate is found by that name."
        )
    found = availability.executor(backend_id, None if delegate is None else {backend_id: delegate})
    if isinstance(found, availability.Missing):
        return None, found.reason
    return found if delegate is None else delegate, ""


def _find_partitioner(
    backend_id: str, partitioner: Any, supports: Any, compile_specs: Sequence[CompileSpec]
) -> tuple[Callable[[Case], Partitioner], Callable[[Case], bool]]:
    """Return what makes a case's partitioner, and whether the backend may refuse what it is given."""
    if partitioner is not None and supports is not None:
        raise InputError("check_backend: got partitioner= and supports=, expected one of them.")
    # Whether a backend keeps state is nothing that a support of operators says.
    refusing: Callable[[Case], bool] = lambda case: case.stateful  # noqa: E731
    if partitioner is None and supports is None:
        try:
            partitioner = registry.find_partitioner(backend_id)
        except UnknownPluginError:
            supports, refusing = everything(), lambda case: True
    if supports is None:
        if isinstance(partitioner, str):
            partitioner = registry.find_partitioner(partitioner)
        if not isinstance(partitioner, Partitioner):
            raise InputError(
                f"check_backend: got partitioner={partitioner!r}, expected an ExecuTorch Partitioner or the name of an "
                "installed one."
            )
        refusing = lambda case: False  # noqa: E731

    def make(case: Case) -> Partitioner:
        made = partitioner
        if supports is not None:
            specs = {backend_id: list(compile_specs)}
            made = SupportPartitioner({backend_id: supports}, compile_specs=specs, own_state=case.stateful)
        return RuledPartitioner(made, deny(op=list(case.host), required=False)) if case.host else made

    make(CASES[0])  # wrong arguments are reported at once
    return make, refusing


def _choose_cases(cases: Sequence[Case | str] | None) -> tuple[Case, ...]:
    if cases is None:
        return CASES
    listed = [cases] if isinstance(cases, (str, Case)) else cases
    if not isinstance(listed, Iterable):
        raise InputError(
            f"check_backend: got cases={cases!r}, expected names such as 'ops/add', patterns such as 'ops/*', or cases "
            "of your own, in a list."
        )
    chosen: dict[str, Case] = {}
    for wanted in listed:
        if isinstance(wanted, Case):
            found = [wanted]
        else:
            found = [case for case in CASES if fnmatch.fnmatchcase(case.name, str(wanted))]
        if not found:
            raise InputError(
                f"check_backend: no case is called {wanted!r}; expected names such as 'ops/add', or patterns such as "
                f"'ops/*'. The features are {', '.join(dict.fromkeys(case.feature for case in CASES))}."
            )
        for case in found:
            if chosen.setdefault(case.name, case) != case:
                raise InputError(f"check_backend: two cases are called {case.name!r}. Give one of them another name.")
            if case.check not in CHECKS:
                raise InputError(
                    f"check_backend: the case {case.name!r} has the check {case.check!r}, expected one of "
                    f"{', '.join(CHECKS)}."
                )
    return tuple(chosen.values())


def _try_case(subject: Subject, case: Case, note: str) -> CaseResult:
    counts: tuple[int, int] = (0, 0)
    try:
        ready = take_sample(case)
    except MemoryError:
        raise
    except Exception as error:  # whatever a case of the caller's own raises, or torch.export about it
        text = (
            f"the case cannot be made: {exception_text(error)}. Its `build` has to return methods by name, "
            "which run in eager PyTorch and can be exported."
        )
        return CaseResult(case.name, "failed", "build", text)
    before = take_fingerprint(ready.edge)
    try:
        lowered = lower_case(subject, case, ready)
        methods = lowered.report.methods
        counts = sum(method.delegated for method in methods), sum(len(method.nodes) for method in methods)
        taken = [partition for method in methods for partition in method.partitions]
        mine = sum(partition.backend_id == subject.backend_id for partition in taken)
        if mine < case.partitions:
            reasons = [f" ({node.operator}: {node.reason})" for method in methods for node in method.host]
            why = f"the backend got {mine} partitions, the case needs {case.partitions}"
            raise Unsupported(why + "".join(reasons[:1]))
        _check_deterministic(subject, case, ready, lowered)
        content = _emit(case, lowered)
        if not note:
            CHECKS[case.check](Trial(subject, ready, lowered, content))
    except Unsupported as reason:
        return CaseResult(case.name, "skipped", "", str(reason), *counts)
    except Broken as broken:
        if take_fingerprint(ready.edge) != before:
            forget(case)
        return CaseResult(case.name, "failed", broken.check, f"{broken}\nIt demands: {case.demand}", *counts)
    if note:
        return CaseResult(case.name, "lowered", "", f"lowered, not executed: {note}", *counts)
    return CaseResult(case.name, "passed", "", "", *counts)


def _check_deterministic(subject: Subject, case: Case, ready: Sample, lowered: LoweredMethods) -> None:
    try:
        again = list_payloads(lower_case(subject, case, ready))
    except Unsupported as reason:
        raise Broken("determinism", f"the backend took the case once, and the second time it did not: {reason}") from (
            reason
        )
    for number, (first, second) in enumerate(zip(list_payloads(lowered), again, strict=True)):
        if first != second:
            what = "payload" if first[0] != second[0] else "named data"
            one, other = first[0], second[0]
            at = next(
                (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(map(len, (one, other)))
            )
            raise Broken(
                "determinism",
                f"the {what} of partition {number} differs when the same program is lowered twice: from byte {at} on, "
                f"{one[at : at + 24]!r} and {other[at : at + 24]!r}. Equal programs have to give equal bytes, or files "
                "cannot be compared and cached: no time, id, counter, random number or order of a set may be in them.",
            )


def _emit(case: Case, lowered: LoweredMethods) -> bytes:
    from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass

    # State that stays on the host has no initial value in a file unless its names are given.
    names = [name for method in case.build().values() for name in method.module] if case.stateful else []
    passes = [InitializedMutableBufferPass(sorted(set(names)))] if names else []
    try:
        return lowered.emit(ExecutorchBackendConfig(passes=passes)).buffer
    except LoweringError as error:
        raise Broken("emit", str(error)) from error
