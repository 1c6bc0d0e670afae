"""Inputs that expose errors which depend on values: patterns, with a name each, for numbers, positions and masks.

In a case, all inputs of one kind follow a pattern, and the others are random. Everything is drawn from seeds: that of a
call is `SEED`, the number of its case and the number of the call. Integers may be positions (token ids,
cache positions, indices): how the program uses them says how far they may go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import known_size
from exir_lowering.verification.sizes import Sizes, Sizing, bounds_of, shape_of
from exir_lowering.verification.subjects import Subject

# Operators whose results are elements of their first operand, whatever its values are.
_MOVES = (
    "view _unsafe_view view_copy reshape flatten unflatten squeeze squeeze_copy unsqueeze unsqueeze_copy expand "
    "expand_copy permute permute_copy transpose transpose_copy t slice slice_copy select select_copy split chunk "
    "split_with_sizes narrow clone alias alias_copy detach contiguous lift_fresh_copy repeat to _to_copy "
    "_to_dim_order_copy _clone_dim_order item _local_scalar_dense cat stack movedim"
)
_COMPARES = (
    "eq ne lt le gt ge logical_not logical_and logical_or logical_xor where masked_fill bitwise_and bitwise_or "
    "bitwise_not __and__ __or__ sym_constrain_range sym_constrain_range_for_size _assert_scalar"
)
_PICKS = "index_select gather select select_copy slice narrow index_add scatter_add"
# For each operator that indexes its first operand, the positions of the dimension and the indices, and if it writes.
_ALONG: dict[str, tuple[int, int, bool]] = {
    **dict.fromkeys(_PICKS.split(), (1, 2, False)),
    **dict.fromkeys(("index_copy", "index_fill", "scatter"), (1, 2, True)),
    **dict.fromkeys(("select_scatter", "slice_scatter"), (2, 3, True)),
    "take_along_dim": (2, 1, False),
}
MOVING, _COMPARING = frozenset(_MOVES.split()), frozenset(_COMPARES.split())


@dataclass(frozen=True, slots=True)
class Use:
    """What an integer input is for."""

    high: int | None = None  # the greatest position that it may name, if it is one; the least is 0
    exact: bool = False  # whether it may be each of them, whatever sizes are
    writes: bool = False  # whether it says where something is written: no position may be named twice
    compares: bool = False  # whether it is only compared, as a mask is
    counts: bool = False  # whether it becomes a floating-point number


def find_use(program: ExportedProgram, placeholder: Node) -> Use:
    """Return what an integer input is for, as far as it is followed: through views, casts and added constants."""
    reached: list[Use] = []
    seen: set[tuple[Node, int]] = set()
    pending = [(placeholder, 0)]
    while pending:
        value, offset = pending.pop()
        for user in value.users:
            if (user, offset) not in seen and user.op == "call_function":
                reached += _use_of(program, user, value, offset)
                added = _added(user, value)
                if added is not None:
                    seen.add((user, offset))
                    pending.append((user, offset + added))
    highs = [use.high for use in reached if use.high is not None]
    return Use(
        max(0, min(highs)) if highs else None,
        any(use.exact for use in reached),
        any(use.writes for use in reached),
        bool(reached) and all(use.compares for use in reached),
        any(use.counts for use in reached),
    )


def _added(user: Node, value: Node) -> int | None:
    """Return what an operator adds to a value, 0 if it moves it; None if its result is something else."""
    name, dtype = _name(user), _dtype(user)
    first = bool(user.args) and (user.args[0] is value or name in ("cat", "stack"))
    if graphs.is_getitem(user) or (
        name in MOVING and first and (dtype is None or not (dtype.is_floating_point or dtype == torch.bool))
    ):
        return 0
    if name in ("add", "sub") and first and len(user.args) > 1 and isinstance(user.args[1], int):
        return user.args[1] if name == "add" else -user.args[1]
    return None


def _use_of(program: ExportedProgram, user: Node, value: Node, offset: int) -> Iterator[Use]:
    name, dtype = _name(user), _dtype(user)
    high, writes = _indexed(user, value, name)
    if high is not None:
        yield Use(max(0, high - offset), isinstance(value.meta["val"], torch.Tensor), writes)
    elif name in ("item", "_local_scalar_dense"):
        bound = bounds_of(program, user.meta.get("val"))[1]
        yield Use(None if bound is None else max(0, bound - offset))
    elif name in _COMPARING or (name in MOVING and dtype == torch.bool):
        yield Use(compares=True)
    elif _is_float(user):
        yield Use(counts=True)
    elif name not in MOVING and not graphs.is_getitem(user):
        yield Use()


def find_mask(placeholder: Node) -> str:
    """Return whether an input says what attention sees: "added" to scores, "counted" as 0 or 1; "" for neither."""
    reached, floats = [placeholder], _is_float(placeholder)
    for value in reached:
        for user in value.users:
            name, args = _name(user), user.args
            attends = name == "scaled_dot_product_attention" and graphs.argument(user, "attn_mask") is value
            softens = name == "add" and any(map(_is_score, user.all_input_nodes)) and _is_softened(user)
            if floats and (attends or softens):
                return "added"
            closes = name == "mul" and any(isinstance(one, (int, float)) and one <= -1000 for one in args)  # 1 - mask
            if closes or (not floats and value is not placeholder and _dtype(user) == torch.bool):
                return "counted"
            if (name in MOVING or name in ("rsub", "sub")) and user not in reached:
                reached.append(user)
    return ""


def _is_score(node: Node) -> bool:
    """Return whether a value is a product of matrices, scaled and moved."""
    name = _name(node)
    further = name in MOVING or name in ("mul", "div", "add")
    return name in ("matmul", "bmm", "baddbmm", "einsum") or (further and any(map(_is_score, node.all_input_nodes)))


def _is_softened(node: Node) -> bool:
    names = ((user, _name(user)) for user in node.users)
    return any("softmax" in name or (name in {*MOVING, "add"} and _is_softened(user)) for user, name in names)


def _is_float(node: Node) -> bool:
    return (dtype := _dtype(node)) is not None and (dtype.is_floating_point or dtype.is_complex)


def _indexed(user: Node, value: Node, name: str) -> tuple[int | None, bool]:
    """Return the greatest position that a value may be for an operator that takes it for one."""
    args = user.args
    if name in ("embedding", "embedding_bag", "_embedding_bag") and len(args) > 1 and args[1] is value:
        return _size(args[0], 0), False
    if name == "one_hot" and args[0] is value and len(args) > 1 and isinstance(args[1], int) and args[1] > 0:
        return args[1] - 1, False
    if name in ("index", "index_put", "_unsafe_index", "_unsafe_index_put", "_index_put_impl"):
        indices = args[1] if isinstance(args[1], (list, tuple)) else ()
        for dim, index in enumerate(indices):
            if index is value:
                return _size(args[0], dim), "put" in name and not (len(args) > 3 and args[3])
    if name in _ALONG:
        at, indices_at, writes = _ALONG[name]
        if len(args) > max(at, indices_at) and args[indices_at] is value and isinstance(args[at], int):
            return _size(args[0], args[at]), writes
    return None, False


def _name(user: Node) -> str:
    """Return the name of an operator, the same for one that works in place."""
    parts = graphs.operator_name(user).split(".") if user.op == "call_function" else [""]
    name = parts[1] if len(parts) > 1 else parts[0]
    return name if name.startswith("__") else name.rstrip("_")


def _size(indexed: Any, dim: Any) -> int | None:
    value = indexed.meta.get("val") if isinstance(indexed, Node) else None
    if not isinstance(value, torch.Tensor) or not -value.dim() <= dim < value.dim():
        return None
    size = known_size(value.shape[dim])
    return None if size is None else size - 1


def _dtype(user: Node) -> torch.dtype | None:
    value = user.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


SEED = 0
"""The seed of everything that is drawn."""

_LIMITS = 16  # how many smaller integers are tried where PyTorch refuses some

_BEYOND_FLOAT, _BEYOND_INT32 = 2**24 + 1, 2**33 + 1


@dataclass(frozen=True, slots=True)
class Draw:
    """What a tensor is made for: its shape and type, which call it is, what values it may have, and random numbers."""

    shape: Sequence[int]
    dtype: torch.dtype
    call: int
    use: Use
    generator: Generator

    @property
    def count(self) -> int:
        """How many elements there are."""
        return torch.Size(self.shape).numel()

    @property
    def high(self) -> int:
        """The greatest position that there is."""
        return self.use.high or 0

    def normal(self) -> torch.Tensor:
        """Return numbers of the normal distribution."""
        return torch.randn(self.shape, generator=self.generator)

    def integers(self, low: int, high: int) -> torch.Tensor:
        """Return integers from low to high, both included."""
        return torch.randint(low, high + 1, self.shape, generator=self.generator)

    def ramp(self, low: float, high: float) -> torch.Tensor:
        """Return numbers that rise evenly, element by element."""
        return torch.linspace(low, high, self.count).reshape(self.shape)

    def places(self) -> torch.Tensor:
        """Return for each element how far along the last dimension it is, from 0 to 1."""
        size = self.shape[-1] if self.shape else 1
        return (torch.arange(size) / max(size, 1)).expand(self.shape)

    def full(self, value: float) -> torch.Tensor:
        """Return one number everywhere; each call has another multiple of it."""
        return torch.full(self.shape, value * (1 + self.call))


Fill = Callable[[Draw], torch.Tensor]


def _put(made: torch.Tensor, place: int, value: float) -> torch.Tensor:
    """Put a number at a place, counted element by element."""
    if made.numel():
        made.view(-1)[place] = value
    return made


def _outlier(draw: Draw) -> torch.Tensor:
    """Make one channel a hundred times as large: dimension 1 of images and signals, else the last one."""
    made = draw.normal()
    if made.dim():
        channel = made.select(1 if made.dim() > 3 else -1, 0)
        channel.mul_(100)
    return made


_NUMBERS: Mapping[str, Fill] = {
    "randn": Draw.normal,
    "values beyond 8": lambda draw: draw.normal() * 12,
    "ties": lambda draw: draw.integers(-5, 5) / 2,
    "zeros": lambda draw: torch.zeros(draw.shape),
    "constant 0.5": lambda draw: draw.full(0.5),
    "constant -1": lambda draw: draw.full(-1),
    "ramp": lambda draw: draw.ramp(-1, 1),
    "ramp from 0 to 255": lambda draw: draw.ramp(0, 255),
    "one-hot, first": lambda draw: _put(torch.zeros(draw.shape), 0, 1.0),
    "one-hot, last": lambda draw: _put(torch.zeros(draw.shape), -1, 1.0),
    "negative": lambda draw: -draw.normal().abs(),
    "positive": lambda draw: draw.normal().abs(),
    "outlier channel": _outlier,
    "mean of 100 deviations": lambda draw: draw.normal() + 100,
    "large magnitudes": lambda draw: draw.normal() * (1e2 if torch.finfo(draw.dtype).max < 1e5 else 1e4),
    "small magnitudes": lambda draw: draw.normal() * 1e-4,
}
_CONTINUOUS = {
    *("randn", "values beyond 8", "large magnitudes", "small magnitudes", "outlier channel", "negative"),
    "mean of 100 deviations",
}
"""The patterns in which a small change of each number changes nothing that the pattern is about."""

_POSITIONS: Mapping[str, Fill] = {
    "random ids": lambda draw: draw.integers(0, draw.high),
    "first token id": lambda draw: torch.zeros(draw.shape),
    "last token id": lambda draw: torch.full(draw.shape, draw.high, dtype=torch.int64),
    "ids in order": lambda draw: (torch.arange(draw.count) % (draw.high + 1)).reshape(draw.shape),
    "both ends of the ids": lambda draw: (torch.arange(draw.count).reshape(draw.shape) % 2) * draw.high,
}
_WRITTEN: Mapping[str, Fill] = {
    "positions in order": lambda draw: _window(draw, draw.call * draw.count),
    "last positions": lambda draw: _window(draw, draw.high),
    "first positions": lambda draw: _window(draw, 0),
}
_MASKS: Mapping[str, Fill] = {
    "random mask": lambda draw: draw.integers(0, 1),
    "mask of ones": lambda draw: torch.ones(draw.shape),
    "mask of zeros": lambda draw: torch.zeros(draw.shape),
    "mask of the first half": lambda draw: draw.places() < 0.5,
    "mask of the last half": lambda draw: draw.places() >= 0.5,
    "mask of the first position": lambda draw: draw.places() <= 0,
}


def _closing(fill: Fill) -> Fill:
    """Return what fills a mask that is added: 0 where something is seen, as the first of each row is, else -inf."""

    def made(draw: Draw) -> torch.Tensor:
        seen = fill(draw).bool()
        seen[..., :1] = True
        return torch.zeros(draw.shape).masked_fill(~seen, -math.inf)

    return made


_ADDED: Mapping[str, Fill] = {name: _closing(fill) for name, fill in _MASKS.items()}
_COUNTS: Mapping[str, Fill] = {
    "random integers": lambda draw: draw.integers(0 if not draw.dtype.is_signed else -8, 8),
    "zeros of integers": lambda draw: torch.zeros(draw.shape),
    "ones of integers": lambda draw: torch.ones(draw.shape),
    "integers up to 1,000": lambda draw: draw.integers(0, min(1000, torch.iinfo(draw.dtype).max)),
}
_INTEGERS: Mapping[str, Fill] = {
    **_COUNTS,
    "limits of the dtype": lambda draw: _ends(draw),
    "integers beyond float32": lambda draw: draw.integers(*_above(draw, _BEYOND_FLOAT)),
    "integers beyond int32": lambda draw: draw.integers(*_above(draw, _BEYOND_INT32)),
    "ties of integers": lambda draw: draw.integers(0, 1),
}
_SMALL_INTEGERS: Mapping[str, Fill] = {
    "random bytes": lambda draw: draw.integers(torch.iinfo(draw.dtype).min, torch.iinfo(draw.dtype).max),
    **{name: fill for name, fill in _INTEGERS.items() if "beyond" not in name},
}


def _above(draw: Draw, low: int) -> tuple[int, int]:
    most = torch.iinfo(draw.dtype).max // 2
    return min(low, most), min(2 * low, most)


def _ends(draw: Draw) -> torch.Tensor:
    limits = torch.iinfo(draw.dtype)
    ends = torch.tensor([limits.min, min(limits.max, torch.iinfo(torch.int64).max)])
    return ends[draw.integers(0, 1)]


def _window(draw: Draw, start: int) -> torch.Tensor:
    """Return positions one after the other, each once as far as there are enough of them."""
    start = max(0, min(start, draw.high + 1 - draw.count))
    return ((start + torch.arange(draw.count)) % (draw.high + 1)).reshape(draw.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """What a method is called with."""

    name: str  # what the report calls it
    number: int  # for the seeds
    fills: tuple[Fill | None, ...] = ()  # what fills each generated input; None for one that export fixed
    sizes: tuple[Sizes, ...] = ()  # of dynamic dimensions; the first that PyTorch takes
    continuous: bool = False  # whether a small change of its numbers changes nothing that it is about


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of a method in a case: with which inputs, flat, and which of its calls in the case it is, from 0."""

    method: str
    inputs: list[Any]
    case: Case
    number: int


class Generated:
    """The cases of a method."""

    def __init__(self, subject: Subject) -> None:
        self._subject, self._sizing, self._uses = subject, Sizing(subject), list[Use]()
        self._limit: int | None = None  # the greatest integer that PyTorch took where it refused greater ones
        kinds: list[Mapping[str, Fill] | None] = []
        for node, fixed in zip(subject.inputs, subject.convention.inputs, strict=True):
            use = Use() if _is_float(node) or _dtype(node) in (None, torch.bool) else find_use(subject.program, node)
            self._uses.append(use)
            kinds.append(None if fixed is not None or _dtype(node) is None else _patterns(node, use))
        loose = (_POSITIONS, _WRITTEN, _INTEGERS, _COUNTS)
        self._limited = [
            not use.exact and any(kind is one for one in loose) for kind, use in zip(kinds, self._uses, strict=True)
        ]
        # The last positions in what the program keeps, which are tried where PyTorch refuses greater integers.
        lifted = graphs.lifted_inputs(subject.program).values()
        kept = (graphs.lifted_value(subject.program, spec.target) for spec in lifted)
        sizes = {size for value in kept if isinstance(value, torch.Tensor) for size in value.shape if size}
        self._limits = sorted((size - 1 for size in sizes | {1}), reverse=True)[:_LIMITS]
        base = (self._sizing.base,)
        random = tuple(None if kind is None else next(iter(kind.values())) for kind in kinds)
        first = next((next(iter(kind)) for kind in kinds if kind is not None), "no inputs")
        floats = any(kind is _NUMBERS for kind in kinds)
        self.cases = [Case("randn" if floats else first, 0, random, base, continuous=True)]
        patterns = {id(kind): kind for kind in kinds if kind is not None}.values()
        changes = [(kind, *each) for kind in patterns for each in list(kind.items())[1:]]
        for changed, name, fill in changes:
            fills = tuple(fill if kind is changed else other for kind, other in zip(kinds, random, strict=True))
            continuous = changed is not _NUMBERS or name in _CONTINUOUS
            self.cases.append(Case(name, len(self.cases), fills, base, continuous))
        for name, choices in self._sizing.choices():
            if choices and choices[0] != base[0]:
                self.cases.append(Case(name, len(self.cases), random, tuple(choices), continuous=True))

    def make(self, case: Case, call: int) -> Iterator[list[Any]]:
        """Make the inputs of a call, flat, for each choice of sizes, then with smaller integers; PyTorch takes one."""
        yield from (self._make(case, call, sizes, self._limit) for sizes in case.sizes)
        before, limits = self._limit, self._limits if any(self._limited) else ()
        for self._limit in (limit for limit in limits if before is None or limit < before):
            yield self._make(case, call, case.sizes[0], self._limit)
        self._limit = before  # what it refused was something else

    def _make(self, case: Case, call: int, sizes: Sizes, limit: int | None) -> list[Any]:
        made: list[Any] = []
        for index, (node, fill) in enumerate(zip(self._subject.inputs, case.fills, strict=True)):
            if fill is None:
                fixed = self._subject.convention.inputs[index]
                made.append(None if fixed is None else fixed.value)
                continue
            fake = node.meta["val"]
            generator = Generator().manual_seed(((SEED * 1009 + case.number) * 1009 + call) * 1009 + index)
            draw = Draw(shape_of(fake, sizes), fake.dtype, call, self._uses[index], generator)
            values = torch.complex(fill(draw), fill(draw)) if draw.dtype.is_complex else fill(draw)
            limited = limit is not None and self._limited[index]
            made.append((values.clamp(0, limit) if limited else values).to(draw.dtype))
        return made


def _patterns(placeholder: Node, use: Use) -> Mapping[str, Fill]:
    value = placeholder.meta["val"]
    mask = find_mask(placeholder) if use.high is None and value.dim() else ""
    if mask == "added":
        return _ADDED
    if value.dtype == torch.bool or use.compares or mask:
        return _MASKS
    if _is_float(placeholder):
        return _NUMBERS
    if use.high is not None:
        return _WRITTEN if use.writes else _POSITIONS
    if value.dtype.itemsize == 1:
        return _SMALL_INTEGERS
    return _COUNTS if use.counts else _INTEGERS
