"""Inputs that are bundled with a module, and their expected outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from exir_lowering.errors import BackendContractError, InputError
from exir_lowering.lowered_module.convention import Convention
from exir_lowering.lowered_module.record import Cases
from exir_lowering.lowered_module.runners import Runner
from exir_lowering.pte.format import MethodSpec
from exir_lowering.runtime.inputs import show

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""How far results may differ from those of eager PyTorch, absolutely and relatively; integers may not differ."""

_SMALL = 0.25  # floating-point numbers of 8 bits and fewer


def bind(conventions: Mapping[str, Convention], given: Any) -> dict[str, Cases]:
    """Return the values in the arguments of calls, listed by method or for "forward"; InputError if one is invalid."""
    methods = given if isinstance(given, Mapping) else {"forward": given}
    bound: dict[str, Cases] = {}
    for name, calls in methods.items():
        if name not in conventions:
            known = ", ".join(map(repr, conventions))
            raise InputError(f"bundled_inputs: there is no method {name!r}; the module has {known}.")
        if not isinstance(calls, (list, tuple)) or not all(isinstance(call, (tuple, dict)) for call in calls):
            raise InputError(
                f"bundled_inputs[{name!r}]: got {type(calls).__name__}, expected a list of calls, each a tuple of "
                "positional arguments or a dict of arguments by name."
            )
        one = conventions[name]
        leaves = (one.bind((), call) if isinstance(call, dict) else one.bind(call, {}) for call in calls)
        bound[name] = tuple(map(_copy, leaves))
    return bound


def _copy(leaves: Sequence[Any]) -> list[Any]:
    """Return copies, as the caller may write into its tensors."""
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def list_calls(convention: Convention, cases: Cases) -> tuple[Any, ...]:
    """Return bundled inputs as callers give them: tuples, or dicts when a parameter is keyword-only."""
    result: list[Any] = []
    for leaves in cases:
        args, kwargs = convention.arguments(_copy(leaves))
        result.append({**dict(zip(convention.positional, args, strict=True)), **kwargs} if kwargs else args)
    return tuple(result)


def run(runner: Runner, conventions: Mapping[str, Convention], bundled: Mapping[str, Cases]) -> dict[str, Cases]:
    """Return the outputs for bundled inputs: the calls of a method run in turn, from its initial state."""
    found: dict[str, Cases] = {}
    for name, cases in bundled.items():
        fresh = runner.fresh() if cases else runner  # another method may have written the state that it shares
        found[name] = tuple(fresh.run(conventions[name], leaves) for leaves in cases)
    return found


def compare(
    conventions: Mapping[str, Convention],
    expected: Mapping[str, Cases],
    got: Mapping[str, Cases],
    *,
    atol: float | None,
    rtol: float | None,
) -> dict[str, list[float]]:
    """Return the largest difference of each call; BackendContractError beyond the tolerance, or for another type."""
    found: dict[str, list[float]] = {name: [] for name in expected}
    for name, cases in expected.items():
        one = conventions[name]
        for number, call in enumerate(zip(cases, got[name], strict=True)):
            found[name].append(0.0)
            for index, pair in enumerate(zip(*call, strict=True)):
                where = f"Bundled input {number} of {name!r}: {one.output_label(index)}"
                difference = _difference(where, *pair, atol, rtol, fixed=one.is_fixed(index))
                found[name][-1] = max(found[name][-1], difference)
    return found


def _difference(where: str, expected: Any, got: Any, atol: float | None, rtol: float | None, *, fixed: bool) -> float:
    if not isinstance(expected, torch.Tensor):
        if not fixed and (isinstance(got, torch.Tensor) or expected != got):
            raise BackendContractError(f"{where} is {show(got)}, expected {show(expected)}.")
        return 0.0
    if not isinstance(got, torch.Tensor) or (got.dtype, got.shape) != (expected.dtype, expected.shape):
        raise BackendContractError(f"{where} is {show(got)}, expected {show(expected)}.")
    default = tolerance(expected.dtype)
    atol, rtol = (default if given is None else given for given in (atol, rtol))
    wide = torch.complex128 if got.is_complex() else torch.float64
    apart = (got.to(wide) - expected.to(wide)).abs()
    difference = float(apart.nan_to_num(posinf=float("inf")).max()) if apart.numel() else 0.0
    if not torch.allclose(got.to(wide), expected.to(wide), atol=atol, rtol=rtol, equal_nan=True):
        raise BackendContractError(
            f"{where} differs by {difference:g} from the expected value, more than atol={atol:g} and rtol={rtol:g} "
            "allow."
        )
    return difference


def bundle(pte: Path, suites: Mapping[str, Sequence[tuple[list[Any], list[Any]]]]) -> bytes:
    """Return ExecuTorch's own bundled program: the program, with its inputs as it takes them and flat outputs."""
    from executorch.devtools import BundledProgram
    from executorch.devtools.bundled_program.config import MethodTestCase, MethodTestSuite
    from executorch.devtools.bundled_program.serialize import serialize_from_bundled_program_to_flatbuffer

    tests = [
        # Inputs have memory of their own: ExecuTorch writes all of a tensor's storage.
        MethodTestSuite(name, [MethodTestCase(_copy(inputs), outputs) for inputs, outputs in cases])
        for name, cases in suites.items()
    ]
    return bytes(serialize_from_bundled_program_to_flatbuffer(BundledProgram(None, tests, str(pte))))


def tolerance(dtype: torch.dtype) -> float:
    """Return how far results of a type may differ from those of eager PyTorch: 0.0 for integers and bool."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0.0
    return TOLERANCES.get(dtype, _SMALL)


def can_be_written(method: MethodSpec, outputs: Iterable[Sequence[Any]]) -> bool:
    """Return whether ExecuTorch's format can hold a method's bundled inputs: no None goes in, only tensors come out."""
    takes = all(value.content is not None for value in method.inputs)
    return takes and all(isinstance(output, torch.Tensor) for case in outputs for output in case)
