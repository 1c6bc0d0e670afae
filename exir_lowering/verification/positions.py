"""Integer inputs that a model takes for positions: token ids, cache positions, indices; and how far they may go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from exir_lowering import graphs
from exir_lowering._upstream.fakes import known_size
from exir_lowering.verification.sizes import bounds_of

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
_MOVING, _COMPARING = frozenset(_MOVES.split()), frozenset(_COMPARES.split())


@dataclass(frozen=True, slots=True)
class Use:
    """What an integer input is for.

    Attributes:
        high: The greatest position that it may name, if it is one; the least is 0.
        writes: Whether it says where something is written: no position may be named twice.
        compares: Whether it is only compared, as a mask is.
        counts: Whether it becomes a floating-point number.
    """

    high: int | None = None
    writes: bool = False
    compares: bool = False
    counts: bool = False


def find_use(program: ExportedProgram, placeholder: Node) -> Use:
    """Return what an integer input is for, as far as it is followed: through views, casts and added constants."""
    reached = list(_follow(program, placeholder))
    highs = [use.high for use in reached if use.high is not None]
    return Use(
        max(0, min(highs)) if highs else None,
        any(use.writes for use in reached),
        bool(reached) and all(use.compares for use in reached),
        any(use.counts for use in reached),
    )


def _follow(program: ExportedProgram, placeholder: Node) -> Iterator[Use]:
    """Yield the uses of an input, and of what is that and a constant that was added."""
    seen: set[tuple[Node, int]] = set()
    pending = [(placeholder, 0)]
    while pending:
        value, offset = pending.pop()
        for user in value.users:
            if (user, offset) in seen or user.op != "call_function":
                continue
            yield from _use(program, user, value, offset)
            added = _added(user, value)
            if added is not None:
                seen.add((user, offset))
                pending.append((user, offset + added))


def _added(user: Node, value: Node) -> int | None:
    """Return what an operator adds to a value, 0 if it moves it; None if its result is something else."""
    name = _name(user)
    first = bool(user.args) and (user.args[0] is value or name in ("cat", "stack"))
    if graphs.is_getitem(user) or (name in _MOVING and first and not _becomes_other(user)):
        return 0
    if name in ("add", "sub") and first and len(user.args) > 1 and isinstance(user.args[1], int):
        return user.args[1] if name == "add" else -user.args[1]
    return None


def _use(program: ExportedProgram, user: Node, value: Node, offset: int) -> Iterator[Use]:
    name = _name(user)
    high, writes = _indexed(user, value, name)
    if high is not None:
        yield Use(max(0, high - offset), writes)
    elif name in ("item", "_local_scalar_dense"):
        bound = bounds_of(program, user.meta.get("val"))[1]
        yield Use(None if bound is None else max(0, bound - offset))
    elif name in _COMPARING or (name in _MOVING and _becomes(user, lambda dtype: dtype == torch.bool)):
        yield Use(compares=True)
    elif _becomes(user, lambda dtype: dtype.is_floating_point):
        yield Use(counts=True)
    elif name not in _MOVING and not graphs.is_getitem(user):
        yield Use()


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
    parts = graphs.operator_name(user).split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    return name if name.startswith("__") else name.rstrip("_")


def _size(indexed: Any, dim: Any) -> int | None:
    value = indexed.meta.get("val") if isinstance(indexed, Node) else None
    if not isinstance(value, torch.Tensor) or not -value.dim() <= dim < value.dim():
        return None
    size = known_size(value.shape[dim])
    return None if size is None else size - 1


def _becomes(user: Node, kind: Callable[[torch.dtype], bool]) -> bool:
    value = user.meta.get("val")
    return isinstance(value, torch.Tensor) and kind(value.dtype)


def _becomes_other(user: Node) -> bool:
    return _becomes(user, lambda dtype: dtype.is_floating_point or dtype == torch.bool)
