"""Rules: what computes an operator by other ones, each operator by its name."""

from exir_lowering.steps.legalizing import (  # noqa: F401  each adds its rules
    arithmetic,
    indexing,
    linear,
    order,
    special,
    windows,
)
from exir_lowering.steps.legalizing.registry import RULES as RULES
