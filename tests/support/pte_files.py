"""Files that this package and ExecuTorch alone make of small models, for what reads files; each is made once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import ExecutorchBackendConfig, to_edge, to_edge_transform_and_lower
from torch import nn
from torch.export import Dim, ExportedProgram, export

import exir_lowering


class Net(nn.Module):
    """Two delegates with a host operator between them; one of the layers is used by both methods of a file."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, image):
        return {"logits": self.head(self.linear(torch.relu(self.conv(image)).mean((2, 3))).cumsum(1))}


class Head(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.head = net.head

    def forward(self, hidden):
        return self.head(hidden)


class Keep(nn.Module):
    """State that starts with zeros, and state that does not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("last", torch.ones(3))

    def forward(self, x):
        y = x + self.total
        self.total.add_(x)
        self.last.copy_(y * self.last)
        return self.total * 2, y


class Store(nn.Module):
    def __init__(self, memory=None):
        super().__init__()
        self.register_buffer("memory", torch.zeros(4, 8) if memory is None else memory)

    def forward(self, x, n: int):
        self.memory.add_(x)
        return self.memory.sum() * n


class Read(Store):
    def forward(self, x):
        return self.memory + x


class Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(2))

    def forward(self):
        self.n.add_(1)
        return self.n.clone()


class Write(nn.Module):
    def forward(self, x, y):
        x.add_(y)
        return x * 2, y


@dataclass(frozen=True)
class Made:
    """A `.pte` file, and the data files that it needs."""

    pte: bytes
    data: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def given(self) -> list[bytes] | None:
        """The data files as `load` and `inspect` take them."""
        return list(self.data.values()) or None


@cache
def programs() -> dict[str, ExportedProgram]:
    torch.manual_seed(0)
    with torch.no_grad():
        net, store = Net().eval(), Store()
        shapes = {"image": {0: Dim("batch", min=2, max=6)}}
        return {
            "net": export(net, (torch.randn(2, 3, 8, 8),), dynamic_shapes=shapes),
            "head": export(Head(net), (torch.randn(1, 6),)),
            "keep": export(Keep(), (torch.ones(3),)),
            "write": export(store, (torch.ones(4, 8), 3)),
            "read": export(Read(store.memory), (torch.ones(4, 8),)),
            "count": export(Count(), ()),
            "update": export(Write(), (torch.ones(3), torch.ones(3))),
        }


def _ours(*names: str, partitioner: Any = None, **emission: Any) -> Callable[[], Made]:
    def make() -> Made:
        chosen = {"forward" if len(names) == 1 else name: programs()[name] for name in names}
        artifact = exir_lowering.lower(chosen, partitioner).emit(**emission)
        return Made(artifact.buffer, artifact.data_files)

    return make


def _theirs(*names: str, delegated: bool = False, **config: Any) -> Callable[[], Made]:
    def make() -> Made:
        # It changes the programs that it is given.
        chosen = {"forward" if len(names) == 1 else name: copy.deepcopy(programs()[name]) for name in names}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            edge = to_edge_transform_and_lower(chosen, partitioner=[XnnpackPartitioner()]) if delegated else None
            manager = (edge or to_edge(chosen)).to_executorch(ExecutorchBackendConfig(**config))
        return Made(manager.buffer, {name: bytes(cord) for name, cord in (manager._tensor_data or {}).items()})

    return make


OURS: Mapping[str, Callable[[], Made]] = {
    "delegates": _ours("net", "head", partitioner="xnnpack"),
    "host": _ours("net"),
    "state": _ours("keep"),
    "shared state": _ours("write", "read"),
    "no input": _ours("count"),
    "written input": _ours("update"),
    "data file": _ours("net", "head", partitioner="xnnpack", external_weights="weights"),
    "reference": _ours("net", partitioner="reference", keep_originals=True),
}
THEIRS: Mapping[str, Callable[[], Made]] = {
    "theirs delegates": _theirs("net", "head", delegated=True),
    "theirs inline": _theirs("net", delegated=True, extract_delegate_segments=False),
    "theirs state": _theirs("keep"),
    "theirs named state": _theirs("keep", emit_mutable_buffer_names=True),
    "theirs data file": _theirs("net", external_constants=True),
    "theirs no input": _theirs("count"),
}
FILES = (*OURS, *THEIRS)


@cache
def made(name: str) -> Made:
    return (OURS.get(name) or THEIRS[name])()
