"""What a file for every device costs: `families.py`, two tables in Markdown.

Real models with random weights: a file of variants beside the files of each variant alone, and a file of shape buckets
beside the file of the largest one alone and of the dynamic program.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, export

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import models

from exir_lowering import Artifact, buckets, lower
from exir_lowering.partitioners import SupportPartitioner, ops

VARIANTS: dict[str, Any] = {
    "npu": [SupportPartitioner({"reference": ops("aten.gelu.default", "aten.relu.default")}), "xnnpack"],
    "xnnpack": "xnnpack",
    "host": None,
}
SIZES = [16, 64, 256]


class MiniLM(torch.nn.Module):
    """BERT of the sizes of all-MiniLM-L6-v2."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        self.bert = BertModel(BertConfig(**sizes)).eval()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the last hidden state."""
        return self.bert(input_ids=ids, attention_mask=mask).last_hidden_state


def _payloads(artifact: Artifact) -> int:
    return sum(row.bytes for row in artifact.stored if row.kind == "payload")


def _variants(name: str, program: Any) -> None:
    alone = {variant: lower(program, partitioner).emit() for variant, partitioner in VARIANTS.items()}
    together = lower(program, variants=VARIANTS).emit()
    size, largest = len(together.buffer), max(len(artifact.buffer) for artifact in alone.values())
    sizes = " | ".join(f"{len(artifact.buffer):,}" for artifact in alone.values())
    ratios = f"{size / largest:.4f} | {(size - _payloads(together)) / largest:.4f}"
    print(f"| {name} | {sizes} | {size:,} | {ratios} |")


def _buckets(program: Any) -> None:
    methods = buckets(program, {"seq": SIZES}, pad={"ids": 0, "mask": 0})
    files = {
        "dynamic": lower(program, "xnnpack"),
        "largest bucket": lower({"forward": methods[f"forward@seq={SIZES[-1]}"]}, "xnnpack"),
        "buckets": lower(methods, "xnnpack"),
    }
    for name, lowered in files.items():
        artifact = lowered.emit()
        arenas = " / ".join(f"{method.memory.bytes:,}" for method in artifact.report.methods)
        shares = [one.delegated / (one.delegated + len(one.host)) for one in lowered.report.methods]
        print(f"| {name} | {len(artifact.buffer):,} | {arenas} | {min(shares):.1%} |")


def main() -> None:
    """Print both tables."""
    warnings.simplefilter("ignore")
    ones = torch.ones(1, 32, dtype=torch.long)
    seq = Dim("seq", min=1, max=256)
    minilm = MiniLM()
    print(f"| model | {' | '.join(VARIANTS)} | together | of the largest | without payloads |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    _variants("MiniLM", export(minilm, (ones, ones)))
    _variants("MobileNetV2", export(*models.build("mobilenet_v2")))
    print("\n| MiniLM | bytes | planned memory of each method | delegated |")
    print("|---|---:|---:|---:|")
    shapes = {"ids": {1: seq}, "mask": {1: seq}}
    _buckets(export(minilm, (ones, ones), dynamic_shapes=shapes, strict=False))


if __name__ == "__main__":
    main()
