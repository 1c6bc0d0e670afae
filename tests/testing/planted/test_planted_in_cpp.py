"""Mistakes in a run time in C++: the suite finds each, names the library, and lives on when that crashes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folders import ROOT
from mistakes_in_cpp import MISTAKES, Mistake, build

from exir_lowering.testing import ConformanceError, check_backend

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the library is built as on Linux")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def check() -> Any:
    """Check the example's backend, which is not installed here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "examples" / "tinyvec" / "src")
        from tinyvec.backend import TABLE, TinyvecBackend
        from tinyvec.delegate import TinyvecDelegate

        def check(library: Path, *delegate: Any, **options: Any) -> Any:
            partitioner = TABLE.partitioner(own_state=True)
            given = [TinyvecDelegate] if delegate else []
            return check_backend(TinyvecBackend, *given, partitioner=partitioner, libraries=[library], **options)

        yield check


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_found(mistake: Mistake, library: Path, check: Callable[..., Any]) -> None:
    with pytest.raises(ConformanceError) as caught:
        check(library.with_stem(str(mistake)), cases=[mistake.case])
    (result,) = caught.value.report.results
    assert (result.status, result.check) == ("failed", mistake.check), result
    assert mistake.says in result.text and f"{mistake}.so: " in result.text, result


def test_after_a_crash_the_other_cases_run(library: Path, check: Callable[..., Any]) -> None:
    with pytest.raises(ConformanceError) as caught:
        check(library.with_stem("crashes-on-damage"), cases=["errors/no-payload", "ops/mul", "life/two-programs"])
    assert [result.status for result in caught.value.report.results] == ["failed", "passed", "passed"]


def test_the_delegate_in_python_is_right_where_the_library_is_not(library: Path, check: Callable[..., Any]) -> None:
    """Both execute what the backend makes, in one process the delegate, and in others the library of the same id."""
    assert check(library, True, cases=["ops/mul", "ops/sub", "state/counter"]).conforms
    with pytest.raises(ConformanceError, match=r"run by .*one-element-short\.so: call 1 of method"):
        check(library.with_stem("one-element-short"), True, cases=["ops/mul"])


def test_without_a_mistake_it_conforms(library: Path, check: Callable[..., Any]) -> None:
    report = check(library)
    print(report)
    assert not report.uncovered and {"state", "errors", "life"} <= {result.feature for result in report.results}
    assert [result.name for result in report.results if result.check == "unwatched"] == [
        "life/handles",
        "errors/wrong-number-of-inputs",
    ]
