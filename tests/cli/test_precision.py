"""`quantize(precision=...)`: by name, and 8da4w with the numbers of torchao's `quantize_`."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim, ExportedProgram, export, save
from torch.nn import functional as F
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

from exir_lowering import InputError, cli, load, lower, quantize, verify

pytestmark = pytest.mark.filterwarnings("ignore")

SCALES_IN_BF16 = 0.03
"""XNNPACK keeps the scales of groups of weights with 8 bits; outputs here are up to 3."""


class Block(torch.nn.Module):
    """Attention that also sees a summary of earlier calls, and an MLP whose hidden width is no multiple of 32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.out = torch.nn.LayerNorm(64), torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)
        self.up, self.down = torch.nn.Linear(64, 72, bias=False), torch.nn.Linear(72, 64)
        self.register_buffer("seen", torch.zeros(1, 4, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x) + self.seen[:, :1]
        heads = self.qkv(h).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        self.seen[:, :1] += x.mean((0, 1))  # a part of it
        y: torch.Tensor = x + self.down(F.gelu(self.up(x)))
        return y


def by_torchao(model: torch.nn.Module, *kept: str) -> torch.nn.Module:
    model = copy.deepcopy(model)
    for width, config in (
        (0, Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32))),
        (1, Int8DynamicActivationIntxWeightConfig(torch.int8, PerAxis(0))),
    ):
        quantize_(
            model,
            config,
            lambda module, name, width=width: (
                isinstance(module, torch.nn.Linear) and bool(module.in_features % 32) == width and name not in kept
            ),
        )
    return model


@pytest.fixture
def block() -> tuple[Block, ExportedProgram]:
    model = Block().eval()
    shapes = {"x": {0: Dim("batch", min=1, max=4)}}
    return model, export(copy.deepcopy(model), (torch.randn(2, 5, 64),), dynamic_shapes=shapes)


def calls() -> list[tuple[torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(size, 5, 64),) for size in (2, 4, 3)]


@pytest.mark.parametrize("keep", [(), ("qkv",)], ids=["all", "keep"])
@torch.no_grad()
def test_8da4w_has_the_numbers_of_torchao(block: tuple[Block, ExportedProgram], keep: tuple[str, ...]) -> None:
    model, program = block
    found = quantize(program, precision="8da4w", keep=keep, check=calls())
    assert {each.path for each in found.errors.layers} == {"qkv", "out", "up", "down"} - {*keep} and found.kept == keep
    saved = {each.path: each.extra_bytes for each in found.errors.layers}
    assert saved["out"] == 64 * 64 * 7 // 2 and saved["down"] == 72 * 64 * 3
    assert found.errors.outputs[0].sqnr > 15 and not found.errors.on_calibration
    lowered = lower(found.program, "xnnpack")
    assert not [node for node in lowered.report.methods[0].host if "linear" in node.operator or "mm" in node.operator]
    artifact = lowered.emit()
    assert verify(artifact, found.program).ok
    assert not program.state_dict["seen"].any() and not found.program.state_dict["seen"].any()
    eager, quantised, loaded = by_torchao(model, *keep), found.program.module(), load(artifact.buffer)
    for inputs in calls():
        expected = eager(*inputs)  # it has the state of the earlier calls, as the others have
        torch.testing.assert_close(quantised(*inputs), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(loaded.run("forward", *inputs)[0], expected, rtol=0, atol=SCALES_IN_BF16)


CONFIG = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


@torch.no_grad()
def test_two_methods_of_a_language_model_share_a_cache_and_a_tied_embedding() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=True)).eval()
    model.generation_config.update(cache_implementation="static")

    def cached(model: Any) -> torch.nn.Module:
        made: torch.nn.Module = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=24).model
        return made

    exported, start = cached(model), torch.tensor([0])
    prompt, length = torch.tensor([[5, 17, 80, 33]]), {"input_ids": {1: Dim("length", max=23)}, "cache_position": None}
    given = {"input_ids": prompt, "cache_position": start}
    programs = {
        "forward": export(exported, (), given, dynamic_shapes=length, strict=True),
        "step": export(exported, (), {**given, "input_ids": prompt[:, :1]}, strict=True),
    }
    found = {name: quantize(program, precision="8da4w") for name, program in programs.items()}
    assert all(one.kept == ("model.lm_head",) and len(one.errors.layers) == 7 for one in found.values())
    buffer = lower({name: one.program for name, one in found.items()}, "xnnpack").emit(share_state=True).buffer
    assert bytes(buffer).count(model.lm_head.weight.numpy().tobytes()) == 1
    eager, program = cached(by_torchao(model, "lm_head")), load(buffer)
    pieces = [prompt, *torch.tensor([[7], [8], [90]]).unsqueeze(1)]
    for number, tokens in enumerate(pieces):
        at = torch.tensor([0 if not number else prompt.shape[1] + number - 1])
        expected = eager(input_ids=tokens, cache_position=at)
        (got,) = program.run("step" if number else "forward", tokens, at)
        torch.testing.assert_close(got, expected, rtol=0, atol=SCALES_IN_BF16)


class Reused(torch.nn.Module):
    """A layer that is called twice, one whose weight is read too, one without bias, and a weight without a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.read = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        self.alone = torch.nn.Linear(32, 32, bias=False)
        self.weight = torch.nn.Parameter(torch.randn(8, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = F.linear(self.alone(self.read(self.twice(self.twice(x)))), self.weight)
        return y + self.read.weight.sum()


def test_a_weight_is_quantised_once_or_not_at_all() -> None:
    program = export(Reused(), (torch.randn(3, 32),))
    found = quantize(program, precision="8da4w", check=[(torch.randn(3, 32),)])
    assert sorted(each.path for each in found.errors.layers) == ["", "alone", "twice", "twice"]
    assert found.kept == ("read",) and "1 module kept in float" in str(found)
    sizes = {name: value.dtype for name, value in found.program.state_dict.items() if value.ndim == 2}
    assert sum(dtype == torch.float32 and name == "read.weight" for name, dtype in sizes.items()) == 1
    assert not {"twice.weight", "alone.weight", "weight"} & sizes.keys()
    assert verify(lower(found.program, "xnnpack").emit(), found.program).ok


def test_names_and_what_they_say(block: tuple[Block, ExportedProgram]) -> None:
    _, program = block
    by_name, by_flag = (quantize(program, **options) for options in ({"precision": "8da8w"}, {"dynamic": True}))
    assert str(by_name.program.graph) == str(by_flag.program.graph) and by_name.recipe == by_flag.recipe
    static = quantize(program, calls(), precision="int8")
    assert static.recipe == quantize(program, calls()).recipe == "xnnpack-int8, static, per channel"
    assert quantize(program, precision="8da4w", dynamic=True).recipe == "8da4w, dynamic, per group of 32"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "8da4W"}, r"precision: none is called '8da4W'\. Did you mean '8da4w'\?"),
        ({"precision": "bf16"}, r"Expected int8, 8da8w, 8da4w; or call model\.half\(\) or model\.bfloat16\(\) before"),
        ({"precision": "int8", "dynamic": True}, "got 'int8' and dynamic=True, expected one of these"),
        ({"precision": "8da4w", "per_channel": False}, "got '8da4w' and per_channel=False, expected one of these"),
        ({"precision": "int8", "recipe": object()}, "got 'int8' and a quantizer in recipe=, expected one of these"),
        ({"precision": "int8"}, "calibration: got None, but static quantisation takes"),
        ({"precision": "8da4w", "keep": ["*"]}, "8da4w, dynamic, per group of 32 finds nothing to quantise"),
    ],
)
def test_mistakes(block: tuple[Block, ExportedProgram], options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        quantize(block[1], **options)


def test_on_the_command_line(
    block: tuple[Block, ExportedProgram],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    save(block[1], "block.pt2")
    torch.save(calls(), "inputs.pt")
    command = ["quantize", "block.pt2", "--precision", "8da4w", "--check", "inputs.pt", "--json"]
    assert cli.main([*command, "-o", "q.pt2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recipe"].startswith("8da4w") and len(found["layers"]) == 4 and found["outputs"][0]["sqnr"] > 15
    assert cli.main(["lower", "q.pt2", "-p", "xnnpack", "-o", "q.pte"]) == 0
    assert cli.main(["verify", "q.pte", "q.pt2"]) == 0
    capsys.readouterr()
    assert cli.main(["quantize", "block.pt2", "--precision", "8da4", "-o", "no.pt2"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "--precision: none is called '8da4'. Did you mean '8da4w'?" in error and not Path("no.pt2").exists()
