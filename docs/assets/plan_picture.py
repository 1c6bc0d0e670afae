"""The picture in the README, of the plan of a small BERT: `python docs/assets/plan_picture.py docs/images/plan.svg`.

It needs transformers (the extra `test`), and downloads nothing.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

import exir_lowering


def main(target: Path) -> None:
    """Plan the model, and take the picture from the page, with its style."""
    config = BertConfig(hidden_size=256, num_hidden_layers=1, num_attention_heads=4, intermediate_size=1024)
    inputs = {"input_ids": torch.ones(1, 128, dtype=torch.long), "attention_mask": torch.ones(1, 128, dtype=torch.long)}
    program = torch.export.export(BertModel(config).eval(), (), inputs)
    page = exir_lowering.plan(program, "xnnpack").to_html()
    style = page[page.index("<style>") : page.index("</style>") + len("</style>")]
    drawing = page[page.index('<svg class="picture"') :].partition("</svg>")[0] + "</svg>\n"
    drawing = re.sub(r"</?a\b[^>]*>", "", drawing)
    drawing = drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    target.write_text(drawing.replace(">", f">{style}", 1), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
