"""A delegate's inputs are the runtime's memory: one that writes into them is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowering_support import TagPartitioner, by_operator
from scripted import ScriptBackend, ScriptDelegate

import exir_lowering
from exir_lowering import BackendContractError, BackendFailure, Delegate


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * (x + y)


X, Y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])


@pytest.fixture(scope="module")
def content() -> bytes:
    program = torch.export.export(Model(), (X, Y))
    partitioner = TagPartitioner(by_operator("aten.add.Tensor"), backend="script")
    return exir_lowering.lower(program, partitioner, backends={"script": ScriptBackend}).emit().buffer


def doing(act: Callable[[list[Any]], Any]) -> type[Delegate]:
    class Doing(ScriptDelegate):
        def execute(self, handle: Any, inputs: Any) -> Any:
            outputs = [output.clone() for output in super().execute(handle, inputs)]
            return act(inputs) or outputs

    return Doing


WRITES: dict[str, tuple[Callable[[list[Any]], Any], int]] = {
    "in place": (lambda inputs: inputs[1].add_(1) is None, 1),
    "to an index": (lambda inputs: inputs[0].__setitem__(0, 7.0), 0),
    "through a view": (lambda inputs: inputs[0].view(2, 1).t()[0].mul_(2) is None, 0),
    "as an output": (lambda inputs: torch.add(inputs[0], 1, out=inputs[0]) is None, 0),
    "and returns it": (lambda inputs: [inputs[0].add_(inputs[1])], 0),
    "and takes it away": (lambda inputs: inputs.pop().zero_() is None, 1),
}


@pytest.mark.parametrize("way", WRITES)
def test_a_delegate_that_writes_into_an_input(content: bytes, way: str) -> None:
    act, index = WRITES[way]
    delegate = doing(act)
    program = exir_lowering.load(content, delegates=[delegate])
    with pytest.raises(BackendContractError) as caught:
        program.run("forward", X, Y)
    message = str(caught.value)
    assert f"delegate 'script' ({delegate.__module__}.{delegate.__qualname__})" in message
    assert f"execute wrote into its input {index}, " in message and "Inputs are the runtime's memory" in message
    assert "Compute into a new tensor, or clone the input first" in message


def test_a_delegate_that_only_reads(content: bytes) -> None:
    def reads(inputs: list[Any]) -> None:
        own = inputs[0].clone().add_(1)
        own.copy_(inputs[1])
        inputs[0] = own  # the list is the delegate's own

    program = exir_lowering.load(content, delegates=[doing(reads)])
    with torch.inference_mode():
        assert torch.equal(program.run("forward", X, Y)[0], torch.sin(X) * (X + Y))
    torch.testing.assert_close(program.run("forward", X, Y)[0], torch.sin(X) * (X + Y))


def test_what_it_raises_comes_first(content: bytes) -> None:
    def fails(inputs: list[Any]) -> None:
        inputs[0].zero_()
        raise ValueError("broken")

    program = exir_lowering.load(content, delegates=[doing(fails)])
    with pytest.raises(BackendFailure, match="ValueError: broken"):
        program.run("forward", X, Y)
