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
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from planted import PLANTED, Planted
from torch.export import Dim, export

from exir_lowering import InputError, bisect, inspect, lower, verify
from exir_lowering.backends.reference import ReferenceDelegate
from exir_lowering.runtime.source import read_file
from exir_lowering.testing.trial import take_fingerprint
from exir_lowering.verification.cases import Generated
from exir_lowering.verification.measure import Difference, Tolerance, measure
from exir_lowering.verification.subjects import match


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


class Normed(torch.nn.Module):
    """As small inputs have a mean far from zero relative to their spread after the convolution, it finds bad norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.InstanceNorm2d(8, affine=True)
        self.act, self.out = torch.nn.PReLU(8), torch.nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.act(self.norm(self.conv(x))))


@pytest.mark.parametrize(
    ("model", "shape", "operator", "module"),
    [
        (Normed, (1, 3, 16, 16), "aten.instance_norm.default", "norm"),
        (
            lambda: torch.nn.Sequential(torch.nn.GroupNorm(2, 4), torch.nn.PReLU(4)),
            (2, 4, 5, 5),
            "aten.group_norm.default",
            "0",
        ),
    ],
    ids=["instance norm", "group norm"],
)
def test_a_kernel_that_is_wrong_by_itself_is_named(model: Any, shape: Any, operator: str, module: str) -> None:
    program = export(model().eval(), (torch.randn(shape),))
    # ExecuTorch's own lowering leaves the norm to a kernel that computes it from sums of squares.
    theirs = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch().buffer
    found = verify(bytes(theirs), program)
    assert not found.ok and f"{operator} is wrong by itself on the host (" in found.methods["forward"].kernel, str(
        found
    )
    assert f"): {module}, File" in found.methods["forward"].kernel and operator in str(found)
    if model is not Normed:
        assert "mean of 100 deviations" in found.methods["forward"].outputs[0].off
    found = verify(lower(program, "xnnpack").emit(), program)
    assert found.ok and not found.methods["forward"].kernel, str(found)


class Decoder(torch.nn.Module):
    """A cache with a position from which on it is written, and masks in the forms that exporters have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places = torch.nn.Embedding(50, 8), torch.nn.Embedding(32, 8)
        self.register_buffer("keys", torch.zeros(1, 32, 8))

    def forward(self, ids: torch.Tensor, start: torch.Tensor, added: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        at = start + torch.arange(ids.shape[1])
        x = self.table(ids) + self.places(at)
        self.keys[:, at] = x
        scores = x @ self.keys.transpose(1, 2) / 3 + added
        scores = scores + (1.0 - seen[:, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        return scores.softmax(-1) @ self.keys


def test_inputs_are_those_that_a_decoder_takes() -> None:
    model, length = Decoder().eval(), Dim("length", min=2, max=16)
    ids, seen = torch.arange(6)[None], torch.ones(1, 32, dtype=torch.int64)
    prompt, one = (ids, torch.tensor([0]), torch.zeros(6, 32), seen), torch.tensor([6])
    programs = {
        "prefill": export(model, prompt, dynamic_shapes=({1: length}, None, {0: length}, None)),
        "decode": export(model, (ids[:, :1], one, torch.zeros(1, 32), seen)),
    }
    found = verify(lower(programs, "xnnpack").emit(), programs)
    assert found.ok and all(method.skipped == 0 for method in found.methods.values()), str(found)
    assert {"mask of ones", "last token id", "limits of the dtype"} <= set(found.methods["decode"].cases)
    made = Generated(next(iter(match(programs, read_file(lower(programs).emit().buffer, None, True)).values())))
    for case in made.cases:
        _, _, added, seen = next(made.make(case, 0))
        assert set(added.unique().tolist()) <= {0.0, -math.inf} and set(seen.unique().tolist()) <= {0, 1}
        assert (added[:, 0] == 0).all()


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
    for artifact, given, apart in (
        (lowered.emit(), programs, {}),
        (lowered.emit(share_state=False), programs, {"keys": ("prefill", "decode")}),
        (lower(read).emit(share_state=True), read, {}),
        (lower(read).emit(), read, {"keys": ("prefill", "decode")}),
    ):
        found = verify(artifact, given, calls)
        assert [method.calls for method in found.methods.values()] == [1, 2], str(found)
        assert all(method.ok for method in found.methods.values()) and found.apart == apart, str(found)
        assert found.ok == (not apart) and ("prefill, decode do not share keys" in str(found)) == bool(apart)
    culprit = bisect(read, None, inputs=calls, delegates=[ReferenceDelegate()])
    assert culprit.where == "host" and "share_state=True" in culprit.error and not culprit.ok, str(culprit)


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
        assert all(method.ok for method in found.methods.values()), (share, str(found))
        apart = {"total": ("m0", "m1"), "mine": ("m0", "m1")} if one and share != "auto" else {}
        assert found.apart == {name: methods for name, methods in apart.items() if not share or name not in share}


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
    assert found.ok and found.methods["forward"].skipped == 0  # there are smaller ones that it takes

    class Rounds(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x.long().clamp(min=0)]

    rounds = export(Rounds(), (torch.ones(5),))
    found = verify(lower(rounds).emit(), rounds)
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
