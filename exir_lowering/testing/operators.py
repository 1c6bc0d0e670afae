"""What the cases are made of: operators by the role that they have in a case, of those that the backend takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from exir_lowering.testing.samples import CaseInput, tensor, weight

Form = tuple[str, Callable[..., Any]]  # the name of an operator, and a function that is that operator only

ROLES = {"two": "an operator of two values", "held": "an operator with a weight", "one": "an operator of one value"}

_BOTH: tuple[Form, ...] = tuple((name, getattr(torch, name)) for name in ("sub", "mul", "add", "div", "maximum"))
_ONE: tuple[Form, ...] = (
    *((name, getattr(torch, name)) for name in ("sigmoid", "tanh", "relu", "neg", "abs")),
    ("gelu", F.gelu), ("softmax", lambda x: torch.softmax(x, -1)), ("exp", torch.exp),
)  # fmt: skip
_MM: tuple[Form, ...] = (("mm", torch.mm), ("linear", F.linear), ("addmm", lambda x, y: torch.addmm(x, x, y)))
_BMM: tuple[Form, ...] = (("bmm", torch.bmm),)
_ATTENTION: tuple[Form, ...] = (
    ("attention", lambda x, y: F.scaled_dot_product_attention(x, y, y)), ("matmul", torch.matmul),
)  # fmt: skip
_CONV: tuple[Form, ...] = (("conv2d", lambda x, w: F.conv2d(x, w, padding=1)),)
_FIRST: Mapping[str, int | str] = {"rows": "n", "none": 0, "row": 1}  # sizes


@dataclass(frozen=True, slots=True)
class Domain:
    """Values of one shape, and operators that give values of that shape again, in the order in which they are tried."""

    name: str
    shape: tuple[int, ...]
    weight: tuple[int, ...]  # the shape of weights
    two: tuple[Form, ...]
    held: tuple[Form, ...]
    one: tuple[Form, ...] = _ONE
    rows: tuple[int, ...] | None = None  # the shape of weights for any first size of the values, if there is one
    same_rows: bool = True  # whether an operator of two values takes any first size, that of both

    def input(self, what: str) -> CaseInput:
        """Describe an input: a "value", another number of "rows", "none" or a single "row" of it, or another layout."""
        if what in _FIRST:
            return tensor(_FIRST[what], *self.shape[1:])
        return tensor(*self.shape, layout="contiguous" if what == "value" else what)


DOMAINS = (
    Domain("elementwise", (2, 3), (2, 3), _BOTH, _BOTH, rows=(3,)),
    Domain("matrix", (3, 3), (3, 3), _MM[::2] + _BOTH, _MM, rows=(3, 3), same_rows=False),
    Domain("batch", (2, 3, 3), (2, 3, 3), _BMM + _BOTH, _BMM),
    Domain("heads", (1, 2, 3, 3), (1, 2, 3, 3), _ATTENTION, _ATTENTION),
    Domain("image", (1, 3, 4, 4), (3, 3, 3, 3), _BOTH, _CONV, rows=(3, 3, 3, 3)),
)


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators that cases have in a domain; None for a role that none has."""

    domain: Domain
    names: str = ""
    two: Any = None  # it does not commute, if the backend takes one that does not
    held: Any = None
    other: Any = None  # a second operator with a weight, or the same one
    one: Any = None

    def step(self, x: Any, held: Any) -> Any:
        """Compute any operator: that with a weight if there is one."""
        return self.held(x, held) if self.held else self.one(x) if self.one else self.two(x, x)

    def mix(self, x: Any, y: Any, held: Any) -> Any:
        """Compute outputs of two values, which is not the same if they are swapped."""
        return self.two(x, y) if self.two else (self.step(x, held), self.step(self.step(y, held), held))

    @property
    def grows(self) -> bool:
        """Whether there is an operator whose first size may be any."""
        return bool(self.one or (self.held and self.domain.rows) or (self.two and self.domain.same_rows))

    def grow(self, x: Any, held: Any) -> Any:
        """Compute an operator whose first size may be any."""
        if self.held and self.domain.rows is not None:
            return self.held(x, held)
        return self.two(x, x) if self.two and self.domain.same_rows else self.one(x)

    def weight(self, *shape: int) -> torch.Tensor:
        """Make a weight; by default in the shape that the operators take."""
        made = weight(*(shape or self.domain.weight))
        return made / 3 if self.domain.name == "image" else made  # so that many convolutions do not overflow
