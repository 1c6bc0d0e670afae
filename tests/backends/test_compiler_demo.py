"""The demo compiler: what it makes, what it refuses and where in the model, and its delegate against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from delegate_support import runner
from lowering_support import TagPartitioner, delegates, edge_program
from torch.export import export

import exir_lowering
from exir_lowering import BackendFailure, InputError
from exir_lowering.backends.compiler_demo import CompilerDemoDelegate


class Demo(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([[0.1, -2.0], [float("inf"), 3.5]]))
        self.register_buffer("ints", torch.tensor([2**53 + 1, -3]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        z = torch.sub(x, y, alpha=0.5) * self.weight + 2
        return z, (x + z * 1.5) - 0.25, self.ints * 3


def lowered(module: torch.nn.Module, *inputs: Any, **options: Any) -> exir_lowering.LoweredMethods:
    return exir_lowering.lower(export(module.eval(), inputs, **options), TagPartitioner(backend="compiler_demo"))


def payload(found: exir_lowering.LoweredMethods) -> bytes:
    (delegate,) = delegates(found["forward"])
    return bytes(delegate.processed_bytes)


def test_the_delegate_equals_eager() -> None:
    inputs = (torch.randn(2, 2), torch.randn(2, 2))
    found = lowered(Demo(), *inputs)
    run = runner(found, compiler_demo=CompilerDemoDelegate())
    for _ in range(2):
        for got, expected in zip(run(*inputs), Demo()(*inputs), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_the_text() -> None:
    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("part", torch.tensor([0.5, 0.25]))

        def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            return torch.add(x, h, alpha=2) - x * self.part

    found = lowered(Small(), torch.ones(2), torch.ones(2))
    (delegate,) = delegates(found["forward"])
    text = payload(found).decode()
    handles = [node.meta["debug_handle"] for node in delegate.original_module.graph.nodes if node.op == "call_function"]
    assert len(set(handles)) == 3 and None not in handles
    assert text == (
        "compiler_demo 1\n"
        "inputs 2\n"
        "%2 = constant float32 [2] [0.5, 0.25]\n"
        f"%3 = aten.add %0 %1 alpha=2 # debug_handle {handles[0]}\n"
        f"%4 = aten.mul %0 %2 alpha=1 # debug_handle {handles[1]}\n"
        f"%5 = aten.sub %3 %4 alpha=1 # debug_handle {handles[2]}\n"
        "return %5\n"
    )
    assert delegate.meta["debug_handle_map"] == dict(
        zip(["aten.add #0", "aten.mul #1", "aten.sub #2"], [(handle,) for handle in handles], strict=True)
    )


def test_an_unsupported_operator_is_told_with_its_source_line() -> None:
    class Divides(torch.nn.Module):
        def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            return x + x / h  # the line

    with pytest.raises(BackendFailure) as caught:
        lowered(Divides(), torch.ones(2), torch.ones(2))
    line = Divides.forward.__code__.co_firstlineno + 1
    said = (
        f'aten.div is not supported in this compiler. Source code: File "{__file__}", line {line}, in forward: '
        "return x + x / h  # the line"
    )
    assert said in str(caught.value) and isinstance(caught.value.__cause__, InputError)


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(x)
        return x + self.count


def test_state_is_refused() -> None:
    program = edge_program(Counter(), (torch.ones(2),))
    with pytest.raises(BackendFailure, match="Writing to count is not supported in this compiler"):
        exir_lowering.lower(program, TagPartitioner(backend="compiler_demo"))
