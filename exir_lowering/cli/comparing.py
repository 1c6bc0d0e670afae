"""How far the outputs of a method are from those of the exported program in eager PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exir_lowering.cli.output import make_table
from exir_lowering.errors import InputError
from exir_lowering.errors.interrupts import let_through

if TYPE_CHECKING:
    from rich.table import Table
    from torch.export import ExportedProgram


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a value is from another one."""

    largest: float  # the largest error of an element; infinite where only one is NaN, or infinite
    magnitude: float  # the largest magnitude of the other one
    sqnr: float  # the ratio of signal to noise, in dB; infinite without noise
    problem: str = ""  # why they cannot be compared


def compare(path: Path, trust: bool, inputs: Sequence[Any], outputs: Sequence[Any]) -> Table:
    """Return a table of the errors of outputs; InputError if the program cannot be read or run with these inputs."""
    from rich.text import Text

    from exir_lowering.cli.program_files import read_programs

    program = read_programs({"forward": path}, trust)["forward"]
    expected = run_eager(program, inputs, f"--compare {str(path)!r}")
    if len(expected) != len(outputs):
        raise InputError(
            f"--compare {str(path)!r}: it returns {len(expected)} values and the method {len(outputs)}. Give the "
            "program that the method was made from."
        )
    table = make_table(f"Compared with {path.name} in PyTorch")
    for column in ("#", "largest error", "largest value", "SQNR, dB"):
        table.add_column(column, justify="right")
    for index, (got, wanted) in enumerate(zip(outputs, expected, strict=True)):
        found = measure(got, wanted)
        figures = found.problem or f"{found.largest:.3g}", f"{found.magnitude:.3g}", f"{found.sqnr:.1f}"
        table.add_row(str(index), *map(Text, figures))
    return table


def run_eager(program: ExportedProgram, inputs: Sequence[Any], who: str) -> list[Any]:
    """Run a program in PyTorch, and return its outputs as the runtime has them: inputs that it writes first."""
    import torch

    from exir_lowering._upstream.tensors import version
    from exir_lowering.lowered_module import convention

    called = convention.of_program("forward", program)
    leaves = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    if len(leaves) != len(called.inputs):
        raise InputError(f"{who}: it takes {len(called.inputs)} inputs, got {len(leaves)}.")
    args, kwargs = called.arguments(leaves)
    tensors = [value for value in leaves if isinstance(value, torch.Tensor)]
    before = list(map(version, tensors))
    try:
        with torch.no_grad():
            result = program.module()(*args, **kwargs)
    except Exception as error:
        let_through(error)
        raise InputError(f"{who}: PyTorch cannot run it with these inputs: {type(error).__name__}: {error}") from error
    # A program that is not lowered yet writes in place, and does not say so.
    written = [value for value, old in zip(tensors, before, strict=True) if version(value) != old]
    return [*written, *called.out_spec.flatten_up_to(result)]


def measure(got: Any, expected: Any) -> Difference:
    """Measure how far a value is from the expected one."""
    import torch

    if not (isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor)):
        same = got == expected or isinstance(expected, (str, type(None)))
        return Difference(0.0 if same else math.inf, 0.0, math.inf, "" if same else f"{got!r} is not {expected!r}")
    if got.shape != expected.shape or got.dtype != expected.dtype:
        kinds = (f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for one in (got, expected))
        return Difference(math.inf, 0.0, -math.inf, " is not ".join(kinds))
    if not got.numel():
        return Difference(0.0, 0.0, math.inf)
    wide = torch.complex128 if got.is_complex() else torch.float64
    left, right = got.detach().to(wide), expected.detach().to(wide)
    # Equal infinities, and NaN in both, are no difference.
    same = (left == right) | (left.isnan() & right.isnan())
    noise = torch.where(same, torch.zeros_like(left), left - right).abs()
    noise = torch.where(noise.isnan(), torch.full_like(noise, math.inf), noise)
    signal = torch.where(right.isfinite(), right, torch.zeros_like(right)).abs()
    power, lost = signal.square().sum().item(), noise.square().sum().item()
    sqnr = math.inf if not lost else 10 * math.log10(power / lost) if power and math.isfinite(lost) else -math.inf
    return Difference(noise.max().item(), signal.max().item(), sqnr)
