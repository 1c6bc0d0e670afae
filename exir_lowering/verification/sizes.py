"""Dynamic dimensions: their least, middle and greatest sizes, where all sizes of a method's inputs are possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from exir_lowering._upstream.fakes import known_size
from exir_lowering.graphs.measures import expression
from exir_lowering.pte.value_kinds import Tensor
from exir_lowering.verification.subjects import Subject

Sizes = Mapping[Any, int]
"""A size for each symbol."""

_TRIES = 16  # how many neighbours of a size are tried where PyTorch refuses it
_STEPS = 4096  # how far from a size others are looked for
_UNBOUND = 64  # the greatest size of a dimension that has no bound


class Sizing:
    """The dynamic dimensions of a method."""

    def __init__(self, subject: Subject) -> None:
        self._program = subject.program
        # The dynamic dimensions: expressions of sympy, the greatest sizes in the file, whether they have to be those.
        self._dimensions: list[tuple[Any, int, bool]] = []
        self._shapes: list[tuple[list[Any], Tensor]] = []  # whose sizes are bounded together
        exact = {(size.input, size.dimension): size.exact for size in subject.bucket.sizes}  # others are padded
        for index, (node, value) in enumerate(zip(subject.inputs, subject.spec.inputs, strict=True)):
            fake, tensor = node.meta.get("val"), value.content
            if isinstance(fake, torch.Tensor) and isinstance(tensor, Tensor):
                if tensor.greatest:
                    self._shapes.append(([*map(expression, fake.shape)], tensor))
                for dimension, (size, bound) in enumerate(
                    zip(fake.shape, tensor.greatest or tensor.sizes, strict=True)
                ):
                    if not isinstance(size, int):
                        most = _UNBOUND if tensor.unbound else bound
                        fixed = exact.get((index, dimension), not (tensor.dynamic or tensor.unbound))
                        self._dimensions.append((expression(size), most, fixed))
        self.symbols = sorted({symbol for size, _, _ in self._dimensions for symbol in size.free_symbols}, key=str)
        self._ends: dict[Any, tuple[int, int]] = {}
        for symbol in self.symbols:
            low, most = bounds_of(subject.program, symbol)
            # A size that a symbol is part of is at least a quarter of it, as far as models go.
            high = 4 * max(bound for size, bound, _ in self._dimensions if symbol in size.free_symbols)
            self._ends[symbol] = max(low, 1), max(low, 1, high if most is None else min(high, most))
        self._example: dict[Any, int] = {}  # the sizes at export of the symbols that are sizes themselves
        for node in subject.inputs:
            for size in getattr(node.meta.get("val"), "shape", ()):
                known = None if isinstance(size, int) else known_size(size)
                if known is not None:
                    self._example.setdefault(expression(size), known)

    @property
    def base(self) -> Sizes:
        """The sizes at export where they are known, else some in the middle."""
        if all(symbol in self._example for symbol in self.symbols) and self._possible(self._example):
            return self._example
        return next(self._from("middle"), {})

    def choices(self) -> Iterator[tuple[str, list[Sizes]]]:
        """Yield names with the sizes that they stand for: the first that PyTorch takes is to be used."""
        for end in ("least", "middle", "greatest") if self.symbols else ():
            yield f"{end} sizes", list(self._from(end))
        for symbol in self.symbols if len(self.symbols) > 1 else ():
            for end in ("least", "greatest"):
                yield f"{end} {symbol}", list(self._from("middle", {symbol: end}))

    def _from(self, end: str, others: Mapping[Any, str] | None = None) -> Iterator[Sizes]:
        """Yield possible sizes, the nearest to what is asked for first."""
        walks = [_walk(*self._ends[symbol], (others or {}).get(symbol, end)) for symbol in self.symbols]
        found = 0
        for steps in range(min(max(map(len, walks), default=0), _STEPS)):
            at = [walk[min(steps, len(walk) - 1)] for walk in walks]
            tried = [dict(zip(self.symbols, at, strict=True))]  # so many steps away: all symbols, then each alone
            for symbol, size in tried[0].items() if steps and len(walks) > 1 else ():
                tried.append({other: walk[0] for other, walk in zip(self.symbols, walks, strict=True)} | {symbol: size})
            for sizes in filter(self._possible, tried):
                yield sizes
                found += 1
                if found == _TRIES:
                    return

    def _possible(self, sizes: Sizes) -> bool:
        for expr, bound, exact in self._dimensions:
            size = expr.subs(sizes)
            if not size.is_Integer or not (bound if exact else 0) <= int(size) <= bound:
                return False
        for shape, tensor in self._shapes:
            if tensor.misfit([size if isinstance(size, int) else int(size.subs(sizes)) for size in shape]):
                return False
        for expr, known in self._program.range_constraints.items():
            if expr.free_symbols and expr.free_symbols <= sizes.keys():
                value = expr.subs(sizes)
                if not bool(known.lower <= value) or not bool(value <= known.upper):
                    return False
        return True


def _walk(low: int, high: int, end: str) -> Sequence[int]:
    """Return the sizes from one end, or from the middle, on."""
    if end == "least":
        return range(low, high + 1)
    middle = (low + high) // 2
    return range(high, low - 1, -1) if end == "greatest" else [*range(middle, low - 1, -1), *range(middle, high + 1)]


def shape_of(fake: torch.Tensor, sizes: Sizes) -> list[int]:
    """Return the shape of an input with some sizes."""
    return [size if isinstance(size, int) else int(expression(size).subs(sizes)) for size in fake.shape]


def bounds_of(program: ExportedProgram, size: Any) -> tuple[int, int | None]:
    """Return the least and the greatest value of a symbolic number, None where it has no bound."""
    known = program.range_constraints.get(expression(size))
    if known is None:
        return 0, None
    low, high = known.lower, known.upper
    return int(low) if low.is_Integer else 0, int(high) if high.is_Integer else None
