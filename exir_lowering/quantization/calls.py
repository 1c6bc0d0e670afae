"""Calls that the caller gives: read, checked against what the program takes, and run from its initial state on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from exir_lowering import graphs
from exir_lowering._upstream.ambient import neutral
from exir_lowering.errors import InputError
from exir_lowering.errors.interrupts import let_through
from exir_lowering.lowered_module import convention
from exir_lowering.quantization.exporting import inputs
from exir_lowering.runtime.inputs import show
from exir_lowering.verification.given import bind_call

Call = list[Any]
"""The values of a call, flat."""


def read_calls(program: ExportedProgram, given: object, what: str) -> list[Call]:
    """Return calls, flat; InputError if one is not what the program takes."""
    if isinstance(given, Mapping) and len(given) == 1:  # the calls of a method by its name, as `verify` takes them
        (given,) = given.values()
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)) or not given:
        article = "an empty" if isinstance(given, (list, tuple)) else "a"
        raise InputError(
            f"quantize: {what}: got {article} {type(given).__name__}, expected a list of "
            "calls, each a tuple of positional arguments or (args, kwargs), such as [(x,), (y,)]."
        )
    called, nodes = convention.of_program("forward", program), inputs(program)
    calls = []
    for number, call in enumerate(given):
        where = f"quantize: {what}: call {number}"
        leaves = bind_call(where, called, call)
        for node, label, value in zip(nodes, called.labels, leaves, strict=True):
            _check(f"{where}: {label}", node.meta.get("val"), value)
        calls.append(leaves)
    return calls


def _check(who: str, fake: Any, value: Any) -> None:
    if not isinstance(fake, torch.Tensor):
        return
    fits = isinstance(value, torch.Tensor) and value.dtype == fake.dtype and value.ndim == fake.ndim
    if not fits or any(isinstance(a, int) and a != b for a, b in zip(fake.shape, value.shape, strict=True)):
        shape = ", ".join(map(str, fake.shape))
        raise InputError(
            f"{who} is {show(value)}, expected a tensor of {str(fake.dtype).removeprefix('torch.')} of shape [{shape}]."
        )


def run_calls(
    calls: Sequence[Call], run: Callable[[int, Call], Any], module: GraphModule, state: Mapping[str, torch.Tensor]
) -> list[Any]:
    """Return what `run` gives for each call and its number, with the state of one call for the next one."""
    results = []
    with neutral():
        torch.manual_seed(0)  # in float and in int8 a call draws the same numbers
        try:
            for number, call in enumerate(calls):
                given = [value.clone() if isinstance(value, torch.Tensor) else value for value in call]
                try:
                    result = run(number, given)
                except Exception as error:
                    let_through(error)
                    raise InputError(
                        f"quantize: PyTorch refuses call {number}: {type(error).__name__}: {error}. Give values that "
                        "the model takes, in shapes that it was exported for."
                    ) from error
                results.append([value.clone() if isinstance(value, torch.Tensor) else value for value in result])
        finally:
            names = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
            for name in names & state.keys():
                graphs.attribute(module, name).copy_(state[name])
    return results
