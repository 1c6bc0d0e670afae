"""`language_model` and `exir-lower lower --llm`: files that generate the tokens that the model generates in PyTorch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import (
    ARCHITECTURES,
    TEXT,
    generate,
    generate_eager,
    generate_runner,
    make_model,
    make_tokenizer,
    quantised,
)
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

import exir_lowering
from exir_lowering import InputError, cli
from exir_lowering.cli.llm import copy_tokenizer

CONTEXT, COUNT = 64, 16
CASES = [*((name, "8da4w") for name in ARCHITECTURES), ("Gemma3", None), ("Qwen3", "8da8w")]


@pytest.mark.parametrize(("architecture", "quantise"), CASES)
def test_greedy_tokens_are_those_of_the_quantised_model(
    architecture: str, quantise: str | None, tmp_path: Path
) -> None:
    model, path = make_model(architecture), tmp_path / "llm.pte"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    artifact = exir_lowering.language_model(model, CONTEXT, quantise=quantise).emit()
    artifact.save(path)
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    expected = generate_eager(quantised(model, quantise), COUNT)
    assert len(set(expected)) > 3, "a model that repeats one token shows nothing"
    program = exir_lowering.load(path)
    for _ in range(2):  # the second time, the cache is full of other tokens
        assert generate(lambda new, at: program.run("forward", new, torch.tensor([at]))[0], COUNT) == expected
    for part, at in zip(torch.tensor([make_tokenizer().encode(TEXT).ids]).split(9, 1), (0, 9, 18), strict=True):
        (logits,) = program.run("forward", part, torch.tensor([at]))
    assert int(logits.argmax()) == expected[0], "a prompt in parts, which go beyond a window"
    assert generate_runner(path, COUNT) == make_tokenizer().decode(expected)
    run = open_transformers_runner(path)
    assert generate(lambda new, at: run(input_ids=new, cache_position=torch.tensor([at])), COUNT) == expected
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    if model.config.tie_word_embeddings:
        (tied,) = [*quantised(model, quantise).get_input_embeddings().parameters()]
        assert artifact.buffer.count(bytes(getattr(tied, "qdata", tied).numpy().tobytes())) == 1


def open_transformers_runner(path: Path) -> Any:
    """Return what transformers calls a file of its exporter with."""
    from executorch.runtime import Runtime
    from torch.utils import _pytree
    from transformers.exporters.metadata import ExportMetadata
    from transformers.exporters.runners import ExecutorchModelRunner

    inputs = {"input_ids": torch.zeros(1, 1), "cache_position": torch.zeros(1)}
    specs = (_pytree.treespec_dumps(_pytree.tree_flatten(value)[1]) for value in (((), inputs), inputs["input_ids"]))
    metadata = ExportMetadata(export_dtype="float32", in_spec=next(specs), out_spec=next(specs))
    return ExecutorchModelRunner(Runtime.get().load_program(path), metadata)


def test_a_folder_becomes_a_file_with_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, folder = make_model("Llama", 6, eos_token_id=[2, 3], num_hidden_layers=1), tmp_path / "model"
    target, tokens = tmp_path / "out" / "llm.pte", generate_eager(quantised(model, "8da4w"), COUNT)
    target.parent.mkdir()
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    command = ["lower", "--llm", str(folder), "-o", str(target), "--max-context", "64", "--quantise", "8da4w"]
    assert cli.main([*command, "--no-cache"]) == 0
    assert "get_eos_ids=[2, 3]" in capsys.readouterr().out
    end = next((number for number, token in enumerate(tokens) if token in (2, 3)), COUNT)
    assert end > 3 and generate_runner(target, COUNT).startswith(make_tokenizer().decode(tokens[:end]))
    copy_tokenizer(tmp_path, target)
    assert "has no tokenizer.json" in capsys.readouterr().err
    (folder / "tokenizer.json").write_text("{}")
    assert cli.main(command) == 2 and "another tokenizer.json" in capsys.readouterr().err


COMMANDS = [
    (["MODEL", "--quantise", "8da4w"], "expected --llm"),
    (["--llm", "NONE"], "no folder"),
    (["--llm", "EMPTY"], "config.json"),
    (["--llm", "EMPTY", "--quantise", "4"], "8da4w"),
    (["--llm", "MODEL", "--max-context", "129"], "--max-context: got 129, expected a number of tokens, at most 128"),
    (["--llm", "first=MODEL"], "expected the folder of one transformers model"),
]


@pytest.mark.parametrize(("given", "text"), COMMANDS)
def test_what_the_command_cannot_do_is_an_error(
    given: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model("Llama", num_hidden_layers=1).save_pretrained(tmp_path / "MODEL")
    (tmp_path / "EMPTY").mkdir()
    paths = [re.sub(r"([A-Z]{4,})", lambda found: str(tmp_path / found[0]), one) for one in given]
    try:
        status = cli.main(["lower", *paths, "-o", str(tmp_path / "llm.pte"), "--no-cache"])
    except SystemExit as error:  # argparse's
        status = error.code
    assert status == 2 and text in capsys.readouterr().err and not (tmp_path / "llm.pte").exists()


def bert() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=8))


def mamba() -> Any:
    return MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, state_size=4))


def gemma2() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 1}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, num_key_value_heads=1, head_dim=16, vocab_size=8))


def bloom() -> Any:
    return BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=16, n_layer=1, n_head=1))


MISTAKES = [
    (lambda: torch.nn.Linear(2, 2), {}, "got a Linear, expected a causal language model"),
    (bert, {}, "got a BertForMaskedLM, expected a causal language model"),
    (lambda: make_model("Llama"), {"quantise": "8da4"}, "Did you mean '8da4w'"),
    (lambda: make_model("Llama"), {"max_context": 129}, "at most 128, the positions of LlamaForCausalLM"),
    (lambda: make_model("Llama"), {"max_context": 1}, "got 1, expected a number of tokens"),
    (lambda: make_model("Llama"), {"max_context": True}, "got True, expected a number of tokens"),
    (gemma2, {}, "has a soft cap"),
    (bloom, {}, "BloomForCausalLM"),
    (mamba, {}, "MambaForCausalLM has layers of the kind linear_attention"),
]


@pytest.mark.parametrize(("make", "options", "text"), MISTAKES)
def test_what_it_cannot_do_is_an_error(make: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=r"^language_model: ") as caught:
        exir_lowering.language_model(make(), **{"max_context": 32, **options})
    assert text in str(caught.value)
