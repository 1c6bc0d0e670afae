"""Sizes that inputs have in common, and their least ones: an error with names, wherever a file of ours runs."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.export import Dim, ExportedProgram, export

from exir_lowering import InputError, Limits, LoweredMethods, load, lower
from exir_lowering.pte.flatbuffer import CorruptError
from exir_lowering.pte.provenance import KEY, Dimension, MethodProvenance, Provenance, read

Run = Callable[..., Any]


class Joined(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.cat([a + b, a * b]) - c


def exported() -> ExportedProgram:
    batch = Dim("batch", min=2, max=8)
    shapes = {"a": {0: batch}, "b": {0: batch}, "c": {0: 2 * batch}}
    return export(Joined(), (torch.ones(4, 3), torch.ones(4, 3), torch.ones(8, 3)), dynamic_shapes=shapes)


@pytest.fixture(scope="module")
def lowered() -> LoweredMethods:
    return lower(exported())


@pytest.fixture(scope="module", params=["load", "limits", "module"])
def run(request: pytest.FixtureRequest, lowered: LoweredMethods) -> Run:
    if request.param == "module":
        return lowered.module()
    program = load(lowered.emit().buffer, limits=Limits() if request.param == "limits" else None)
    return lambda *inputs: program.run("forward", *inputs)[0]


def inputs(*sizes: int) -> list[torch.Tensor]:
    return [torch.full((size, 3), float(number)) for number, size in enumerate(sizes, start=1)]


@pytest.mark.parametrize("sizes", [(4, 7, 8), (4, 1, 8), (1, 4, 8), (4, 4, 7), (4, 4, 2), (1, 1, 2)], ids=str)
def test_sizes_that_differ_or_are_too_small_are_named(run: Run, sizes: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="one size 'batch' of at least 2") as raised:
        run(*inputs(*sizes))
    for name, size, term in zip("abc", sizes, ("batch", "batch", "2 * batch"), strict=True):
        assert re.search(
            f"dimension 0 of (argument )?'?{name}'? is {size}, expected {re.escape(term)}", str(raised.value)
        )


def test_sizes_that_fit_run(run: Run) -> None:
    for size in (2, 5, 8):
        given = inputs(size, size, 2 * size)
        torch.testing.assert_close(run(*given), Joined()(*given))


def test_a_file_of_a_program_from_a_file_has_no_names() -> None:
    """Torch writes neither those of Dims, nor whether a least size of 2 was declared: eager mode takes 1 then."""
    buffer = io.BytesIO()
    torch.export.save(exported(), buffer)
    buffer.seek(0)
    program = load(lower(torch.export.load(buffer)).emit().buffer)
    with pytest.raises(InputError, match=r"dimension 0 of argument 'b' is 1, expected n; .* one size 'n': pass"):
        program.run("forward", *inputs(4, 1, 8))
    assert program.run("forward", *inputs(1, 1, 2))[0].shape == (2, 3)


def test_without_provenance_nothing_is_known(lowered: LoweredMethods) -> None:
    program = load(lowered.emit(provenance=False).buffer)
    assert program.run("forward", *inputs(4, 1, 8))[0].shape == (8, 3)


def test_what_has_no_common_size_says_nothing_more(lowered: LoweredMethods) -> None:
    program = lowered.made_by.methods["forward"]
    assert program.dimensions == (Dimension("batch", 2, ((0, 0, 1, 0), (1, 0, 1, 0), (2, 0, 2, 0))),)
    assert b"dimensions" not in Provenance(methods={"forward": replace(program, dimensions=())}).encode()


@pytest.mark.parametrize("place", [(3, 0, 1, 0), (0, 2, 1, 0), (0, 0, 0, 0), (0, -1, 1, 0), (0, 0, 1)], ids=str)
def test_damage_is_found(lowered: LoweredMethods, place: Any) -> None:
    wrong = MethodProvenance(dimensions=(Dimension("batch", 2, (place,)),))
    content = Provenance(methods={"forward": wrong}).encode()
    if place[:2] in ((3, 0), (0, 2)):  # only who knows the inputs sees it
        known = replace(lowered, made_by=replace(lowered.made_by, methods={"forward": wrong}))
        with pytest.raises(InputError, match=r"its provenance names dimension . of input ., which is not there"):
            load(known.emit().buffer)
    else:
        with pytest.raises(CorruptError, match="provenance is damaged"):
            read({KEY: memoryview(content)})
