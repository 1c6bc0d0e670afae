"""What the caller has set for torch does not matter to lowering: results are the same, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from exir_lowering import load, lower, plan, to_backend


class _State(torch.nn.Module):
    """Has parameters, writes a buffer, and leaves default dtypes and devices to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.seen.add_(y)
        with torch.no_grad():
            z = y.relu()
        return z * 2 + torch.arange(4).sum() / 2 + torch.zeros(4)


@contextmanager
def _dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype": lambda: _dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
}

GIVEN = torch.linspace(0, 1, 8).reshape(2, 4)


def _module() -> _State:
    torch.manual_seed(0)
    return _State()


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return torch.export.export(_module(), (GIVEN,))


@pytest.fixture(scope="module")
def files(program: ExportedProgram) -> dict[Any, bytes]:
    return {name: lower(program, name).emit().buffer for name in (None, "xnnpack", "reference")}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_the_caller_changes_no_byte(
    program: ExportedProgram, files: dict[Any, bytes], setting: str
) -> None:
    with SETTINGS[setting]():
        for name, file in files.items():
            lowered = lower(program, name)
            assert lowered.emit().buffer == file
        assert plan(program, "reference").methods
        # Which says less of how it was made: the rewrites, and the names of a program that was not converted here.
        again = to_backend(lowered.edge_programs, "reference").emit(provenance=False)
        assert again.buffer == lowered.emit(provenance=False).buffer


def test_a_program_keeps_the_default_dtype_that_it_was_exported_with() -> None:
    """An operator that was given no dtype means the default one at export."""
    with _dtype(torch.float64):
        program = torch.export.export(_module(), (GIVEN.double(),))
        expected = _module()(GIVEN.double()).detach()
    assert expected.dtype is torch.float64
    file = lower(program).emit().buffer
    with _dtype(torch.float64):
        assert lower(program).emit().buffer == file
    torch.testing.assert_close(load(file).run("forward", GIVEN.double())[-1], expected)
    assert torch.get_default_dtype() is torch.float32
