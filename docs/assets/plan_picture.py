"""The picture in the README, of BERT-mini's plan: `python docs/assets/plan_picture.py docs/images/plan.png`.

It needs transformers (the extra `test`), chromium and chromedriver, and downloads nothing.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

import exir_lowering

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
from browser import browser

WIDTH = 900
"""About the width of a README on GitHub."""

SHORTEN = """
const findings = [...document.querySelectorAll("section.findings")];
findings.filter((one) => !one.querySelector("h3").textContent.startsWith("Largest")).forEach((one) => one.remove());
const pictures = [...document.querySelectorAll(".picture")];
return Math.max(...pictures.map((one) => one.getBoundingClientRect().bottom));
"""
"""Leaves the summary, the largest costs and the partitions, and returns where the drawing ends."""


def main(target: Path) -> None:
    """Plan the model, and take a picture of the page."""
    config = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    inputs = {"input_ids": torch.ones(1, 128, dtype=torch.long), "attention_mask": torch.ones(1, 128, dtype=torch.long)}
    program = torch.export.export(BertModel(config).eval(), (), inputs)
    with tempfile.TemporaryDirectory() as folder, browser(WIDTH) as driver:
        page = Path(folder) / "plan.html"
        page.write_text(exir_lowering.plan(program, "xnnpack").to_html(), encoding="utf-8")
        driver.get(page.as_uri())
        driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": driver.execute_script(SHORTEN), "scale": 1}
        options = {"format": "png", "clip": clip, "captureBeyondViewport": True}
        target.write_bytes(base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", options)["data"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
