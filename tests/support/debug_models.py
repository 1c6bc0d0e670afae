"""Models whose source lines the tests of debug information and profiles look for: each line of interest has a mark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lowering_support import TagPartitioner
from torch.export import export
from torch.fx import Node

import exir_lowering
from exir_lowering import LoweredMethods
from exir_lowering.graphs import operator_name

TWO = (torch.ones(4), torch.full((4,), 2.0))


def line(mark: str) -> str:
    """Return how a message tells the line of this file that ends in a mark."""
    for number, text in enumerate(Path(__file__).read_text().splitlines(), start=1):
        if text.endswith(f"# {mark}"):
            return f'File "{__file__}", line {number}, in forward: {text.strip()}'
    raise LookupError(mark)


class Product(torch.nn.Module):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return x * h  # product


class Quotient(torch.nn.Module):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return x / h  # quotient


class Inner(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - 0.25  # difference


class Steps(torch.nn.Module):
    """Operators that `tag` gives to the backend, and one that stays on the host between them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x * y  # first
        b = a + x  # second
        c = b.sin()  # host
        return self.inner(c) * y  # last


class Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x * y  # before

        def yes(z: torch.Tensor) -> torch.Tensor:
            return (z * 2 + y).sin()

        def no(z: torch.Tensor) -> torch.Tensor:
            return z - y

        return torch.cond(z.sum() > 0, yes, no, (z,)) + y  # cond


def tag(node: Node) -> str | None:
    """Tag what `reference` gets."""
    return "t" if operator_name(node) in ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor") else None


def lowered(module: torch.nn.Module, inputs: tuple[Any, ...] = TWO) -> LoweredMethods:
    return exir_lowering.lower(export(module.eval(), inputs), TagPartitioner(tag, "reference"))
