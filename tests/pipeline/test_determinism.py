"""The same programs give the same bytes, whatever the seed of Python's hashes."""

from __future__ import annotations

import json
from typing import Any

import forked
import pytest
from folders import IMPORTED

OTHERS = ("0", *(pytest.param(seed, marks=pytest.mark.nightly) for seed in ("1", "42", "1234", "4294967295")))
"""The seeds that are compared with the one that the fork server happened to get."""

RUN = '''
import hashlib
import json

import torch
from delegate_support import Tied, named_data
from executorch.exir import to_edge
from lowering_support import TagPartitioner, by_operator, delegates
from random_programs import random_program

import exir_lowering
from exir_lowering.graphs import operator_name

torch.manual_seed(0)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return torch.tanh(self.down(torch.relu(self.up(x)))) + x


class State(torch.nn.Module):
    """Everything that has a name: constants of every kind, state, a branch, shared by many partitions."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4))
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("scale", torch.ones(4) * 3, persistent=False)
        self.constant = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x):
        y = torch.sin(x + self.weight) * self.scale + self.constant
        self.seen.add_(y)
        z = torch.cond(y.sum() > 0, lambda v: v * self.weight + 1, lambda v: v - self.scale, (y,))
        a, b = torch.split(torch.cat([z, self.weight, self.constant]), 6)
        return torch.cos(a) * b, self.seen * self.constant, z + self.scale


def zigzag(node):
    """Three tags that weave through each other, so that each has to be split."""
    name = operator_name(node)
    if not name.startswith("aten.") or name.startswith("aten.gt."):
        return None
    position = [n for n in node.graph.nodes if n.op == "call_function"].index(node)
    return ("left", "right", "middle")[position % 3]


def by_name(node):
    return f"tag_{node.name}" if operator_name(node).startswith("aten.") else None


mlp, state, x = Mlp().eval(), State().eval(), torch.randn(4)
methods = {
    "prefill": torch.export.export(mlp, (torch.randn(4, 8),)),
    "decode": torch.export.export(mlp, (torch.randn(1, 8),)),
}
edge = {"first": to_edge(torch.export.export(state, (x,))).exported_program()}
edge["second"] = edge["first"]
tanh = TagPartitioner(by_operator("aten.tanh.default", "aten.relu.default"))
backend = lambda tag: {"left": "echo", "right": "other"}.get(tag, "third")
backends = {name: exir_lowering.backends.echo.EchoBackend for name in ("other", "third")}
lowered = {
    "two backends": exir_lowering.lower(methods, {"prefill": [tanh, "xnnpack"], "decode": ["xnnpack"]}),
    "woven": exir_lowering.to_backend(edge, TagPartitioner(zigzag, backend), backends=backends),
    "one each": exir_lowering.to_backend(edge, TagPartitioner(by_name, "other"), backends=backends),
}
programs = {f"random {seed}": random_program(seed).methods for seed in (7, 9001)}
programs["tied"] = {"forward": torch.export.export(Tied(torch.randn(64, 64)).eval(), (torch.randn(2, 64),))}
lowered.update({name: exir_lowering.lower(methods, "reference") for name, methods in programs.items()})
found = {}
for name, methods in lowered.items():
    payloads = [d.processed_bytes for program in methods.values() for d in delegates(program)]
    for i, payload in enumerate(payloads):
        found[f"{name}, payload {i}"] = hashlib.sha256(payload).hexdigest()
    found[f"{name}, data"] = hashlib.sha256(repr(list(named_data(methods).items())).encode()).hexdigest()
    artifact = methods.emit()
    found[f"{name}, file"] = hashlib.sha256(artifact.buffer).hexdigest()
    found[f"{name}, graphs"] = hashlib.sha256(str([str(p) for p in methods.values()]).encode()).hexdigest()
    print(f"{name}: {len(payloads)} payloads")
print(json.dumps({"hash": hash("exir"), "found": found}))
'''
"""Prints a digest of each payload, file and program, and a hash that shows that the seed took effect."""


def _run(seed: str | None = None) -> dict[str, Any]:
    environment = {"PYTHONPATH": IMPORTED, "OMP_NUM_THREADS": "1"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    run = forked.run("import exir_lowering.backends.echo\n" + RUN, env=environment, fresh=seed is not None)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return _run()


@pytest.mark.parametrize("seed", OTHERS)
def test_same_bytes_under_another_hash_seed(seed: str, expected: dict[str, Any]) -> None:
    got = _run(seed)
    assert got["hash"] != expected["hash"]
    assert list(got["found"]) == list(expected["found"])
    different = [name for name in expected["found"] if got["found"][name] != expected["found"][name]]
    assert not different
