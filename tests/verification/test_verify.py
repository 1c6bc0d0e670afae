"""`verify` finds faults that normally distributed inputs miss, and none where there are none."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import models
import pytest
import quantized_models
import torch
from planted import PLANTED, Planted
from torch.export import Dim, export

from exir_lowering import InputError, inspect, lower, verify
from exir_lowering.testing.trial import take_fingerprint
from exir_lowering.verification.measure import Difference, Tolerance, measure


@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_a_planted_fault_is_found_where_plain_inputs_agree(planted: Planted) -> None:
    program = planted.export()
    artifact = lower(program, "reference").emit()
    plain = verify(artifact, program, [planted.inputs()] * 2, delegates=[planted.delegate()])
    assert plain.ok, str(plain)
    found = verify(artifact, program, delegates=[planted.delegate()])
    off = {case for output in found.methods["forward"].outputs for case in output.off}
    assert not found.ok and off & set(planted.shown_by), str(found)
    assert found.methods["forward"].outputs[0].name in str(found)
    assert verify(artifact, program).ok


@pytest.mark.parametrize("name", ["mobilenet_v2", "bert"])
def test_models_have_no_fault(name: str) -> None:
    program = models.exported(name)[2]
    found = verify(lower(program, "xnnpack").emit(), program)
    assert found.ok and found.methods["forward"].skipped == 0, str(found)
    assert len(found.methods["forward"].cases) >= 10
    assert len(str(found).splitlines()) <= 25


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_quantised_model_has_no_fault(dynamic: bool) -> None:
    program = quantized_models.quantized(dynamic)
    found = verify(lower(program, quantized_models.partitioners(dynamic)).emit(), program)
    assert found.ok and found.methods["forward"].quantized, str(found)


class Language(torch.nn.Module):
    """A layer with a cache that both methods share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(30, 8), torch.nn.Linear(8, 30)
        self.register_buffer("keys", torch.zeros(16, 8))
        self.register_buffer("causal", torch.ones(16, 16).tril().bool())

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.table(ids[0])
        self.keys[places] = x
        scores = (x @ self.keys.T).masked_fill(~self.causal[places], -10000.0)
        return self.head(scores.softmax(-1) @ self.keys)


def language() -> dict[str, Any]:
    model, length = Language().eval(), Dim("length", min=2, max=12)
    ids = torch.arange(6)[None]
    return {
        "prefill": export(model, (ids, torch.arange(6)), dynamic_shapes=({1: length}, {0: length})),
        "decode": export(model, (ids[:, :1], torch.tensor([6]))),
    }


def test_a_default_device_and_methods_without_calls() -> None:
    linear = torch.nn.Linear(4, 3).eval()
    programs = {"one": export(linear, (torch.ones(2, 4),)), "other": export(linear, (torch.ones(1, 4),))}
    artifact = lower(programs).emit()
    with torch.device("meta"):
        assert verify(artifact, programs).ok
    with pytest.raises(InputError, match="nothing of method 'other' was compared: it has no calls"):
        verify(artifact, programs, {"one": [(torch.ones(2, 4),)]})


def test_methods_share_state_as_in_the_file() -> None:
    programs = language()
    before = take_fingerprint(programs)
    random = torch.get_rng_state()
    lowered = lower(programs, "xnnpack")
    found = verify(lowered.emit(), programs)
    assert found.ok and all(method.stateful for method in found.methods.values()), str(found)
    assert take_fingerprint(programs) == before and torch.equal(torch.get_rng_state(), random)
    assert {"last token id", "last positions", "greatest sizes"} <= set(found.methods["prefill"].cases)
    assert found.methods["prefill"].skipped == found.methods["decode"].skipped == 0
    one, prompt = (torch.tensor([[3]]), torch.tensor([6])), (torch.arange(6)[None], torch.arange(6))
    calls = {"prefill": [prompt], "decode": [(one, {}), one]}
    read = {name: copy.deepcopy(program) for name, program in programs.items()}  # as from two files
    for artifact, given in (
        (lowered.emit(), programs),
        (lowered.emit(share_state=False), programs),
        (lower(read).emit(share_state=True), read),
    ):
        found = verify(artifact, given, calls)
        assert found.ok and [method.calls for method in found.methods.values()] == [1, 2], str(found)


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("mine", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        self.mine.add_(1.0)
        return self.total + self.mine * 100


@pytest.mark.parametrize(
    ("one", "shares"), [(False, ("auto", True, ["total"])), (True, ("auto", ["mine"], False))], ids=["apart", "one"]
)
def test_eager_shares_what_the_file_was_told_to_share(one: bool, shares: tuple[Any, ...]) -> None:
    first = Counter()
    models = {"m0": first, "m1": first if one else Counter()}
    programs = {name: export(model, (torch.ones(4),)) for name, model in models.items()}
    lowered, ones = lower(programs, "xnnpack"), [(torch.ones(4),)] * 3
    for share in shares:
        found = verify(lowered.emit(share_state=share), programs, {"m0": ones, "m1": ones})
        assert found.ok, (share, str(found))


class Nested(torch.nn.Module):
    def forward(self, pair: Any, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        x, y = pair["x"], pair["y"]
        y.add_(1.0)
        return {"sum": (x + y) * scale, "log": x.log()}


def test_nested_inputs_of_the_caller() -> None:
    pair = {"x": torch.rand(3) + 1, "y": torch.rand(3)}
    program = export(Nested(), (pair,), {"scale": torch.tensor(2.0)})
    content = lower(program).emit().buffer
    found = verify(content, program, [((pair,), {"scale": torch.tensor(2.0)})])
    assert found.ok and found.seed is None and found.methods["forward"].cases == ("input 0",)
    assert found.methods["forward"].outputs[0].name == "the new value of an input"
    assert verify(content, program).ok
    tree = json.loads(found.to_json())
    assert tree["version"] == 3 and tree["ok"] and tree["methods"][0]["outputs"][0]["case"] == "input 0"


def test_mistakes_are_named() -> None:
    program = export(torch.nn.Linear(4, 3).eval(), (torch.ones(2, 4),))
    wide = export(torch.nn.Linear(5, 3).eval(), (torch.ones(2, 5),))
    content = lower(program).emit().buffer
    for arguments, options, message in (
        ((program.graph_module,), {}, "expected the ExportedProgram that was lowered"),
        (({"forwards": program},), {}, "no method 'forwards'; it has 'forward'. Did you mean 'forward'?"),
        ((wide,), {}, r"a tensor of float32 of shape \[2, 4\] in the file, and a tensor of float32 of shape \[2, 5\]"),
        ((program, [torch.ones(2, 4)]), {}, "call 0 of 'forward': got a Tensor, expected a sequence of calls"),
        ((program, [(torch.ones(2, 5),)]), {}, r"of shape \[2, 5\], expected a tensor of float32 of shape \[2, 4\]"),
        ((program, {"other": []}), {}, "there is no program for 'other'"),
        ((program, "bundled"), {}, "has no bundled inputs for forward: a file has them that was saved"),
        ((program, "others"), {}, "got a str, expected a sequence of calls"),
        ((program, []), {}, "inputs of 'forward': got no calls, expected"),
        ((program, {}), {}, "got an empty mapping, expected a sequence of calls"),
        ((program,), {"tolerance": -1.0}, "expected a number above 0"),
    ):
        with pytest.raises(InputError, match=message):
            verify(content, *arguments, **options)
    with pytest.raises(InputError, match=r": got an? ExportedProgram, expected an Artifact, or the path"):
        verify(program, program)  # type: ignore[arg-type]


def test_inputs_that_pytorch_refuses_are_left_out() -> None:
    class Picks(torch.nn.Module):
        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            return x[(i * i).clamp(max=9)]

    program = export(Picks(), (torch.ones(5), torch.tensor([1])))
    content = lower(program).emit().buffer
    found = verify(content, program)
    assert found.ok and found.methods["forward"].skipped > 0 and "left out" in str(found)
    with pytest.raises(InputError, match="PyTorch refused each of 1 calls"):
        verify(content, program, [(torch.ones(5), torch.tensor([3]))])


def test_differences_are_measured_with_what_is_not_finite() -> None:
    nan, inf = math.nan, math.inf

    def found(got: Any, expected: Any) -> Difference:
        return measure(expected, got, Tolerance(None, False, torch.float32), 0.0, None)

    same = found(torch.tensor([1.0, nan, inf]), torch.tensor([1.0, nan, inf]))
    assert (same.score, same.largest, same.problem) == (0.0, 0.0, "")
    assert "NaN in 1 elements" in found(torch.tensor([nan]), torch.tensor([1.0])).problem
    assert "of the other sign" in found(torch.tensor([-inf]), torch.tensor([inf])).problem
    assert found(torch.tensor([1.1, 0.0]), torch.tensor([1.0, 0.0])).sqnr == pytest.approx(20, abs=0.1)
    assert found(torch.tensor([2]), torch.tensor([5])).largest == 3
    assert "of int64" in found(torch.tensor([2]), torch.tensor([5.0])).problem
    assert found(torch.ones(0), torch.ones(0)).score == 0 and found(3, 3).problem == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_to_a_type_is_allowed_beside_the_share(dtype: torch.dtype) -> None:
    tolerance, step = Tolerance(None, False, torch.float32), torch.finfo(dtype).eps
    expected = torch.tensor([1.0, 0.5], dtype=dtype)
    steps = math.ceil(tolerance.of(dtype) / step)  # the least error of a number of the type that is not below the share
    for count, is_off in ((steps, False), (steps + 2, True)):
        got = expected + torch.tensor([count * step, 0.0], dtype=dtype)
        assert (measure(expected, got, tolerance, 0.0, None).score > 1) == is_off
    asked = Tolerance(steps * step * 0.9, False, torch.float32)
    assert measure(expected, expected + steps * step, asked, 0.0, None).score > 1  # a share that is given is the limit


def test_sizes_that_a_file_does_not_take_are_left_out() -> None:
    inputs, layer = (torch.randn(3, 8),), torch.nn.Linear(8, 4).eval()
    for size in (Dim("n", min=1, max=33), Dim("n"), Dim.AUTO):
        program = export(layer, inputs, dynamic_shapes=({0: size},))
        for lowered in (program, export(layer, inputs)):  # the second one takes the example's sizes only
            found = verify(lower(lowered).emit(), program)
            assert found.ok and found.methods["forward"].skipped == 0, str(found)


class Earlier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(self.linear(x).relu(), -1)


def test_a_file_of_an_earlier_executorch() -> None:
    # `to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])` of ExecuTorch 1.4.1 made it.
    path = Path(__file__).parent / "executorch_1_4_1.pte"
    report = inspect(path)
    assert sum(report.bytes_by_kind().values()) == path.stat().st_size and "FullyConnected" in str(report)
    found = verify(path, export(Earlier().eval(), (torch.randn(2, 8),)))
    assert found.ok and found.methods["forward"].calls == 18
