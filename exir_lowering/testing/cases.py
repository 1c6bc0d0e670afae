"""The table of cases."""

from __future__ import annotations

from exir_lowering.testing.operator_cases import OPERATOR_CASES
from exir_lowering.testing.program_cases import PROGRAM_CASES
from exir_lowering.testing.samples import Case

CASES: tuple[Case, ...] = (*OPERATOR_CASES, *PROGRAM_CASES)
"""Every case: operators, element types, layouts and weights first, then whole programs."""
