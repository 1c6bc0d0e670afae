"""What backend authors call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from exir_lowering.plugins.backend import CompileSpec
from exir_lowering.plugins.delegate import Delegate
from exir_lowering.testing.report import ConformanceError, ConformanceReport
from exir_lowering.testing.samples import Case
from exir_lowering.testing.suite import AVAILABLE, Suite, make_suite

_SOMETHING = "suite/something-passes"


def check_backend(
    backend: Any,
    delegate: Delegate | type[Delegate] | None = None,
    *,
    partitioner: Any = None,
    supports: Any = None,
    compile_specs: Sequence[CompileSpec] = (),
    cases: Sequence[Case | str] | None = None,
    atol: float | None = None,
    rtol: float | None = None,
) -> ConformanceReport:
    """Try a backend and its delegate in every case, and raise when one fails.

        from exir_lowering.testing import check_backend

        report = check_backend(MyBackend, MyDelegate)
        print(report)  # how many cases of each feature passed, and why the others were skipped

    Each case is a small program. It is lowered twice, which has to give equal bytes and change nothing, then executed,
    and the outputs of several calls are compared with those of eager PyTorch.

    A backend need not take every operator. Those that its partitioner leaves stay on the host, and a case of which it
    gets nothing is skipped. Without a partitioner the backend is given everything, and may refuse in `preprocess` with
    a NotImplementedError or an InputError that names what it does not take; the case is skipped then.

    Args:
        backend: A `Backend` (object or class), an ExecuTorch `BackendDetails` class, or the id of an installed backend.
        delegate: The delegate that executes its payloads. None for a backend that ExecuTorch's runtime has itself, or
            whose delegate is installed; when there is none, payloads are made and not executed, and cases are
            "lowered" rather than "passed". One that is given has to be available: "suite/available" fails otherwise.
        partitioner: An ExecuTorch `Partitioner`, or the name of an installed one. By default the one that is installed
            under the backend's id.
        supports: What the backend takes, instead of a partitioner: as for `SupportPartitioner`.
        compile_specs: What the backend is told where there is no partitioner to tell it.
        cases: Names of cases, patterns such as "ops/*", or cases of your own; by default all `CASES`.
        atol: The absolute tolerance of floating-point numbers; by default it depends on their type.
        rtol: The relative one.

    Returns:
        The report.

    Raises:
        ConformanceError: A case failed, or all were skipped. The message names each one that failed, with what was got,
            what was expected and what to do; `report` has everything.
        InputError: An argument is not what it should be.
        UnknownPluginError: No backend or partitioner of that name is installed.
        PluginLoadError: The backend or the delegate cannot be made.
    """
    report = run_conformance(
        backend,
        delegate,
        partitioner=partitioner,
        supports=supports,
        compile_specs=compile_specs,
        cases=cases,
        atol=atol,
        rtol=rtol,
    )
    if not report.conforms:
        raise ConformanceError(report)
    return report


def run_conformance(
    backend: Any,
    delegate: Delegate | type[Delegate] | None = None,
    *,
    partitioner: Any = None,
    supports: Any = None,
    compile_specs: Sequence[CompileSpec] = (),
    cases: Sequence[Case | str] | None = None,
    atol: float | None = None,
    rtol: float | None = None,
) -> ConformanceReport:
    """Try a backend and its delegate in every case, and report what failed without raising it.

    Args:
        backend: This and the others as for `check_backend`.
        delegate: The delegate.
        partitioner: The partitioner.
        supports: What the backend takes.
        compile_specs: What the backend is told.
        cases: Which cases.
        atol: The absolute tolerance.
        rtol: The relative tolerance.

    Returns:
        The report; `report.conforms` tells whether all is well.

    Raises:
        InputError, UnknownPluginError, PluginLoadError: As for `check_backend`.
    """
    suite = make_suite(
        backend,
        delegate,
        partitioner=partitioner,
        supports=supports,
        compile_specs=compile_specs,
        cases=cases,
        atol=atol,
        rtol=rtol,
    )
    return suite.report()


def conformance_tests(
    backend: Any,
    delegate: Delegate | type[Delegate] | None = None,
    *,
    partitioner: Any = None,
    supports: Any = None,
    compile_specs: Sequence[CompileSpec] = (),
    cases: Sequence[Case | str] | None = None,
    atol: float | None = None,
    rtol: float | None = None,
) -> Callable[[str], None]:
    """Make a pytest test of each case.

        # test_my_backend.py
        from exir_lowering.testing import conformance_tests
        from my_package import MyBackend, MyDelegate

        test_conformance = conformance_tests(MyBackend, MyDelegate)

    `pytest test_my_backend.py -k state/counter` runs one of them. A case that the backend does not support is skipped
    with the reason, and so is one that is lowered where nothing executes it. The test "suite/something-passes" fails
    when the backend supports none of them, "suite/available" when the delegate that is given is not available.

    Args:
        backend: This and the others as for `check_backend`.
        delegate: The delegate.
        partitioner: The partitioner.
        supports: What the backend takes.
        compile_specs: What the backend is told.
        cases: Which cases.
        atol: The absolute tolerance.
        rtol: The relative tolerance.

    Returns:
        A parametrised test function, to be given a name that begins with `test_`.

    Raises:
        InputError, UnknownPluginError, PluginLoadError: As for `check_backend`.
    """
    import pytest  # here, as only tests have it

    suite = make_suite(
        backend,
        delegate,
        partitioner=partitioner,
        supports=supports,
        compile_specs=compile_specs,
        cases=cases,
        atol=atol,
        rtol=rtol,
    )
    by_name = {case.name: case for case in suite.cases}

    @pytest.mark.parametrize("conformance_case", [*by_name, _SOMETHING, *([AVAILABLE] if delegate is not None else [])])
    def test_conformance(conformance_case: str) -> None:
        if conformance_case == _SOMETHING:
            _require_one(suite)
            return
        if conformance_case == AVAILABLE:
            if suite.unavailable is not None:
                pytest.fail(str(suite.unavailable), pytrace=False)
            return
        result = suite.run(by_name[conformance_case])
        if result.status in ("skipped", "lowered"):
            pytest.skip(result.text)
        if result.status == "failed":
            pytest.fail(str(result), pytrace=False)

    return test_conformance


def _require_one(suite: Suite) -> None:
    if not any(suite.run(case).status in ("passed", "lowered") for case in suite.cases):
        raise ConformanceError(suite.report())
