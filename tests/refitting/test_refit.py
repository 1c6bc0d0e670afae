"""`refit`: the bytes of a new lowering with the new weights, or an error that says why not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build
from random_programs import random_programs
from torch import nn
from torch.export import ExportedProgram, export

from exir_lowering import Artifact, InputError, LoweringOptions, graphs, load, lower, quantize, refit
from exir_lowering.cli import main
from exir_lowering.pte.recipes import is_bounded

REFIT = LoweringOptions(refit=True)


class Decoder(nn.Module):
    """Tied embeddings, a cache, and state that does not start at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.q, self.k, self.v = nn.Linear(32, 32, bias=False), nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(1, 8, 32))
        self.register_buffer("sum", torch.ones(32))

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        self.cache.index_copy_(1, position, self.k(hidden))
        self.sum.add_(hidden.sum((0, 1)))
        scores = torch.softmax(self.q(hidden) @ self.cache.transpose(1, 2), -1)
        return self.head(scores @ self.cache + self.v(hidden)) + self.sum.sum()


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.depthwise = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.conv(x)))
        return self.head(torch.relu(self.depthwise(hidden)).mean((2, 3)))


DECODE = torch.tensor([[3, 7]]), torch.tensor([1, 2])
IMAGE = (torch.linspace(-1, 1, 3 * 64).reshape(1, 3, 8, 8),)


def trained(model: nn.Module, seed: int) -> nn.Module:
    """Give a model weights, no two of which are equal."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.is_floating_point() and not name.endswith("cache"):
                value.copy_(torch.rand_like(value) * 0.2 + 0.1)
    return model.eval()


@cache
def decoders() -> tuple[Artifact, Artifact, nn.Module]:
    models = [trained(Decoder(), seed) for seed in (1, 2)]
    old, new = (lower(export(model, DECODE), "xnnpack", options=REFIT).emit() for model in models)
    return old, new, models[1]


@cache
def conv_nets() -> tuple[Artifact, ExportedProgram, nn.Module]:
    model, program = trained(ConvNet(), 2), export(trained(ConvNet(), 1), IMAGE)
    return lower(program, "xnnpack", options=REFIT).emit(), program, model


def with_values(program: ExportedProgram, values: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """Return a program with other values of its state."""
    copied = graphs.copy_program(program)
    for name, old in copied.state_dict.items():
        if name in values:
            new = values[name]
            copied.state_dict[name] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    return copied


def check_equal(made: Any, expected: Artifact) -> None:
    assert bytes(made.buffer) == expected.buffer
    assert {name: bytes(data) for name, data in made.data_files.items()} == expected.data_files


@pytest.mark.parametrize("name", ["mobilenet_v2", "bert"])
def test_models(name: str) -> None:
    model, inputs = build(name)
    models = [trained(copy.deepcopy(model), seed) for seed in (1, 2)]
    old, new = (lower(export(one, inputs), "xnnpack", options=REFIT).emit() for one in models)
    made = refit(old, models[1].state_dict())
    check_equal(made, new)
    (result,) = load(bytes(made.buffer)).run("forward", *inputs)
    torch.testing.assert_close(result, models[1](*inputs), rtol=1e-3, atol=1e-3)


def test_a_decoder_from_its_path(tmp_path: Path) -> None:
    old, new, model = decoders()
    made = refit(old.save(tmp_path / "model.pte"), model.state_dict()).save(tmp_path / "made.pte")
    new.save(tmp_path / "new.pte")
    assert made.read_bytes() == new.buffer
    assert (tmp_path / "made.debug.json").read_bytes() == (tmp_path / "new.debug.json").read_bytes()
    program, eager = load(made), copy.deepcopy(model)
    for _ in range(2):  # the state, too
        torch.testing.assert_close(program.run("forward", *DECODE)[0], eager(*DECODE), rtol=1e-4, atol=1e-4)


def test_data_files_and_methods(tmp_path: Path) -> None:
    programs = [export(trained(Decoder(), seed), DECODE) for seed in (1, 2)]
    given = [{"forward@host": one, "forward@cpu": one} for one in programs]
    old, new = (lower(one, {"forward@cpu": "xnnpack"}, options=REFIT).emit(external_weights="weights") for one in given)
    made = refit(old.save(tmp_path / "model.pte"), decoders()[2].state_dict())
    check_equal(made, new)
    made.save(tmp_path / "model.pte")  # in place
    loaded = load(tmp_path / "model.pte", data=tmp_path / "weights.ptd")
    expected = copy.deepcopy(decoders()[2])(*DECODE)
    torch.testing.assert_close(loaded.run("forward@cpu", *DECODE)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_int8(dynamic: bool) -> None:
    _, program, _ = conv_nets()
    quantised = quantize(program, [IMAGE] * 2, dynamic=dynamic).program
    torch.manual_seed(4)
    values = {
        name: torch.randint(-127, 127, old.shape).to(torch.int8) if old.dtype is torch.int8 else old * 1.5
        for name, old in quantised.state_dict.items()
        if old.dtype is not torch.int64
    }
    old, new = (lower(one, "xnnpack", options=REFIT).emit() for one in (quantised, with_values(quantised, values)))
    check_equal(refit(old, values), new)  # zero points are tables: they stay, and need not be given


def test_int4() -> None:
    from torchao.quantization import quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_api import Int8DynamicActivationIntxWeightConfig
    from torchao.utils import unwrap_tensor_subclass

    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    programs = []
    for seed in (1, 2):
        model = trained(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8, bias=False)), seed)
        quantize_(model, config)
        programs.append(export(unwrap_tensor_subclass(model), (torch.ones(2, 64),)))
    old, new = (lower(one, "xnnpack", options=REFIT).emit() for one in programs)
    check_equal(refit(old, programs[1].state_dict), new)
    wide = {name: value * 9 if value.dtype is torch.int8 else value for name, value in programs[1].state_dict.items()}
    with pytest.raises(InputError, match=r"outside of -8 to 7, which four bits hold"):
        refit(old, wide)


def test_random_programs() -> None:
    equal = 0
    for made in random_programs(0, 8):
        values: dict[str, torch.Tensor] = {}
        tied: dict[Any, torch.Tensor] = {}
        for program in made.methods.values():
            for name, old in program.state_dict.items():
                if not name.startswith("_lifted"):
                    new = torch.randn_like(old) if old.is_floating_point() else old
                    values.setdefault(name, tied.setdefault((old.data_ptr(), old.shape), new.detach()))
        changed = {name: with_values(program, values) for name, program in made.methods.items()}
        try:
            before, after = (lower(one, "xnnpack", options=REFIT).emit() for one in (made.methods, changed))
        except InputError:  # ExecuTorch does not emit some of them
            continue
        check_equal(refit(before, values), after)
        equal += 1
    assert equal > 4


def test_nan_and_missing_names() -> None:
    old, program, model = conv_nets()
    values = {**model.state_dict(), "head.bias": torch.full((4,), float("nan"))}
    new = lower(with_values(program, values), "xnnpack", options=REFIT).emit()
    check_equal(refit(old, values), new)
    only = {name: value for name, value in values.items() if name.startswith("head.")}
    new = lower(with_values(program, only), "xnnpack", options=REFIT).emit()
    check_equal(refit(old, only, strict=False), new)


def _put(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {**given, **{name.replace("__", "."): value for name, value in values.items()}}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unknown": (_put(head__bais=torch.ones(4)), r"state_dict has 'head.bais', expected .*Did you mean 'head.bias'"),
    "missing": (
        lambda given: {"head.bias": given["head.bias"]},
        r"state_dict lacks 'conv.bias', 'conv.weight'.* and 5 more",
    ),
    "shape": (_put(head__bias=torch.ones(5)), r"got torch.float32\[5\], expected torch.float32\[4\] as in the file"),
    "dtype": (_put(head__bias=torch.ones(4).half()), r"got torch.float16\[4\], expected torch.float32\[4\]"),
    "value": (_put(head__bias=[1.0] * 4), r"state_dict\['head.bias'\]: got a list, expected a tensor"),
    "infinite": (_put(head__bias=torch.full((4,), -float("inf"))), r"an element is infinite or larger than 65,536"),
    "mapping": (lambda given: list(given), r"state_dict: got list, expected a mapping from names to tensors"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    old, _, model = conv_nets()
    change, message = WRONG[wrong]
    with pytest.raises(InputError, match=message):
        refit(old, change(model.state_dict()))


def test_tied_and_folded_weights() -> None:
    old, _, model = decoders()
    values = model.state_dict()
    with pytest.raises(InputError, match=r"'embed.weight' and 'head.weight' are one tensor in the model"):
        refit(old, {**values, "head.weight": values["head.weight"] + 1})
    del values["head.weight"]
    assert len(refit(old, values).buffer) == len(old.buffer)
    with pytest.raises(InputError, match=r"'cache'.*its initial value is 0, which is not stored"):
        refit(old, {**values, "cache": torch.ones(1, 8, 32)})
    with pytest.raises(InputError, match=r"'sum' starts at 0 now, which a file does not store. Lower the model again"):
        refit(old, {**values, "sum": torch.zeros(32)})
    with pytest.raises(InputError, match=r"is missing: the file has what is computed from it and 'conv.weight'"):
        refit(conv_nets()[0], {"conv.weight": torch.ones(8, 3, 3, 3)}, strict=False)


class Scaled(nn.Module):
    def __init__(self, values: tuple[float, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + torch.tensor([1.0, 2.0, 3.0])


def test_constants_that_equal_a_weight_stay() -> None:
    given = (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)
    for emission in ({}, {"constant_methods": {"table": torch.tensor(given[0])}}):
        old, new = (lower(export(Scaled(one), (torch.ones(3),)), options=REFIT).emit(**emission) for one in given)
        check_equal(refit(old, {"weight": torch.tensor(given[1])}), new)
        check_equal(refit(new, {"weight": torch.tensor(given[0])}), old)


class Fresh(nn.Module):
    """Layers as they are initialised: equal normalisations, biases of 0, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.norms, self.convs = nn.ModuleList(nn.LayerNorm(8) for _ in range(2)), nn.ModuleList()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        for number, linear in enumerate(self.linears):
            nn.init.zeros_(linear.bias)
            self.convs.append(nn.Sequential(nn.Conv2d(1 + 3 * number, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for norm, linear in zip(self.norms, self.linears, strict=True):
            hidden = hidden + linear(norm(hidden))
        image = hidden.unsqueeze(1)
        for conv in self.convs:
            image = conv(image)
        return self.head(hidden + image.mean(1))


def disturbed(model: nn.Module) -> nn.Module:
    """Return a model with each weight changed a little."""
    torch.manual_seed(5)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for value in (*changed.parameters(), *changed.buffers()):
            if value.is_floating_point():
                value.mul_(1 + 0.01 * torch.rand_like(value)).add_(0.01 * torch.rand_like(value))
    return changed


@pytest.mark.parametrize("emission", [{}, {"external_weights": "weights"}])
def test_equal_tensors_may_differ_and_different_ones_be_equal(emission: dict[str, Any]) -> None:
    tokens = torch.tensor([[1, 2, 3, 4]])
    fresh = Fresh().eval()
    models = fresh, disturbed(fresh)
    old, new = (lower(export(model, (tokens,)), "xnnpack", options=REFIT).emit(**emission) for model in models)
    for before, after, model in ((old, new, models[1]), (new, old, models[0])):
        made = refit(before, model.state_dict())
        check_equal(made, after)
        loaded = load(bytes(made.buffer), data=[bytes(data) for data in made.data_files.values()])
        torch.testing.assert_close(loaded.run("forward", tokens)[0], model(tokens), rtol=1e-3, atol=1e-3)
    plain = LoweringOptions(refit=True, accelerate=False)  # ExecuTorch finds equal content by its hashes
    check_equal(lower(export(fresh, (tokens,)), "xnnpack", options=plain).emit(**emission), old)
    (tied,) = (row for row in old.stored if row.bytes == 16 * 8 * 4)  # the embedding and the head
    assert len(tied.also) == 1
    assert sum(row.bytes for row in old.stored) == sum(row.bytes for row in new.stored)


def test_a_fresh_mobilenet() -> None:
    model, inputs = build("mobilenet_v2")
    models = model, disturbed(model)
    old, new = (lower(export(one, inputs), "xnnpack", options=REFIT).emit() for one in models)
    check_equal(refit(old, models[1].state_dict()), new)


def test_weights_of_one_byte_are_bounded() -> None:
    assert is_bounded(torch.ones(3).to(torch.float8_e4m3fn))
    assert not is_bounded(torch.tensor([1e6, float("nan")]).to(torch.float8_e5m2))


def test_files_that_cannot_be_refitted() -> None:
    _, program, model = conv_nets()
    with pytest.raises(InputError, match=r"does not say how it is made of weights. Lower .*refit=True"):
        refit(lower(program, "xnnpack").emit(), model.state_dict())
    with pytest.raises(InputError, match=r"'head.bias'.*reference has it in forward.*in a form of its own"):
        refit(lower(program, "reference", options=REFIT).emit(), {"head.bias": torch.ones(4)}, strict=False)
    with pytest.raises(InputError, match=r"keep_originals: the lowering had refit=True"):
        lower(program, "xnnpack", options=REFIT).emit(keep_originals=True)
    damaged = bytearray(conv_nets()[0].buffer)
    damaged[len(damaged) // 2] ^= 1
    with pytest.raises(InputError, match=r"its digest differs"):
        refit(bytes(damaged), model.state_dict())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, model = decoders()
    old.save(tmp_path / "model.pte")
    torch.save(model.state_dict(), tmp_path / "tuned.pt")
    paths = [str(tmp_path / name) for name in ("model.pte", "tuned.pt", "tuned.pte")]
    assert main(["refit", *paths[:2], "-o", paths[2]]) == 0
    assert Path(paths[2]).read_bytes() == new.buffer
    torch.save({"embed.weight": Path("x")}, tmp_path / "tuned.pt")  # not data
    assert main(["refit", *paths[:2], "-o", paths[2]]) == 2
    assert "pickle" in capsys.readouterr().err
