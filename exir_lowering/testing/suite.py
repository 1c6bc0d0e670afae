"""Try a backend: find its partitioner and delegate, run every case, and report."""

from __future__ import annotations

import fnmatch
import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

from exir_lowering._upstream import installed
from exir_lowering._upstream.compiler import BackendDetails, ExecutorchBackendConfig, Partitioner
from exir_lowering._upstream.stderr import without_logs
from exir_lowering.errors import InputError, LoweringError, UnknownPluginError, exception_text
from exir_lowering.partitioners import RuledPartitioner, SupportPartitioner, deny, everything
from exir_lowering.plugins import availability, registry
from exir_lowering.plugins.backend import Backend, CompileSpec, TagsNodes
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.testing.case_checks import AHEAD_OF_TIME, CHECKS, check_repeated
from exir_lowering.testing.cases import OPERATOR_CASES
from exir_lowering.testing.choosing import Choice
from exir_lowering.testing.program_cases import PROGRAM_CASES
from exir_lowering.testing.samples import Case, forget, take_sample
from exir_lowering.testing.suite_report import CaseResult, ConformanceError, ConformanceReport
from exir_lowering.testing.trial import Broken, Subject, Trial, Unsupported, locate, lower_case

CASES: tuple[Case, ...] = (*OPERATOR_CASES, *PROGRAM_CASES)
"""Every case: operators and element types first, then whole programs."""

REQUIRED = ("weights", "degenerate", "partitions", "methods", "life", "errors")
"""The features of which a case has to run: backends of float32 operators have them, whatever these are."""

SOMETHING_PASSES = "suite/something-passes"  # the name of the test that fails when the backend supports no case


_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Suite:
    """The cases, for one backend."""

    subject: Subject
    cases: tuple[Case, ...]
    note: str  # why nothing is executed, "" when it is
    choice: Choice
    results: dict[str, CaseResult] = field(default_factory=dict)  # so far, by case

    def run(self, case: Case) -> CaseResult:
        """Try one case, once."""
        if case.name not in self.results:
            self.results[case.name] = _try_case(self, case)
        return self.results[case.name]

    def report(self) -> ConformanceReport:
        """Try all cases."""
        results = tuple(map(self.run, self.cases))
        return ConformanceReport(self.subject.backend_id, results, self.note, self.list_uncovered())

    def list_uncovered(self) -> tuple[str, ...]:
        """Return the features of which all cases were to be run, and the backend took none."""
        chosen = {case.name for case in self.cases}
        known = {name: [c for c in CASES if c.name.startswith(f"{name}/")] for name in REQUIRED}
        whole = {name: map(self.run, cases) for name, cases in known.items() if all(c.name in chosen for c in cases)}
        # What cannot be watched is skipped for no reason of the backend's.
        return tuple(name for name, found in whole.items() if all(r.status == "skipped" and not r.check for r in found))


def make_suite(
    backend: Backend | type[Backend] | type[BackendDetails] | str,
    delegate: Delegate | type[Delegate] | None = None,
    *,
    libraries: Sequence[str | os.PathLike[str]] = (),
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
    given: Any = None if isinstance(backend, str) else backend
    kind = backend if isinstance(backend, type) else type(backend)
    if isinstance(backend, str):
        backend_id: Any = backend
        registry.find_backend(backend)
    else:
        details = kind is backend and issubclass(kind, BackendDetails)
        backend_id = kind.__name__ if details else getattr(backend, "backend_id", None)
        if not issubclass(kind, (Backend, BackendDetails)) or not isinstance(backend_id, str) or not backend_id:
            raise InputError(
                f"check_backend: got {backend!r} as the backend, expected an exir_lowering.Backend with a backend_id "
                "(object or class), an ExecuTorch BackendDetails class, or the id of an installed backend."
            )
        registry.as_backend(backend_id, backend)
    if delegate is not None and backend_id in installed.own_backends():
        text = "itself, which no delegate can replace. Leave it out, or give the backend another id"
        raise InputError(f"check_backend: the ExecuTorch runtime has {backend_id!r} {text}.")
    if delegate is not None and getattr(delegate, "delegate_id", backend_id) != backend_id:
        got = f"the delegate {delegate!r} has the id {delegate.delegate_id!r}"
        raise InputError(f"check_backend: {got}, expected that of the backend, {backend_id!r}, as files name that.")
    paths = installed.load_libraries("check_backend", libraries, here=False)
    found = availability.executor(backend_id, None if delegate is None else {backend_id: delegate})
    note = found.reason if isinstance(found, availability.Missing) and not (paths and delegate is None) else ""
    if delegate is not None and note:
        text = "Run this where it is available, or leave it out to try only what the backend makes ahead of time"
        raise InputError(f"check_backend: nothing would be executed with {delegate!r}: {note}. {text}.")
    executor: Any = delegate if delegate is not None or paths else None if note else found
    make_partitioner, may_refuse = _find_partitioner(backend_id, partitioner, supports, compile_specs)
    subject = Subject(backend_id, given, executor, paths, make_partitioner, may_refuse, atol, rtol)
    return Suite(subject, chosen, note, Choice(subject))


def _with_arguments_of(other: Callable[_Given, Any]) -> Callable[[Callable[..., _Made]], Callable[_Given, _Made]]:
    """Give a function that hands all that it is given to another one the signature of that."""

    def decorate(function: Callable[..., _Made]) -> Callable[_Given, _Made]:
        made = inspect.signature(function).return_annotation
        function.__signature__ = inspect.signature(other).replace(return_annotation=made)  # type: ignore[attr-defined]
        return function

    return decorate


@_with_arguments_of(make_suite)
def check_backend(*given: Any, **named: Any) -> ConformanceReport:  # noqa: D417  # the signature has them
    """Try a backend and its delegate in every case, and raise when one fails.

    A case is a small program. It is lowered twice, which has to give equal bytes and change nothing, then executed, and
    the outputs of several calls are compared with eager PyTorch's. A backend need not take every operator: it is asked
    first which ones it takes, and programs are made of these; what its partitioner leaves stays on the host, and a case
    is skipped if the backend gets nothing of it. Of weights, partitions, methods, degenerate programs, lives of handles
    and errors, which backends of float32 operators have, a case has to run if all are chosen. Without a partitioner,
    the backend gets everything, and may refuse in `preprocess` with a NotImplementedError or an InputError that names
    what it does not take; then the case is skipped.

    Args:
        backend: A `Backend` (object or class), an ExecuTorch `BackendDetails` class, or the id of an installed backend.
        delegate: The delegate that executes its payloads; it has to be available. None if ExecuTorch's runtime has it,
            or it is installed; if there is none, nothing is executed, and cases are "lowered" rather than "passed".
        libraries: C++ libraries, as for `load`, that execute the payloads too, after the delegate if one is given: each
            program in a process of its own, so that a crash fails its case only.
        partitioner: An ExecuTorch `Partitioner`, or the name of an installed one. By default the one that is installed
            under the backend's id.
        supports: What the backend takes, instead of a partitioner: as for `SupportPartitioner`.
        compile_specs: The compile specs for the backend, if no partitioner gives them.
        cases: Names of cases, patterns such as "ops/*", or cases of your own; by default all `CASES`.
        atol: The absolute tolerance of floating-point numbers; by default it depends on their type.
        rtol: The relative tolerance.

    Returns:
        The report: how many cases of each feature passed, and why the others were skipped.

    Raises:
        ConformanceError: A case failed, or all were skipped, or all of such a feature. The message names each failure;
            `report` has everything.
        InputError: An argument is invalid.
        UnknownPluginError: No backend or partitioner of that name is installed.
        PluginLoadError: The backend or the delegate cannot be made.
    """
    with warnings.catch_warnings(action="ignore", category=FutureWarning), without_logs():  # of torch, about itself
        report = make_suite(*given, **named).report()
    if not report.conforms:
        raise ConformanceError(report)
    return report


@_with_arguments_of(make_suite)
def conformance_tests(*given: Any, **named: Any) -> Callable[[str], None]:
    """Make a pytest test of each case.

        # test_my_backend.py
        from exir_lowering.testing import conformance_tests
        from my_package import MyBackend, MyDelegate

        test_conformance = conformance_tests(MyBackend, MyDelegate)

    `pytest test_my_backend.py -k state/counter` runs one of them. A case that the backend does not support, or that
    nothing here executes, is skipped with the reason. The test "suite/something-passes" fails when it supports none, or
    none of a feature that backends have.
    The arguments are those of `check_backend`.

    Returns:
        A parametrised test function, to be given a name that begins with `test_`.

    Raises:
        InputError, UnknownPluginError, PluginLoadError: As for `check_backend`.
    """
    import pytest  # here, as only tests have it

    suite = make_suite(*given, **named)
    cases = {case.name: case for case in suite.cases}

    @pytest.mark.parametrize("conformance_case", [*cases, SOMETHING_PASSES])
    def test_conformance(conformance_case: str) -> None:
        if conformance_case == SOMETHING_PASSES:
            passes = any(suite.run(case).status in ("passed", "lowered") for case in suite.cases)
            if not passes or suite.list_uncovered():
                raise ConformanceError(suite.report())
            return
        result = suite.run(cases[conformance_case])
        if result.status in ("skipped", "lowered"):
            pytest.skip(result.text)
        if result.status == "failed":
            pytest.fail(str(result), pytrace=False)

    return test_conformance


def _find_partitioner(
    backend_id: str, partitioner: Any, supports: Any, compile_specs: Sequence[CompileSpec]
) -> tuple[Callable[[Case], Partitioner], Callable[[Case], bool]]:
    """Return what makes a case's partitioner, and whether the backend may refuse what it is given."""
    if partitioner is not None and supports is not None:
        raise InputError("check_backend: got partitioner= and supports=, expected one of them.")
    refuses_all = False
    if partitioner is None and supports is None:
        try:
            partitioner = registry.find_partitioner(backend_id)
        except UnknownPluginError:
            supports, refuses_all = everything(), True
    if isinstance(partitioner, str):
        partitioner = registry.find_partitioner(partitioner)
    if supports is None and not isinstance(partitioner, Partitioner):
        raise InputError(f"check_backend: got {partitioner=}, expected an ExecuTorch Partitioner or the name of one.")

    def make(case: Case) -> Partitioner:
        made = partitioner
        if supports is not None:
            specs = {backend_id: list(compile_specs)}
            made = SupportPartitioner({backend_id: supports}, compile_specs=specs, own_state=case.stateful)
        return RuledPartitioner(made, deny(op=list(case.host), required=False)) if case.host else made

    make(CASES[0])  # wrong arguments are reported at once
    # Whether a backend keeps state is nothing that a support of operators says.
    return make, lambda case: refuses_all or (supports is not None and case.stateful)


def _choose_cases(cases: Sequence[Case | str] | None) -> tuple[Case, ...]:
    listed = CASES if cases is None else [cases] if isinstance(cases, (str, Case)) else cases
    if not isinstance(listed, Iterable):
        raise InputError(f"check_backend: got {cases=}, expected names such as 'ops/add', or cases, in a list.")
    chosen: dict[str, Case] = {}
    for wanted in listed:
        found = [wanted] if isinstance(wanted, Case) else [c for c in CASES if fnmatch.fnmatchcase(c.name, str(wanted))]
        if not found:
            features = ", ".join(dict.fromkeys(f"{case.name.partition('/')[0]}/*" for case in CASES))
            raise InputError(f"check_backend: no case is called {wanted!r}. Take one of CASES, or of {features}.")
        for case in found:
            if chosen.setdefault(case.name, case) != case:
                raise InputError(f"check_backend: two cases are called {case.name!r}. Give one of them another name.")
            if case.check not in CHECKS:
                text = f"{case.name!r} has the check {case.check!r}, expected one of {', '.join(CHECKS)}"
                raise InputError(f"check_backend: the case {text}.")
    return tuple(chosen.values())


def _try_case(suite: Suite, case: Case) -> CaseResult:
    from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass

    counts, made_of, by, subject = (0, 0), "", "", suite.subject

    def result(status: Any, check: str = "", text: object = "") -> CaseResult:
        return CaseResult(case.name, status, check, str(text), *counts, made_of)

    try:
        case, made_of = suite.choice.fill(case)
        sample = take_sample(case)
    except Unsupported as reason:
        return result("skipped", "", reason)
    except MemoryError:
        raise
    except Exception as error:  # whatever a case of the caller's own raises, or torch.export about it
        advice = "Its `build` has to return methods by name, which run in eager PyTorch and can be exported."
        return result("failed", "build", f"the case cannot be made: {exception_text(error)}. {advice}")
    try:
        lowered = lower_case(subject, case, sample)
        methods = lowered.report.methods
        counts = sum(method.delegated for method in methods), sum(len(method.nodes) for method in methods)
        mine = [one for method in methods for one in method.partitions if one.backend_id == subject.backend_id]
        if len(mine) < case.partitions:
            reasons = [f" ({node.operator}: {node.reason})" for method in methods for node in method.host]
            needed = f"{case.partitions}{''.join(reasons[:1])}"
            raise Unsupported(f"the backend got {len(mine)} partitions, the case needs {needed}")
        try:
            check_repeated(lowered, lower_case(subject, case, sample))
        except Unsupported as reason:
            text = f"the backend took the case once, and the second time it did not: {reason}"
            raise Broken("determinism", text) from reason
        # State that stays on the host has no initial value in a file unless its names are given.
        names = {name for method in case.build().values() for name in method.module} if case.stateful else set()
        passes = [InitializedMutableBufferPass(sorted(names))] if names else []
        try:
            content = lowered.emit(ExecutorchBackendConfig(passes=passes)).buffer
        except LoweringError as error:
            raise Broken("emit", str(error)) from error
        if not suite.note or case.check in AHEAD_OF_TIME:
            for libraries in dict.fromkeys([() if subject.delegate else subject.libraries, subject.libraries]):
                by = f"run by {', '.join(libraries)}: " if libraries else ""
                CHECKS[case.check](Trial(replace(subject, libraries=libraries), case, sample, lowered, content))
    except Unsupported as reason:
        return result("skipped", reason.check, reason)
    except Broken as broken:
        forget(case)  # what was wrong may have changed it
        demand = f"{case.demand} It is made of {made_of}." if made_of else case.demand
        return result("failed", broken.check, f"{by}{broken}\nIt demands: {demand}")
    except MemoryError:
        raise
    except Exception as error:  # of the plug-in, wherever the suite calls it
        forget(case)
        return result("failed", "plugin", locate(error))
    return result("lowered", "", f"lowered, not executed: {suite.note}") if suite.note else result("passed")
