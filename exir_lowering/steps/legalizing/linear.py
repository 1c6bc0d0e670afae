"""Rules for linear algebra of small matrices, eliminated one column after the other, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from exir_lowering.steps.legalizing.registry import require, rules

UNROLLED = 32  # how many rows or columns may be eliminated one after the other


def _steps(count: Any) -> Sequence[int]:
    require(isinstance(count, int) and count <= UNROLLED)
    return range(count)


def _factored(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return both factors in one matrix, and with which row each was exchanged, from 1."""
    high, width = a.shape[-2:]
    rows, columns = torch.arange(high), torch.arange(width)
    chosen = [torch.zeros(*a.shape[:-2], 0, dtype=torch.int64)]
    for k in _steps(min(high, width)):
        pivot = torch.where(rows < k, -1.0, a[..., k].abs()).argmax(-1, keepdim=True)
        a = a.gather(-2, _exchanged(rows, k, pivot).unsqueeze(-1).expand(a.shape).contiguous())
        head, below = a[..., k : k + 1, k : k + 1], (rows > k).unsqueeze(-1)
        factor = torch.where(below, a[..., k : k + 1] / torch.where(head == 0, 1.0, head), 0.0)
        rest = a - factor * torch.where(columns > k, a[..., k : k + 1, :], 0.0)
        a = torch.where(below & (columns == k), factor, rest)
        chosen.append(pivot)
    return a, (torch.cat(chosen, -1) + 1).to(torch.int32)


def _exchanged(rows: Tensor, k: int, pivot: Tensor) -> Tensor:
    return torch.where(rows == k, pivot, torch.where(rows == pivot, k, rows))


def _order(pivots: Tensor, high: int) -> Tensor:
    """Return where each row was before rows were exchanged."""
    rows = torch.arange(high)
    order = rows.expand(*pivots.shape[:-1], high)
    for k in _steps(pivots.shape[-1]):
        order = order.gather(-1, _exchanged(rows, k, pivots[..., k : k + 1].to(torch.int64) - 1))
    return order


def _info(diagonal: Tensor) -> Tensor:
    """Return the number of the first column that could not be eliminated, from 1; 0 if there is none."""
    size = diagonal.shape[-1]
    first = F.pad(torch.where(diagonal == 0, torch.arange(size), size), [0, 1], value=size).amin(-1)
    return torch.where(first == size, 0, first + 1).to(torch.int32)


def _diagonal(a: Tensor) -> Tensor:
    return torch.diagonal(a, 0, -2, -1).contiguous()


def _substituted(triangle: Tensor, b: Tensor, upper: bool, unit: bool) -> Tensor:
    """Solve a triangular system, one row after the other."""
    size = triangle.shape[-1]
    rows, steps = torch.arange(size).unsqueeze(-1), _steps(size)
    shape = torch.broadcast_shapes(triangle.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    triangle, b = triangle.expand(*shape, size, size), b.expand(*shape, *b.shape[-2:])
    for k in reversed(steps) if upper else steps:
        row = b[..., k : k + 1, :]
        row = row if unit else row / triangle[..., k : k + 1, k : k + 1]
        rest = rows < k if upper else rows > k
        b = torch.where(rows == k, row, torch.where(rest, b - triangle[..., k : k + 1] * row, b))
    return b


def _det(a: Tensor, logarithm: bool = False) -> Any:
    factors, pivots = _factored(a)
    diagonal, exchanges = _diagonal(factors), (pivots != torch.arange(1, pivots.shape[-1] + 1)).sum(-1)
    sign = 1 - 2 * (exchanges & 1)
    if not logarithm:
        return diagonal.prod(-1) * sign, None, None
    signs = (diagonal > 0).to(torch.float64) - (diagonal < 0).to(torch.float64)
    return signs.prod(-1) * sign, torch.log(diagonal.abs()).sum(-1), None, None


def _lu_factor(a: Tensor, *, pivot: bool = True, check_errors: bool = False) -> Any:
    require(pivot)
    factors, pivots = _factored(a)
    return factors, pivots, _info(_diagonal(factors))


def _lu_unpack(a: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    high, width = a.shape[-2:]
    rows, columns, least = torch.arange(high).unsqueeze(-1), torch.arange(width), min(high, width)
    nothing = torch.zeros(0, dtype=a.dtype)
    places = (_order(pivots, high).unsqueeze(-2) == rows).to(a.dtype) if unpack_pivots else nothing
    if not unpack_data:
        return places, nothing, nothing
    lower = torch.where(rows > columns, a, (rows == columns).to(a.dtype))[..., :least]
    return places, lower, torch.where(rows <= columns, a, 0.0)[..., :least, :]


def _lu_solve(factors: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False) -> Any:
    if not left:
        return _lu_solve(factors, pivots, b.mT, adjoint=not adjoint).mT
    shape = torch.broadcast_shapes(factors.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    b = b.expand(*shape, *b.shape[-2:])
    order = _order(pivots, factors.shape[-1]).unsqueeze(-1).expand(b.shape).contiguous()
    if adjoint:
        found = _substituted(factors.mT, _substituted(factors.mT, b, False, False), True, True)
        return torch.zeros_like(b).scatter(-2, order, found)
    return _substituted(factors, _substituted(factors, b.gather(-2, order), False, True), True, False)


def _solve(a: Tensor, b: Tensor | None = None, *, left: bool = True, check_errors: bool = False) -> Any:
    """Without a right side, invert a matrix."""
    vector = b is not None and (b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1]))
    factors, pivots = _factored(a)
    b = torch.eye(a.shape[-1], dtype=a.dtype) if b is None else b
    found = _lu_solve(factors, pivots, b.unsqueeze(-1) if vector else b, left=left)
    return found.squeeze(-1) if vector else found, None, None, _info(_diagonal(factors))


def _solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    if left:
        return _substituted(a, b, upper, unitriangular)
    return _substituted(a.mT, b.mT, not upper, unitriangular).mT


def _triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    found = _substituted(a.mT if transpose else a, b, upper != transpose, unitriangular)
    return found, a.expand(*found.shape[:-2], *a.shape[-2:]).clone()


def _cholesky_ex(a: Tensor, *, upper: bool = False, check_errors: bool = False) -> Any:
    """Return the Cholesky factor, and the number of the first column that has none."""
    a, size = a.mT if upper else a, a.shape[-1]
    rows, columns = torch.arange(size).unsqueeze(-1), torch.arange(size)
    found, heads = torch.zeros_like(a), [torch.zeros(*a.shape[:-2], 0, dtype=a.dtype)]
    for k in _steps(size):
        head = a[..., k : k + 1, k : k + 1]
        column = torch.where(rows >= k, a[..., k : k + 1] / torch.sqrt(head), 0.0)
        found = torch.where(columns == k, column, found)
        a = a - column * column.mT
        heads.append(head.reshape(*a.shape[:-2], 1))
    return found.mT if upper else found, _info((torch.cat(heads, -1) > 0).to(torch.int64))


def _cholesky_solve(b: Tensor, root: Tensor, upper: bool = False) -> Any:
    lower = root.mT if upper else root
    return _substituted(lower.mT, _substituted(lower, b, False, False), True, False)


def _qr(a: Tensor, mode: str = "reduced") -> Any:
    """By reflections, with LAPACK's signs."""
    high, width = a.shape[-2:]
    r, rows = a, torch.arange(high).unsqueeze(-1)
    q = torch.eye(high, dtype=a.dtype).expand(*a.shape[:-2], high, high)
    for k in _steps(max(high, width))[: min(high, width)]:
        column, head = r[..., k : k + 1], r[..., k : k + 1, k : k + 1]
        below = torch.where(rows > k, column, 0.0)
        rest = (below * below).sum(-2, keepdim=True)
        length = torch.sqrt(head * head + rest)
        beta = torch.where(rest == 0, head, torch.where(head < 0, length, -length))
        vector = torch.where(rows == k, 1.0, below / torch.where(rest == 0, 1.0, head - beta))
        tau = torch.where(rest == 0, 0.0, (beta - head) / torch.where(beta == 0, 1.0, beta))
        r = r - tau * vector * (vector * r).sum(-2, keepdim=True)
        q = q - tau * (q * vector.mT).sum(-1, keepdim=True) * vector.mT
    least = high if mode == "complete" else min(high, width)
    r = torch.where(rows <= torch.arange(width), r, 0.0)[..., :least, :]
    return (q[..., :least] if mode != "r" else torch.zeros(0, dtype=a.dtype)), r


def _householder_product(a: Tensor, tau: Tensor) -> Any:
    rows, columns = torch.arange(a.shape[-2]).unsqueeze(-1), torch.arange(a.shape[-1])
    found = (rows == columns).to(a.dtype).expand(a.shape)
    for k in reversed(_steps(tau.shape[-1])):
        vector = torch.where(rows > k, a[..., k : k + 1], (rows == k).to(a.dtype))
        found = found - tau[..., k : k + 1].unsqueeze(-1) * vector * (vector * found).sum(-2, keepdim=True)
    return found


rules(
    {
        "_linalg_det": _det,
        "_linalg_slogdet": lambda a: _det(a, logarithm=True),
        "linalg_lu_factor_ex": _lu_factor,
        "lu_unpack": _lu_unpack,
        "linalg_lu": lambda a, *, pivot=True: _lu_unpack(*_lu_factor(a, pivot=pivot)[:2]),
        "linalg_lu_solve": _lu_solve,
        "_linalg_solve_ex": _solve,
        "linalg_inv_ex": lambda a, **_: _solve(a)[::3],
        "linalg_solve_triangular": _solve_triangular,
        "triangular_solve": _triangular_solve,
        "linalg_qr": _qr,
        "linalg_householder_product": _householder_product,
        "linalg_cholesky_ex": _cholesky_ex,
        "cholesky": lambda a, upper=False: _cholesky_ex(a, upper=upper)[0],
        "cholesky_solve": _cholesky_solve,
        "cholesky_inverse": lambda a, upper=False: _cholesky_solve(torch.eye(a.shape[-1], dtype=a.dtype), a, upper),
    },
    wide=torch.float64,
)
