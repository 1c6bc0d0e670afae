"""What backends are handed over, whole, as the echo backend writes it down: compared with the files in golden/.

`EXIR_LOWERING_ACCEPT=1 pytest tests/steps/test_handover.py` writes the files anew; read the difference before you
commit it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from functorch.experimental.control_flow import map as torch_map
from lowering_support import TagPartitioner, by_operator, delegates, edge_program
from torch.export import Dim

import exir_lowering
from exir_lowering import CompileSpec, LoweredMethods
from exir_lowering.graphs import operator_name

GOLDEN = Path(__file__).parent / "golden"


def two_methods() -> LoweredMethods:
    """Two methods share a weight; it is read by two partitions, in a list and by the host."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))
            self.tied = self.weight
            self.constant = torch.full((4,), 2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = torch.cat([x + self.weight, self.constant, self.tied])
            return torch.sin(a) + torch.cat([self.constant, self.weight, x]) * 2

    model = Model()
    programs = {"prefill": edge_program(model, (torch.ones(4),)), "decode": edge_program(model, (torch.ones(4),))}
    tags = by_operator("aten.add.Tensor", "aten.cat.default", "aten.mul.Tensor")
    partitioner = TagPartitioner(tags, compile_specs=[CompileSpec("mode", b"fast")])
    return exir_lowering.to_backend(programs, partitioner)


def two_partitioners() -> LoweredMethods:
    """The second partitioner claims everything, and gets what the first one left."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(x)) + torch.max(x, dim=-1).values

    program = edge_program(Model(), (torch.ones(4, 4),))
    first = TagPartitioner(by_operator("aten.permute_copy.default", "aten.addmm.default", tag="matmul"))
    return exir_lowering.to_backend({"forward": program}, {"forward": [first, TagPartitioner()]})


def state() -> LoweredMethods:
    """A buffer that a partition reads and writes moves; one that the host reads too stays."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("own", torch.zeros(4))
            self.register_buffer("shared", torch.zeros(4), persistent=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            before = torch.sin(self.shared)
            self.shared.mul_(x)  # first: it reads in the order of the graph, which torch 2.14 keeps
            self.own.add_(x)
            return self.own * x, before

    program = edge_program(Model(), (torch.ones(4),))
    return exir_lowering.to_backend(program, TagPartitioner(by_operator("aten.add.Tensor", "aten.mul.Tensor")))


def branches() -> LoweredMethods:
    """The weights of a branch and of a map body belong to the partitions in them."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.scale = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.cond(x.sum() > 0, lambda v: self.linear(v), lambda v: v * self.scale, (x,))
            return torch_map(lambda row, scale: row * scale, y, self.scale)

    higher = ("cond", "map_impl", "sum", "gt")
    program = edge_program(Model(), (torch.ones(3, 4),))
    tags = TagPartitioner(lambda node: None if any(name in operator_name(node) for name in higher) else "t")
    return exir_lowering.to_backend(program, tags)


def dynamic() -> LoweredMethods:
    """Sizes cross the boundary as SymInt inputs."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x).view(x.shape[0] * 2, -1) * 2

    program = edge_program(Model(), (torch.ones(4, 6),), dynamic_shapes={"x": {0: Dim("batch", min=2, max=8)}})
    claimed = ("aten.relu.default", "aten.view_copy.default", "aten.mul.Tensor")
    return exir_lowering.to_backend(program, TagPartitioner(by_operator(*claimed)))


def not_convex() -> LoweredMethods:
    """A tag that a path leaves and comes back to is split in two."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = x + x
            return a + torch.sin(a)

    return exir_lowering.to_backend(
        edge_program(Model(), (torch.ones(4),)), TagPartitioner(by_operator("aten.add.Tensor"))
    )


CASES: list[Callable[[], LoweredMethods]] = [two_methods, two_partitioners, state, branches, dynamic, not_convex]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_hand_over(case: Callable[[], LoweredMethods]) -> None:
    torch.manual_seed(0)
    lowered = case()
    texts = []
    for method, program in lowered.items():
        program.validate()
        texts.append(f"=== {method}\n{str(program.graph).strip()}\n")
        for delegate in delegates(program):
            delegate.original_module.validate()
            texts.append(delegate.processed_bytes.decode() + "\n")
    got, file = "\n".join(texts), GOLDEN / f"{case.__name__}.txt"
    if os.environ.get("EXIR_LOWERING_ACCEPT"):
        file.write_text(got)
    assert got == file.read_text()
