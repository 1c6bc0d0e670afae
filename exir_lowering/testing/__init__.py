"""A suite that checks whether a backend, and the delegate that executes its payloads, keep their contracts.

from exir_lowering.testing import check_backend, conformance_tests

print(check_backend(MyBackend, MyDelegate))                  # raises ConformanceError when a case fails; the report
                                                             # counts the cases, and says why some were skipped

test_conformance = conformance_tests(MyBackend, MyDelegate)  # in a test module: a pytest test for each case
"""

from __future__ import annotations

from exir_lowering.testing.samples import Case
from exir_lowering.testing.suite import CASES, check_backend, conformance_tests
from exir_lowering.testing.suite_report import CaseResult, ConformanceError, ConformanceReport

__all__ = [
    "CASES", "Case", "CaseResult", "ConformanceError", "ConformanceReport", "check_backend", "conformance_tests",
]  # fmt: skip
