"""Files that earlier revisions made still load, and give what they gave: `tests/pte/record_frozen.py` made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from exir_lowering import LoweredModule, inspect, load

FOLDER = Path(__file__).with_name("frozen")
CASES = json.loads((FOLDER / "cases.json").read_text())


def tensor(plain: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(plain["values"], dtype=getattr(torch, plain["dtype"])).view(plain["shape"])


@pytest.mark.parametrize("name", CASES)
def test_a_frozen_file_gives_what_it_gave(name: str) -> None:
    path = FOLDER / f"{name}.pte"
    data = [found] if (found := path.with_suffix(".ptd")).exists() else []
    module = LoweredModule.load(path, data=data or None) if CASES[name]["kind"] == "module" else None
    program = load(path, data=data, verify="full")
    for call in CASES[name]["calls"]:
        inputs = list(map(tensor, call["inputs"]))
        got = module.method(call["method"])(*inputs) if module is not None else program.run(call["method"], *inputs)
        results = [one for one in pytree.tree_leaves(got) if isinstance(one, torch.Tensor)]
        torch.testing.assert_close(results, list(map(tensor, call["results"])), rtol=1e-3, atol=1e-3)
    assert inspect(path).methods


def test_a_frozen_module_has_its_attributes() -> None:
    vocabulary = LoweredModule.load(FOLDER / "module.pte").vocabulary
    assert vocabulary["a"][:3] == [1, 2.5, None] and vocabulary["a"][3].tolist() == [0, 1, 2]
