"""Memory is planned for the largest inputs that the user declares, not for the greatest size of each dimension."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import joint_models
import pytest
import torch
from executorch.runtime import Runtime
from torch import nn
from torch.export import Dim, ExportedProgram, export

from exir_lowering import InputError, LoweringOptions, inspect, load, lower, plan, verify

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A model, and the largest inputs that it gets."""

    module: Callable[[], nn.Module]
    inputs: Callable[..., tuple[torch.Tensor, ...]]  # of some sizes
    dims: Mapping[str, tuple[int, int]]
    axes: Any  # for each input, the dimensions by name
    largest: tuple[Sizes, ...]  # some of the largest
    smaller: tuple[Sizes, ...]
    beyond: Sizes
    bounds: Mapping[str, int] = field(default_factory=dict)
    sizes: Any = None

    @property
    def options(self) -> dict[str, Any]:
        return {"options": LoweringOptions(bounds=self.bounds), "sizes": self.sizes}

    def export(self, at: Sizes | None = None) -> tuple[nn.Module, ExportedProgram]:
        """Export it for any sizes, or for these."""
        torch.manual_seed(0)
        model = self.module().eval()
        if at is not None:
            return model, export(model, self.inputs(*at))
        dims = {name: Dim(name, min=low, max=high) for name, (low, high) in self.dims.items()}
        shapes = tuple({axis: dims[name] for axis, name in one.items()} for one in self.axes)
        later = {"prefer_deferred_runtime_asserts_over_guards": True}  # else torch.export refuses to pad to windows
        return model, export(model, self.inputs(*self.smaller[0]), dynamic_shapes=shapes, **later)


def _image(height: int, width: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(1)),)


def _texts(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[:, length - length // 4 :] = 0
    return torch.randint(0, 100, (batch, length)), mask


PIXELS = {"dims": {"height": (16, 512), "width": (16, 512)}, "axes": ({2: "height", 3: "width"},)}
TOKENS = {"dims": {"batch": (1, 64), "seq": (2, 512)}, "axes": ({0: "batch", 1: "seq"},) * 2}
CASES = {
    "windows": Case(
        joint_models.Windows,
        _image,
        largest=((96, 96), (512, 18), (18, 512)),
        smaller=((24, 40), (16, 16), (90, 70)),
        beyond=(110, 110),
        bounds={"height*width": 96 * 96},
        **PIXELS,
    ),
    "encoder": Case(
        joint_models.Encoder,
        _texts,
        largest=((64, 16), (2, 512)),
        smaller=((3, 9), (1, 2), (2, 200)),
        beyond=(64, 100),
        sizes=[{"batch": 64, "seq": 16}, {"batch": 2, "seq": 512}],
        **TOKENS,
    ),
    "detector": Case(
        joint_models.Detector,
        _image,
        largest=((128, 96), (96, 128)),
        smaller=((64, 48), (16, 16), (33, 95)),
        beyond=(128, 128),
        sizes=[{"height": 128, "width": 96}, {"image.2": 96, "width": 128}],
        **PIXELS,
    ),
}


@cache
def _made(name: str, partitioner: str | None) -> tuple[nn.Module, ExportedProgram, Any]:
    case = CASES[name]
    model, program = case.export()
    return model, program, lower(program, partitioner, **case.options).emit()


def _arena(artifact: Any) -> int:
    return sum(method.memory.bytes for method in artifact.report.methods)


@pytest.mark.parametrize(
    ("name", "partitioner"),
    [*((name, one) for name in CASES for one in (None, "xnnpack")), ("encoder", "reference")],
)
def test_all_declared_inputs_run_right_in_one_and_a_half_times_what_the_largest_needs(
    name: str, partitioner: str | None
) -> None:
    case = CASES[name]
    model, program, artifact = _made(name, partitioner)
    if partitioner is None:
        needed = max(_arena(lower(case.export(at)[1]).emit()) for at in case.largest)
        assert _arena(lower(program).emit()) > 3 * needed
    else:  # of fixed sizes, a backend takes more at once, and the memory is its own
        alone = (plan(program, partitioner, sizes=[dict(zip(case.dims, at, strict=True))]) for at in case.largest)
        needed = max(one.methods[0].memory.bytes for one in alone)
    assert needed <= _arena(artifact) * 1.01
    assert _arena(artifact) <= 1.5 * needed
    loaded = load(artifact.buffer)
    for sizes in (*case.smaller, *case.largest, *reversed(case.smaller), *reversed(case.largest)):  # up and down
        inputs = case.inputs(*sizes)
        torch.testing.assert_close(loaded.run("forward", *inputs)[0], model(*inputs), rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match=r"more than"):
        loaded.run("forward", *case.inputs(*case.beyond))
    inputs = case.inputs(*case.smaller[0])
    torch.testing.assert_close(loaded.run("forward", *inputs)[0], model(*inputs), rtol=1e-4, atol=1e-4)


def test_the_runtime_itself_refuses_more_and_goes_on() -> None:
    case = CASES["encoder"]
    model, _, artifact = _made("encoder", "xnnpack")
    program = Runtime.get().load_program(artifact.buffer)
    method: Any = program.load_method("forward")
    with pytest.raises(RuntimeError):
        method.execute(case.inputs(*case.beyond))
    with pytest.raises(RuntimeError):  # each input has room for it, what is computed does not
        method.execute(case.inputs(1, 1000))
    for sizes in (*case.smaller, *case.largest):
        inputs = case.inputs(*sizes)
        torch.testing.assert_close(method.execute(inputs)[0], model(*inputs), rtol=1e-4, atol=1e-4)


def test_what_a_file_says_of_its_inputs_and_how_it_is_verified() -> None:
    case = CASES["encoder"]
    _, program, artifact = _made("encoder", None)
    (tokens, _) = inspect(artifact.buffer).methods[0].signature.inputs
    assert tokens.greatest == (64, 512)
    assert repr(tokens) == "tokens: int64[1..64, 2..512] of at most 1,024 elements"
    with pytest.raises(InputError, match=r"at most \[64, 512\], with at most 1,024 elements. It has 6,400 elements"):
        load(artifact.buffer).run("forward", *case.inputs(*case.beyond))
    assert verify(artifact.buffer, program).ok


@pytest.mark.parametrize("partitioner", [None, "xnnpack"])
def test_a_length_that_depends_on_data_is_bounded_by_what_is_said(partitioner: str | None) -> None:
    torch.manual_seed(0)
    model = joint_models.Speech().eval()
    tokens = torch.randint(0, 50, (1, 12))
    program = export(model, (tokens,), dynamic_shapes=({1: Dim("length", min=2, max=64)},))
    with pytest.raises(InputError, match=r'joint_models.py.*depends on data.*bounds=\{"u0": 1000\}'):
        lower(program, partitioner)
    lowered = lower(program, partitioner, options=LoweringOptions(bounds={"u0": 512}))
    loaded = load(lowered.emit().buffer)
    for length in (2, 64, 30, 5):
        tokens = torch.randint(0, 50, (1, length))
        torch.testing.assert_close(loaded.run("forward", tokens)[0], model(tokens), rtol=1e-4, atol=1e-4)


class Cubes(nn.Module):
    """Checks a power of a size; torch writes that check once more when it decomposes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.max().item()
        torch._check(length >= 1)
        torch._check(length * length * length <= 1000)
        return torch.arange(length).float().sin()


def test_checks_of_powers_of_sizes_are_made_of_products() -> None:
    program = export(Cubes(), (torch.tensor([3, 1]),), prefer_deferred_runtime_asserts_over_guards=True)
    assert any("pow" in node.name for node in program.graph.nodes)
    loaded = load(lower(program, options=LoweringOptions(bounds={"u0": 10})).emit().buffer)
    for length in (3, 10, 1):
        torch.testing.assert_close(loaded.run("forward", torch.tensor([length, 1]))[0], torch.arange(length).sin())


def test_what_data_makes_longer_than_was_said_is_refused() -> None:
    program = export(joint_models.Speech().eval(), (torch.randint(0, 50, (1, 12)),))
    loaded = load(lower(program, "xnnpack", options=LoweringOptions(bounds={"u0": 13})).emit().buffer)
    with pytest.raises(InputError, match=r"failed in the ExecuTorch runtime.*look at their values, and at sizes"):
        loaded.run("forward", torch.arange(12)[None])


def test_a_dimension_without_a_bound_gets_what_is_said() -> None:
    module = nn.Linear(8, 8)
    program = export(module, (torch.randn(2, 30, 8),), dynamic_shapes=({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},))
    narrowed = " ".join(map(str, lower(program, "xnnpack").report.narrowed))
    assert re.search(r'takes at most 30, that of the example.*bounds=\{"input\.1": \.\.\.\}', narrowed)
    lowered = lower(program, "xnnpack", sizes=[{"input.0": 4, "input.1": 100}, {"input.0": 1, "input.1": 400}])
    assert not lowered.report.narrowed
    artifact = lowered.emit()
    assert artifact.report.methods[0].memory.peak == 2 * 400 * 8 * 4
    loaded = load(artifact.buffer)
    for sizes in ((4, 100, 8), (1, 400, 8), (3, 7, 8), (1, 1, 8)):
        torch.testing.assert_close(loaded.run("forward", x := torch.randn(sizes))[0], module(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="It has 6,400 elements, more than 3,200"):
        loaded.run("forward", torch.randn(4, 200, 8))


def test_methods_have_bounds_of_their_own() -> None:
    model, program, _ = _made("encoder", None)
    bounds = {"texts": {"seq": 16}, "document": {"batch": 1}}
    both = lower({"texts": program, "document": program}, "xnnpack", options=LoweringOptions(bounds=bounds)).emit()
    arenas = {method.name: method.memory.bytes for method in both.report.methods}
    loaded = load(both.buffer)
    for name, sizes in (("texts", (64, 16)), ("document", (1, 512)), ("texts", (3, 2)), ("document", (1, 20))):
        inputs = CASES["encoder"].inputs(*sizes)
        torch.testing.assert_close(loaded.run(name, *inputs)[0], model(*inputs), rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="dimension 1 is 20, more than 16"):
        loaded.run("texts", *CASES["encoder"].inputs(1, 20))
    sets = {"texts": [{"seq": 16}], "document": [{"batch": 1}]}
    again = plan({"texts": program, "document": program}, "xnnpack", sizes=sets)
    assert {method.name: method.memory.bytes for method in again.methods} == arenas


@pytest.mark.parametrize(
    ("bounds", "sizes", "message"),
    [
        (
            {"heigth": 5},
            None,
            r"bounds: the program has no dynamic dimension 'heigth'. The dynamic .*'height', 'image.2'",
        ),
        ({"height*depth": 5}, None, r"no dynamic dimension 'height\*depth'"),
        ({"height": 0}, None, r"got 'height': 0, expected a dimension and an int of at least 1"),
        ({"height": 4096}, None, r"height cannot be at most 4096. The dynamic dimensions are .*16 to 512"),
        ({"forwards": {"height": 64}}, None, r"bounds: there is no method 'forwards'"),
        ({}, [{"seq": 5}], r"sizes: the program has no dynamic dimension 'seq'"),
        ({}, {"height": 5}, r"sizes: there is no method 'height'"),
        ({}, [], r"sizes: got \[\], expected sets of sizes"),
    ],
)
def test_what_a_program_does_not_have_is_an_error(bounds: Any, sizes: Any, message: str) -> None:
    program = CASES["detector"].export()[1]
    with pytest.raises(InputError, match=message):
        lower(program, options=LoweringOptions(bounds=bounds), sizes=sizes)
