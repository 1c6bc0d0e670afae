"""`language_model` and `exir-lower lower --llm`: files that generate the tokens that the model generates in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import (
    ARCHITECTURES,
    generate,
    generate_eager,
    generate_runner,
    make_model,
    make_tokenizer,
    quantised,
)
from transformers import BertConfig, BertForMaskedLM, Gemma2Config, Gemma2ForCausalLM, MambaConfig, MambaForCausalLM

import exir_lowering
from exir_lowering import InputError, cli

CONTEXT, COUNT = 64, 24
CASES = [*((name, "8da4w") for name in ARCHITECTURES), ("Llama", None), ("Gemma3", None), ("Qwen3", "8da8w")]


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
    assert generate_runner(path, COUNT) == make_tokenizer().decode(expected)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    if model.config.tie_word_embeddings:
        (tied,) = [*quantised(model, quantise).get_input_embeddings().parameters()]
        assert artifact.buffer.count(bytes(getattr(tied, "qdata", tied).numpy().tobytes())) == 1


def test_transformers_runner_generates_the_same_tokens(tmp_path: Path) -> None:
    from executorch.runtime import Runtime
    from torch.utils import _pytree
    from transformers.exporters.metadata import ExportMetadata
    from transformers.exporters.runners import ExecutorchModelRunner

    model, path = make_model("Qwen3"), tmp_path / "llm.pte"
    exir_lowering.language_model(model, CONTEXT, quantise="8da4w").emit().save(path)
    inputs = {"input_ids": torch.zeros(1, 1), "cache_position": torch.zeros(1)}
    specs = (_pytree.treespec_dumps(_pytree.tree_flatten(value)[1]) for value in (((), inputs), inputs["input_ids"]))
    metadata = ExportMetadata(export_dtype="float32", in_spec=next(specs), out_spec=next(specs))
    run = ExecutorchModelRunner(Runtime.get().load_program(path), metadata)
    got = generate(lambda new, at: run(input_ids=new, cache_position=torch.tensor([at])), COUNT)
    assert got == generate_eager(quantised(model, "8da4w"), COUNT)


def test_a_folder_becomes_a_file_with_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, folder, target = make_model("Llama", eos_token_id=[2, 3]), tmp_path / "model", tmp_path / "out" / "llm.pte"
    model.save_pretrained(folder)
    target.parent.mkdir()
    command = ["lower", "--llm", str(folder), "-o", str(target), "--max-context", "64", "--quantise", "8da4w"]
    assert cli.main([*command, "--no-cache", "--constant", "get_max_seq_len=32"]) == 0
    assert "has no tokenizer.json" in capsys.readouterr().err
    make_tokenizer().save(str(folder / "tokenizer.json"))
    assert cli.main([*command, "--no-cache"]) == 0
    assert "get_eos_ids=[2, 3]" in capsys.readouterr().out
    tokens = generate_eager(quantised(model, "8da4w"), COUNT)
    end = next((number for number, token in enumerate(tokens) if token in (2, 3)), COUNT)
    assert generate_runner(target, COUNT).startswith(make_tokenizer().decode(tokens[:end]))
    (folder / "tokenizer.json").write_text("{}")
    assert cli.main(command) == 2 and "another tokenizer.json" in capsys.readouterr().err
    assert cli.main(["lower", str(folder), "-o", str(target), "--quantise", "8da4w"]) == 2
    assert "expected --llm" in capsys.readouterr().err
    assert cli.main(["lower", "--llm", str(tmp_path / "none"), "-o", str(target)]) == 2
    assert "no folder" in capsys.readouterr().err


def bert() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=8))


def mamba() -> Any:
    return MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, state_size=4))


def gemma2() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 1}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, num_key_value_heads=1, head_dim=16, vocab_size=8))


MISTAKES = [
    (lambda: torch.nn.Linear(2, 2), {}, "got a Linear, expected a causal language model"),
    (bert, {}, "got a BertForMaskedLM, expected a causal language model"),
    (lambda: make_model("Llama"), {"quantise": "8da4"}, "did you mean '8da4w'"),
    (lambda: make_model("Llama"), {"max_context": 129}, "at most 128, the positions of LlamaForCausalLM"),
    (lambda: make_model("Llama"), {"max_context": 1}, "got 1, expected a number of tokens"),
    (gemma2, {}, "has a soft cap"),
    (mamba, {}, "mamba"),
]


@pytest.mark.parametrize(("make", "options", "text"), MISTAKES)
def test_what_it_cannot_do_is_an_error(make: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=r"^language_model: ") as caught:
        exir_lowering.language_model(make(), **{"max_context": 32, **options})
    assert text in str(caught.value)
