"""Core ML's converter checks a program when its passes are done, instead of after each of about a hundred.

A check changes nothing; it raises where a pass has left a program that is not one. That is found a few passes later.
"""

from __future__ import annotations

import sys
from typing import Any

from exir_lowering.fast import current

_MIL = "coremltools.converters.mil.mil"


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what checks a program at the ends of a pipeline; nothing where Core ML's converter is not in use."""
    pipelines, programs = sys.modules.get(f"{_MIL}.passes.pass_pipeline"), sys.modules.get(f"{_MIL}.program")
    if pipelines is None or programs is None:
        return []
    manager, program = pipelines.PassPipelineManager, programs.Program
    apply, check = manager.apply_pipeline, program.validate

    def apply_pipeline(prog: Any, pass_pipeline: Any) -> Any:
        if (work := current()) is None:
            return apply(prog, pass_pipeline)
        check(prog)
        before, work.piped = work.piped, prog
        try:
            result = apply(prog, pass_pipeline)
        finally:
            work.piped = before
        check(prog)
        return result

    def validate(self: Any, check_essential_scope: bool | None = False) -> None:
        work = current()
        if work is None or work.piped is not self or check_essential_scope:  # which some passes ask for
            check(self, check_essential_scope)

    return [(manager, "apply_pipeline", staticmethod(apply_pipeline)), (program, "validate", validate)]
