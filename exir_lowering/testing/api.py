"""What backend authors call."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from exir_lowering.testing.suite import AVAILABLE, SOMETHING_PASSES, make_suite
from exir_lowering.testing.suite_report import ConformanceError, ConformanceReport

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def _with_arguments_of(other: Callable[_Given, Any]) -> Callable[[Callable[..., _Made]], Callable[_Given, _Made]]:
    """Give a function that hands all that it is given to another one the signature of that."""

    def decorate(function: Callable[..., _Made]) -> Callable[_Given, _Made]:
        returned = inspect.signature(function).return_annotation
        signature = inspect.signature(other).replace(return_annotation=returned)
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate


@_with_arguments_of(make_suite)
def check_backend(*given: Any, **named: Any) -> ConformanceReport:  # noqa: D417  # the signature has them
    """Try a backend and its delegate in every case, and raise when one fails.

    A case is a small program. It is lowered twice, which has to give equal bytes and change nothing, then executed, and
    the outputs of several calls are compared with eager PyTorch's. A backend need not take every operator: what its
    partitioner leaves stays on the host, and a case is skipped if the backend gets nothing of it. Without a
    partitioner, it gets everything, and may refuse in `preprocess` with a NotImplementedError or an InputError that
    names what it does not take; then the case is skipped.

    Args:
        backend: A `Backend` (object or class), an ExecuTorch `BackendDetails` class, or the id of an installed backend.
        delegate: The delegate that executes its payloads; it has to be available, or "suite/available" fails. None if
            ExecuTorch's runtime has the delegate, or it is installed; if there is none, payloads are made but not
            executed, and cases are "lowered" rather than "passed".
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
        ConformanceError: A case failed, or all were skipped. The message names each failure; `report` has everything.
        InputError: An argument is invalid.
        UnknownPluginError: No backend or partitioner of that name is installed.
        PluginLoadError: The backend or the delegate cannot be made.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about itself
        report = make_suite(*given, **named).report()
    if not report.conforms:
        raise ConformanceError(report)
    return report


@_with_arguments_of(make_suite)
def run_conformance(*given: Any, **named: Any) -> ConformanceReport:
    """Try a backend and its delegate in every case, and report what failed without raising it.

    The arguments are those of `check_backend`.

    Returns:
        The report; `report.conforms` is True if the backend conforms.

    Raises:
        InputError, UnknownPluginError, PluginLoadError: As for `check_backend`.
    """
    return make_suite(*given, **named).report()


@_with_arguments_of(make_suite)
def conformance_tests(*given: Any, **named: Any) -> Callable[[str], None]:
    """Make a pytest test of each case.

        # test_my_backend.py
        from exir_lowering.testing import conformance_tests
        from my_package import MyBackend, MyDelegate

        test_conformance = conformance_tests(MyBackend, MyDelegate)

    `pytest test_my_backend.py -k state/counter` runs one of them. A case that the backend does not support is skipped
    with the reason, and so is one that is lowered but that nothing here executes. The test "suite/something-passes"
    fails when the backend supports none of them, "suite/available" when the delegate that is given is not available.

    The arguments are those of `check_backend`.

    Returns:
        A parametrised test function, to be given a name that begins with `test_`.

    Raises:
        InputError, UnknownPluginError, PluginLoadError: As for `check_backend`.
    """
    import pytest  # here, as only tests have it

    suite = make_suite(*given, **named)
    names = [case.name for case in suite.cases]
    names += [SOMETHING_PASSES, AVAILABLE] if suite.with_delegate else [SOMETHING_PASSES]

    @pytest.mark.parametrize("conformance_case", names)
    def test_conformance(conformance_case: str) -> None:
        if conformance_case == SOMETHING_PASSES:
            if not any(suite.run(case).status in ("passed", "lowered") for case in suite.cases):
                raise ConformanceError(suite.report())
            return
        result = suite.unavailable
        if conformance_case != AVAILABLE:
            result = suite.run(next(case for case in suite.cases if case.name == conformance_case))
        if result is not None and result.status in ("skipped", "lowered"):
            pytest.skip(result.text)
        if result is not None and result.status == "failed":
            pytest.fail(str(result), pytrace=False)

    return test_conformance
