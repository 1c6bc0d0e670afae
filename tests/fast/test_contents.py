"""Equal contents are found by comparing them: files are those that hashing makes, and methods share what is equal."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.emit import _emitter
from torch import nn
from torch.export import export

from exir_lowering import graphs, lower
from exir_lowering._upstream.delegates import named_data_contents


class Net(nn.Module):
    """Constants of the host that are equal, a delegate's that two layers have in common, and state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.first, self.second = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(self.embed.weight)
            self.second.weight.copy_(self.embed.weight)
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, tokens: torch.Tensor) -> Any:
        self.seen.add_(1)
        hidden = self.embed(tokens)
        return self.first(hidden) + self.second(torch.sin(hidden)), self.seen + 1


@pytest.fixture(scope="module")
def programs() -> Any:
    return {f"m{count}": export(Net().eval(), (torch.arange(count)[None],)) for count in (2, 5)}


def test_the_delegates_of_methods_have_one_copy(programs: Any) -> None:
    lowered = lower(programs, "xnnpack")
    found: dict[str, set[int]] = {}
    for program in lowered.values():
        for _, module, name in graphs.delegates(program.graph_module):
            for key, content in named_data_contents(getattr(module, name)).items():
                found.setdefault(key, set()).add(id(content))
    assert found and all(len(each) == 1 for each in found.values())


def test_other_code_is_left_to_hash(programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, asked = lower(programs, "xnnpack").emit().buffer, []
    finding = NamedDataStore._get_buffer_sha256

    def changed(self: Any, index: int) -> Any:
        asked.append(finding(self, index))
        return asked[-1]

    monkeypatch.setattr(NamedDataStore, "_get_buffer_sha256", changed)
    assert lower(programs, "xnnpack").emit().buffer == expected
    assert asked and all(len(digest) == 32 for digest in asked)


def test_nothing_is_left_behind(programs: Any) -> None:
    before = dict(vars(NamedDataStore))
    lower(programs, "xnnpack").emit()
    assert dict(vars(NamedDataStore)) == before and _emitter.hashlib is hashlib
