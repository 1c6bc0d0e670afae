"""Models whose source lines the tests of debug information and profiles look for: each line of interest has a mark."""

from __future__ import annotations

from pathlib import Path

import torch


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
    """Operators for compiler_demo, and one that stays on the host between them."""

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
