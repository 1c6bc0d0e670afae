"""The caller's passes over Edge programs, as ExecuTorch's `to_edge_transform_and_lower` runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig
from torch.export import ExportedProgram
from torch.fx.passes.infra.pass_manager import PassManager as FxPassManager

from exir_lowering._upstream.edge import checks_validity, transform
from exir_lowering._upstream.tensors import version
from exir_lowering.errors import InputError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.steps import edge_errors
from exir_lowering.steps.arguments import Passes, is_edge

_EXPECTED = (
    "A pass takes the graph module and returns a PassResult, a GraphModule, or None if it changed the one it was "
    "given; or it is an ExportedProgramPassBase."
)


def run_passes(
    name: str, program: ExportedProgram, passes: Passes, config: EdgeCompileConfig | None, asked: EdgeCompileConfig
) -> ExportedProgram:
    """Run passes, or a manager of passes, over a program in Edge dialect, and check the result.

    They may change the program; its tensors are the model's. `config`, with what partitioners keep whole, is what the
    result must be valid for; None if the program was already in Edge dialect: its own verifier decides. The caller's
    configuration is `asked`. Raise InputError if a pass raised, returned something invalid, wrote into a tensor of the
    model, or made an invalid program.
    """
    tensors = _tensors(program)
    who = f"Method {name!r}: transform_passes ({', '.join(_names(passes))})"
    try:
        result = transform(program, passes)
    except Exception as error:
        let_through(error)
        raise InputError(f"{who} failed: {_format_error(error)} {_EXPECTED}") from error
    if not isinstance(result, ExportedProgram) or not is_edge(result):
        made = f"a program in {result.dialect} dialect" if isinstance(result, ExportedProgram) else repr(result)
        raise InputError(f"{who} made {made}, expected a program in Edge dialect. {_EXPECTED}")
    written = [label for label, (tensor, before) in tensors.items() if version(tensor) != before]
    if written:
        raise InputError(
            f"{who} wrote into {written}, tensors of the model. Put new tensors into the program's state_dict or "
            "constants instead."
        )
    invalid = None
    if config is not None and checks_validity(asked):
        invalid = edge_errors.explain_invalid(name, result, config, asked)
    if invalid is not None:
        raise InputError(f"After transform_passes ({', '.join(_names(passes))}): {invalid}")
    return result


def _tensors(program: ExportedProgram) -> dict[str, tuple[torch.Tensor, int]]:
    """Return the tensors of a program by name, each with how often it has been written to."""
    named = {**program.state_dict, **program.constants}.items()
    return {name: (value, version(value)) for name, value in named if isinstance(value, torch.Tensor)}


def _names(passes: Passes) -> list[str]:
    """Return the names of passes, as ExecuTorch shows them."""
    listed: Sequence[Any] = passes.passes if isinstance(passes, FxPassManager) else passes
    return [getattr(one, "__name__", type(one).__name__) for one in listed]


def _format_error(error: BaseException) -> str:
    """Return an error with its causes: ExecuTorch's own names the pass, its cause says what was wrong."""
    told = [f"{type(error).__name__}: {error}"]
    cause = error.__cause__
    while cause is not None and len(told) < 4:
        told.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__
    return f"{'; '.join(line.rstrip('.') for line in told)}."
