"""Random programs through torch.compile, with random supports, compared with eager PyTorch for many shapes."""

from __future__ import annotations

import contextlib
import copy
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from compiled_functions import close
from random_programs import Method, random_method
from torch._dynamo.testing import CompileCounter
from torch.fx import Node
from torch.utils import _pytree as pytree

from exir_lowering.backends.reference import ReferenceBackend, ReferenceDelegate
from exir_lowering.dynamo import backend, reports
from exir_lowering.partitioners import SupportPartitioner

SHARES = (10, 30, 60, 90, 100)
"""How many of 100 operators are taken."""


class Second(ReferenceBackend):
    """The reference backend under another name."""

    backend_id = "second"


class SecondDelegate(ReferenceDelegate):
    """What executes its payloads."""

    delegate_id = "second"


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        backends: What runs each graph of Dynamo's.
        partitions: How many there are in the graphs of all.
        fallbacks: Why something was not compiled as asked.
        supported: Whether every operator is supported.
    """

    backends: tuple[str, ...]
    partitions: int
    fallbacks: tuple[str, ...]
    supported: bool


def compare(seed: int, *, most: int, nested: Sequence[str] = (), training: bool = True, calls: int = 20) -> Outcome:
    """Check that a program does the same in eager PyTorch and compiled, with dynamic sizes, in calls of many shapes.

    Args:
        seed: Which program, which operators are supported, and which shapes.
        most: How many steps it has at most.
        nested: The higher-order operators that it may have.
        training: Whether gradients are compared too, those of parameters and inputs.
        calls: How many calls there are.

    Raises:
        AssertionError: Something differs, or more is compiled than eager PyTorch would trace.
    """
    rng = random.Random(seed)
    method = random_method(seed, most, nested)
    eager, compiled, counted = (copy.deepcopy(method) for _ in range(3))
    share = rng.choice(SHARES)
    options = {
        "partitioners": SupportPartitioner({"reference": _support(seed, share), "second": _support(-seed, share)}),
        "backends": {"second": Second()},
        "delegates": {"second": SecondDelegate()},
    }
    inputs = [_inputs(rng, first=number == 0) for number in range(calls)]
    training = training and _is_differentiable(copy.deepcopy(method), inputs[0])
    torch._dynamo.reset()
    function = torch.compile(compiled, backend=backend, dynamic=True, options=options)
    for given in inputs:
        with _plain_branches():
            right = _call(eager, eager, given, training)
        got = _call(function, compiled, given, training)
        for name, values in right.items():
            close(got[name], values, name)
    found = reports()
    if len(found) > 1:  # a size may become a constant: as often as for a backend that compiles nothing
        counter = CompileCounter()
        torch._dynamo.reset()
        tracing = torch.compile(counted, backend=counter, dynamic=True)
        for given in inputs:
            _call(tracing, counted, given, training)
        if len(found) > counter.frame_count:
            raise AssertionError(f"{len(found)} graphs were compiled; {counter.frame_count} are traced without")
    counts = [len(one.partitions) for each in found for _, report in each.reports for one in report.methods]
    fallbacks = [str(fallback) for each in found for fallback in each.fallbacks]
    return Outcome(tuple(each.backend for each in found), sum(counts), tuple(fallbacks), share == 100)


@contextlib.contextmanager
def _plain_branches() -> Iterator[None]:
    """Take branches in Python; outside torch.compile, torch.cond compiles its branches in each call."""
    with mock.patch.object(torch, "cond", lambda condition, yes, no, operands: (yes if condition else no)(*operands)):
        yield


def _is_differentiable(method: Method, inputs: Sequence[Any]) -> bool:
    """Return whether PyTorch can differentiate a program; not if it writes into what a gradient, or a branch, needs."""
    try:
        _call(method, method, inputs, True)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return False
    return True


def _support(seed: int, share: int) -> Callable[[Node], bool]:
    """Return a support of some operators, wherever they are, or, for odd seeds, of some calls."""

    def takes(node: Node) -> bool:
        which = f"{seed} {node.target} {node.name if seed % 2 else ''}"
        return zlib.crc32(which.encode()) % 100 < share

    return takes


def _inputs(rng: random.Random, *, first: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    rows, number = (7, 3) if first else (rng.randint(2, 9), rng.randint(2, 6))  # equal sizes would be one symbol
    return torch.randn(rows, 4), torch.randn(rows, 4), number


def _call(function: Any, method: Method, inputs: Sequence[Any], training: bool) -> dict[str, list[Any]]:
    leaves = [value.clone().requires_grad_(training) for value in inputs[:2]]
    given = [*(leaf * 1 for leaf in leaves), inputs[2]]
    method.zero_grad()
    with torch.set_grad_enabled(training):
        outputs = pytree.tree_leaves(function(*given), is_leaf=lambda value: value is None)
    terms = [_weighted(value) for value in outputs if isinstance(value, torch.Tensor) and value.requires_grad]
    if terms:
        torch.stack(terms).sum().backward()
    for buffer in method.buffers():
        buffer.detach_()
    return {
        "outputs": outputs,
        "inputs": given,
        "buffers": [buffer.clone() for buffer in method.buffers()],
        "gradients": [tensor.grad for tensor in (*method.parameters(), *leaves)],
    }


def _weighted(value: torch.Tensor) -> torch.Tensor:
    return (value * torch.linspace(0.5, 1.5, value.numel()).view(value.shape)).sum()
