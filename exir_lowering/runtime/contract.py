"""What a Python delegate is called with and has to return."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from exir_lowering._upstream.ambient import neutral
from exir_lowering._upstream.tensors import versions
from exir_lowering.errors import (
    BackendContractError,
    BackendFailure,
    BackendUnavailableError,
    exception_text,
    find_named_handle,
)
from exir_lowering.plugins.delegate import Delegate, DelegateContext, Recorder
from exir_lowering.pte.debug_info import Lines, no_lines
from exir_lowering.pte.format import Delegation
from exir_lowering.pte.value_kinds import BOOL, DOUBLE, INT, NULL, Tensor, ValueSpec
from exir_lowering.runtime.inputs import describe, show

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec

_NUMBERS: Mapping[int, Any] = {INT: int, BOOL: bool, DOUBLE: (int, float), NULL: (int, float)}

DAMAGED = "the file may be damaged. Make or copy it again."


@dataclass(slots=True, eq=False)
class Handle:
    """What is executed: a payload that a delegate compiled."""

    who: str  # the delegate, its class, and the method that it is part of, for messages
    delegate: Delegate
    content: Any  # what its `compile` returned
    plan: Delegation  # what the file says about it
    counts: tuple[int, ...]  # how many outputs it may return; one number is left when it has been executed
    lines: Lines = no_lines  # returns the lines of the model that a failure is about


def compile_payload(
    delegate: Delegate,
    where: str,  # the method and its file, to begin messages with
    method: str,  # its name
    plan: Delegation,  # what the file says about this part of the method
    payload: bytes,
    specs: Sequence[CompileSpec],
    find_data: Callable[[str], bytes | None],  # named data of the file by its key, None for an unknown one
    recorder: Recorder | None = None,  # of the delegate's events; None when nothing is ever profiled
    lines: Lines = no_lines,  # returns the lines of the model that a failure is about
) -> Handle:
    """Let a delegate compile a payload, and check what it returns."""
    who = f"{where}: delegate {plan.backend!r} ({type(delegate).__module__}.{type(delegate).__qualname__})"
    find: Callable[[str], bytes | None] | None = find_data

    def named_data(key: str) -> bytes | None:
        if find is None:
            raise RuntimeError(
                f"named_data({key!r}): named data can be read only until compile returns. Keep it in the handle."
            )
        if not isinstance(key, str) or "\0" in key:
            raise TypeError(f"named_data: got {key!r}, expected a str without null characters.")
        return find(key)

    try:
        with neutral():
            context = DelegateContext(method, named_data, plan.number, recorder)
            content = delegate.compile(payload, list(specs), context)
    except BackendUnavailableError as error:
        raise BackendUnavailableError(f"{where} cannot be set up: {error}") from error
    except MemoryError:
        raise
    except Exception as error:
        what = f"{who} failed to compile a payload of {len(payload)} bytes: {exception_text(error, '.')}"
        raise _failure(delegate, what, error, lines(plan.number, error)) from error
    finally:
        find = None
    if content is None:  # a forgotten return; in `execute` nobody would find it
        raise BackendContractError(
            f"{who}: compile returned None, expected the handle that execute and destroy get. Return what execute "
            "needs; if it needs nothing, the payload."
        )
    return Handle(who, delegate, content, plan, plan.counts, lines)


def destroy(handle: Handle) -> None:
    """Let a delegate release what it compiled. What it raises is printed, since nobody can catch it."""
    try:
        handle.delegate.destroy(handle.content)
    except MemoryError:
        raise
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)


def _failure(delegate: Delegate, what: str, error: Exception, lines: str) -> BackendFailure:
    """Make the error that says what a delegate raised, with its line, and those of the model."""
    from exir_lowering.graphs import sources

    at = sources.raised_at(error, type(delegate), ". Raised at ")
    rest = f"{at}. {lines}" if lines else at
    message = f"{what.removesuffix('.')}{rest}" if rest else what
    return BackendFailure(message, debug_handle=find_named_handle(error))


def execute(handle: Handle, inputs: list[Any], count: int) -> list[tuple[ValueSpec, Any]]:
    """Let a delegate execute, and check all that it returns; return each output after what the file says about it."""
    passed = tuple(inputs)  # the list is the delegate's; what numpy or C code writes is not counted
    before = versions(passed)
    try:
        with neutral():
            returned = handle.delegate.execute(handle.content, inputs)
    except MemoryError:
        raise
    except Exception as error:
        shown = ", ".join(map(show, inputs)) or "none"
        what = f"{handle.who} failed to execute: {exception_text(error, '.')}. Its inputs were: {shown}"
        raise _failure(handle.delegate, what, error, handle.lines(handle.plan.number, error)) from error
    after = versions(passed)
    if after != before:
        tensors = [(index, value) for index, value in enumerate(passed) if type(value) is torch.Tensor]
        index, value = next(one for one, old, new in zip(tensors, before, after, strict=True) if old != new)
        raise BackendContractError(
            f"{handle.who}: execute wrote into its input {index}, {show(value)}. Inputs are the runtime's memory, "
            "which other operators read too, so this run's results may be wrong. Compute into a new tensor, or clone "
            "the input first; in-place operators write into views of an input as well."
        )
    expected, who = handle.plan.outputs[len(handle.plan.outputs) - count :], f"{handle.who}: execute returned"
    if not isinstance(returned, Sequence) or isinstance(returned, (str, bytes)):
        raise BackendContractError(f"{who} {show(returned)}, expected a list or tuple of {count} outputs.")
    if len(returned) != count:
        listed = ", ".join(map(describe_output, expected)) or "none"
        raise BackendContractError(f"{who} {len(returned)} outputs, expected {count} ({listed}).")
    # All are checked before any is written, as one may be a view of an input.
    for index, (wanted, output) in enumerate(zip(expected, returned, strict=True)):
        problem = _problem(wanted, output)
        if problem is not None:
            raise BackendContractError(
                f"{handle.who}: output {index} of execute is {show(output)}, expected {describe_output(wanted)}. "
                f"{problem}"
            )
    return list(zip(expected, returned, strict=True))


def _problem(expected: ValueSpec, output: Any) -> str | None:
    """Say what is wrong with an output; None when it is as the file says."""
    tensor = expected.content
    if not isinstance(tensor, Tensor):
        return None if isinstance(output, _NUMBERS.get(expected.kind, ())) else "Return a number there."
    if not isinstance(output, torch.Tensor):
        return "Return a tensor there."
    if output.dtype != tensor.dtype:
        return f"Convert it with .to({tensor.dtype})."
    if output.device.type != "cpu" or output.layout != torch.strided:
        return "Return a dense tensor on the CPU."
    # The runtime compares numbers of elements: a dimension may be larger where others are smaller.
    fits = tensor.dynamic and output.dim() == len(tensor.sizes) and output.numel() <= math.prod(tensor.sizes)
    return None if fits else tensor.misfit(output.shape, "at most")


def describe_output(value: ValueSpec) -> str:
    """Say what an output has to be."""
    return describe(value) if isinstance(value.content, Tensor) else "a number"
