"""`exir-lower quantize` and `quantize`: int8 that lowers whole, and which layers it costs most in."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim, ExportedProgram, export, load, save

from exir_lowering import InputError, cli, load as load_file, lower, quantize, verify

pytestmark = pytest.mark.filterwarnings("ignore")


class Images(torch.nn.Module):
    """Convolutions with a normalisation, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)
        self.second, self.head = torch.nn.Conv2d(8, 8, 3), torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = torch.relu(self.norm(self.first(x)))
        y = y + torch.relu(self.second(torch.nn.functional.pad(y, (1, 1, 1, 1))))
        return {"logits": self.head(y.mean((2, 3)))}


class Planted(torch.nn.Module):
    """Linear layers, of which one has an outlier channel: the other weights of its rows are small beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(5))
        with torch.no_grad():
            self.layers[3].weight[:, 7] *= 300
            self.layers[2].weight[7] /= 300
            self.layers[2].bias[7] /= 300

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Counted(torch.nn.Module):
    """A layer with state and an argument by name; positions are integers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = torch.nn.Embedding(20, 16), torch.nn.Linear(16, 16)
        self.register_buffer("total", torch.zeros(16))

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor) -> torch.Tensor:
        y = self.out(x + self.table(ids + 1))
        self.total.add_(y.sum(0))
        return y * 2 + self.total


class Whole(torch.nn.Module):
    """Computes positions from tokens, and joins them: integers that a quantiser would make numbers of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = torch.nn.Embedding(60, 16), torch.nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        there = (tokens != 1).long()
        places = torch.maximum(there.cumsum(1) * there + 1, there)
        joined = torch.cat([tokens * 2 + 1, torch.where(tokens > 3, places, tokens * 0), tokens + there], 1)
        y: torch.Tensor = self.out(self.table(joined)) + there.sum() * joined[..., None]
        return y


def images() -> list[tuple[torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(2, 3, 12, 12),) for _ in range(3)]


def planted() -> tuple[ExportedProgram, list[tuple[torch.Tensor]]]:
    model = Planted().eval()
    torch.manual_seed(1)
    return export(model, (torch.ones(4, 32),)), [(torch.randn(4, 32),) for _ in range(3)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantize")
    save(export(Images().eval(), images()[0]), folder / "images.pt2")
    torch.save(images(), folder / "images.pt")
    return folder


def test_static_on_the_command_line(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    command = ["quantize", "images.pt2", "--calibration", "images.pt"]
    assert cli.main([*command, "-o", "q.pt2", "--top", "2"]) == 0
    printed = capsys.readouterr().out
    assert "4 layers quantised" in printed and "in 3 calls, which are also the calibration calls" in printed
    assert "['logits']" in printed and "and 2 more layers" in printed and "Wrote q.pt2" in printed
    assert cli.main([*command, "-o", "again.pt2", "--check", "images.pt", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["calls"] == 3 and not found["on_calibration"] and found["outputs"][0]["sqnr"] > 25
    costs = {layer["path"]: layer["extra_bytes"] for layer in found["layers"]}
    assert costs == {"first": 648, "second": 1728, "head": 120, "": 0}
    first, again = load(files / "q.pt2"), load(files / "again.pt2")
    assert str(first.graph) == str(again.graph)
    assert not {"first.weight", "norm.weight"} & first.state_dict.keys()
    assert torch.int8 in {value.dtype for value in first.state_dict.values()}
    assert all(torch.equal(value, again.state_dict[name]) for name, value in first.state_dict.items())
    assert cli.main(["lower", "q.pt2", "-p", "xnnpack", "-o", "q.pte", "--require-coverage", "1"]) == 0
    assert cli.main(["verify", "q.pte", "q.pt2"]) == 0
    capsys.readouterr()
    assert cli.main([*command, "-o", "kept.pt2", "--keep", "sec*", "--json", "--per-tensor"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert kept["kept"] == ["second"] and "per tensor" in kept["recipe"] and len(kept["layers"]) == 3


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_integers_stay_whole(dynamic: bool) -> None:
    model, tokens = Whole().eval(), torch.tensor([[1, 5, 20, 0, 7]])
    program = quantize(export(model, (tokens,)), [(tokens,), (tokens.flip(1),)], dynamic=dynamic).program
    expected = program.module()(tokens)
    torch.testing.assert_close(expected, model(tokens), rtol=0, atol=0.5)
    for partitioner in (None, "xnnpack"):
        (got,) = load_file(lower(program, partitioner).emit().buffer).run("forward", tokens)
        torch.testing.assert_close(got, expected, rtol=0, atol=0.1)


def test_the_planted_layer_is_first_and_can_be_kept() -> None:
    program, calls = planted()
    before = {name: value.clone() for name, value in program.state_dict.items()}
    plain = quantize(program, calls, dynamic=True)
    worst, *others = plain.errors.layers
    assert worst.path == "layers.3" and worst.sqnr < min(each.sqnr for each in others) - 5, str(plain)
    assert worst.extra_bytes == 3 * 32 * 32
    kept = quantize(program, calls, dynamic=True, keep=["layers.3"])
    assert kept.errors.outputs[0].sqnr > plain.errors.outputs[0].sqnr + 5 and kept.kept == ("layers.3",)
    assert kept.program.state_dict["layers.3.weight"].dtype == torch.float32
    assert all(torch.equal(value, program.state_dict[name]) for name, value in before.items())
    expected, got = (torch.cat([each.module()(*call) for call in calls]) for each in (program, kept.program))
    assert float((got - expected).abs().max()) == pytest.approx(kept.errors.outputs[0].largest, rel=1e-4)
    unmeasured = quantize(program, dynamic=True)
    assert str(unmeasured.program.graph) == str(plain.program.graph) and "No errors" in str(unmeasured)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_dynamic_sizes_and_state_stay(dynamic: bool) -> None:
    batch = Dim("batch", min=1, max=9)

    def call(size: int) -> Any:
        return (torch.randn(size, 16),), {"ids": torch.arange(size)}

    args, kwargs = call(4)
    program = export(Counted().eval(), args, kwargs, dynamic_shapes={"x": {0: batch}, "ids": {0: batch}})
    calls = [call(size) for size in (1, 5, 9)]
    found = quantize(program, calls, dynamic=dynamic)
    assert [str(each) for each in found.program.range_constraints.values()] == ["VR[1, 9]"]
    assert not program.state_dict["total"].any() and not found.program.state_dict["total"].any()
    quantised, original = found.program.module(), program.module()
    loaded = load_file(lower(found.program, "xnnpack").emit().buffer)
    for args, kwargs in calls:
        expected = quantised(*args, **kwargs)
        (got,) = loaded.run("forward", *args, kwargs["ids"])
        torch.testing.assert_close(got, expected, atol=0.1, rtol=0.02)
        torch.testing.assert_close(expected, original(*args, **kwargs), atol=0.4, rtol=0.05)
    assert verify(lower(found.program, "xnnpack").emit(), found.program).ok


class Grown(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: list[torch.Tensor]) -> torch.Tensor:
        return self.out(torch.cat([x, x])) + y[0][1:]


def test_a_size_that_depends_on_another_one_stays() -> None:
    n = Dim("n", min=3, max=8)
    args = (torch.randn(4, 4), [torch.randn(9, 4)])
    program = export(Grown(), args, dynamic_shapes=({0: n}, [{0: 2 * n + 1}]))
    found = quantize(program, [args], dynamic=True)
    x = torch.randn(6, 4), [torch.randn(13, 4)]
    torch.testing.assert_close(found.program.module()(*x), program.module()(*x), atol=0.1, rtol=0.1)


class Written(torch.nn.Module):
    """Writes into parts of what it computes and of its state, and draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.out = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 8)
        self.register_buffer("rows", torch.zeros(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x)).mean((2, 3))
        y[:, :4] += 5.0
        self.rows[1:] = y[:1]
        y = self.out(self.rows + y)
        return y + torch.rand_like(y)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_what_is_written_in_place_is_seen(dynamic: bool) -> None:
    calls = images()
    program = export(Written().eval(), calls[0])
    drawn = torch.get_rng_state()
    with torch.inference_mode(), torch.device("meta"):
        found = quantize(program, calls, dynamic=dynamic)
    torch.testing.assert_close(torch.get_rng_state(), drawn)
    assert found.errors.outputs[0].sqnr > 30, str(found)
    assert {layer.path for layer in found.errors.layers} == ({"conv", "out"} if dynamic else {"conv", "out", ""})
    quantised, original = found.program.module(), program.module()
    for call in calls:
        torch.manual_seed(1)
        expected = original(*call)
        torch.manual_seed(1)
        torch.testing.assert_close(quantised(*call), expected, atol=0.1, rtol=0.05)
    torch.testing.assert_close(quantised.rows, original.rows, atol=0.1, rtol=0.05)


class Branches(torch.nn.Module):
    """Has a constant in a branch, and writes into a part of a tensor if it is told to."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out, self.writes = torch.nn.Linear(8, 8), writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.out(x)
        if self.writes:
            y[:, 1:] += 1.0
        return torch.cond(y.sum() > 0, lambda t: t * torch.tensor([1.0, 2.0] * 4), lambda t: t - 1.0, (y,))


def test_constants_of_branches_stay() -> None:
    calls = [(torch.ones(2, 8),), (-torch.ones(2, 8),)]
    found = quantize(export(Branches(False), calls[0]), calls)
    assert found.errors.outputs[0].sqnr > 30, str(found)
    with pytest.raises(InputError, match=r"writes into parts of tensors, and PyTorch cannot make copies of that"):
        quantize(export(Branches(True), calls[0]), calls)


class Masked(torch.nn.Module):
    def __init__(self, computes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out, self.computes = torch.nn.Linear(8, 8), computes
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) + (torch.full((8, 8), -torch.inf).triu(1) if self.computes else self.mask)


def test_masks_stay_in_float() -> None:
    found = quantize(export(Masked(), (torch.randn(8, 8),)), [(torch.randn(8, 8),)])
    assert found.errors.outputs[0].sqnr > 30 and [each.path for each in found.errors.layers] == ["out"]


def test_lost_infinities_are_no_equal_outputs() -> None:
    found = quantize(export(Masked(computes=True), (torch.randn(8, 8),)), [(torch.randn(8, 8),)])
    (output,) = found.errors.outputs
    assert output.sqnr == -torch.inf and "infinity" in output.problem
    assert "equal" not in str(found) and json.loads(found.to_json())["outputs"][0]["sqnr"] is None


class Refused:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    ("calls", "options", "said"),
    [
        (None, [], "Give --calibration inputs.pt"),
        (images(), ["--recipe", "xnnpack-int4"], "--recipe: none is called 'xnnpack-int4'; did you mean"),
        (images(), ["--keep", "secnd"], "is called 'secnd'. Did you mean 'second'"),
        (images(), ["--dynamic", "--keep", "*"], "finds nothing to quantise"),
        (images(), ["--top", "-1"], "--top: got -1, expected a number of layers"),
        (images(), ["-o", "missing/q.pt2"], "there is no directory 'missing'"),
        (images(), ["-o", "IMAGES"], "this is the float program; give the int8 program another name"),
        ([], [], "--calibration: got an empty list, expected a list of calls"),
        (torch.ones(2), [], "--calibration: got a Tensor, expected a list of calls"),
        ([torch.ones(2, 3, 12, 12)], [], "--calibration: call 0: got a Tensor"),
        ([(torch.ones(2, 3, 12),)], [], "call 0: argument 'x' is a tensor of float32 of shape [2, 3, 12], expected"),
        ([*images(), (torch.ones(2, 3, 12, 12, dtype=torch.int64),)], [], "call 3: argument 'x' is a tensor of int64"),
        ([(torch.ones(2, 3, 12, 12), 1)], [], "too many positional arguments"),
        (Refused(), [], "not a torch.save file with only tensors"),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_mistakes(
    files: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    calls: Any,
    options: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [] if calls is None else ["--calibration", "given.pt"]
    if isinstance(calls, Refused):
        Path("given.pt").write_bytes(pickle.dumps(calls))
    else:
        torch.save(calls, "given.pt")
    model = str(files / "images.pt2")
    options = [model if each == "IMAGES" else each for each in options]
    assert cli.main(["quantize", model, "-o", "q.pt2", *given, *options]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert said in error and "Traceback" not in error, error
    assert not Path("executed").exists() and not Path("q.pt2").exists()


def test_programs_that_cannot_be_quantised() -> None:
    class Sine(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x)

    with pytest.raises(InputError, match=r"xnnpack-int8, static, per channel finds nothing to quantise"):
        quantize(export(Sine(), (torch.ones(2),)), [(torch.ones(2),)])
    program, calls = planted()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = quantize(program, calls, dynamic=True)
    with pytest.raises(InputError, match=r"it is quantised already, as it calls quantized_decomposed"):
        quantize(done.program, calls, dynamic=True)
    with pytest.raises(InputError, match=r"expected a program of torch\.export\.export"):
        quantize(Sine(), calls)  # type: ignore[arg-type]


class Halves(torch.nn.Module):
    """Writes all of a memory, and returns the part of it that is a buffer too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("all", torch.zeros(4, 4))
        self.register_buffer("part", self.all[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.all.add_(self.layer(x))
        return self.part * 1


def test_what_would_become_another_program_is_refused() -> None:
    x = torch.randn(4, 4)
    with pytest.raises(InputError, match="the buffers all, part share memory that the program writes"):
        quantize(export(Halves().eval(), (x,)), [(x,)])
