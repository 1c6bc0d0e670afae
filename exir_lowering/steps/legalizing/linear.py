"""Rules for linear algebra of small matrices, eliminated one column after the other, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exir_lowering.steps.legalizing.registry import UNROLLED, rule


def _large(*matrices: Tensor) -> bool:
    sizes = [size for each in matrices for size in each.shape[-2:]]
    return not all(isinstance(size, int) and 0 < size <= UNROLLED for size in sizes)


def _factored(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return both factors in one matrix, the rows that were chosen, and where each row was before."""
    a = a.to(torch.float64)
    high, width = a.shape[-2:]
    rows, columns, chosen = torch.arange(high), torch.arange(width), []
    order = rows.expand(a.shape[:-1])
    for k in range(min(high, width)):
        pivot = torch.where(rows < k, -1.0, a[..., k].abs()).argmax(-1, keepdim=True)
        place = torch.where(rows == k, pivot, torch.where(rows == pivot, k, rows))
        a = a.gather(-2, place.unsqueeze(-1).expand(a.shape).contiguous())
        order = order.gather(-1, place)
        head, below = a[..., k : k + 1, k : k + 1], (rows > k).unsqueeze(-1)
        factor = torch.where(below, a[..., k : k + 1] / torch.where(head == 0, 1.0, head), 0.0)
        rest = a - factor * torch.where(columns > k, a[..., k : k + 1, :], 0.0)
        a = torch.where(below & (columns == k), factor, rest)
        chosen.append(pivot)
    return a, torch.cat(chosen, -1), order


def _info(diagonal: Tensor) -> Tensor:
    """Return the number of the first column that could not be eliminated, from 1; 0 if there is none."""
    numbers = torch.where(diagonal == 0, torch.arange(1, diagonal.shape[-1] + 1), diagonal.shape[-1] + 1).amin(-1)
    return torch.where(numbers > diagonal.shape[-1], 0, numbers).to(torch.int32)


def _pivots(chosen: Tensor) -> Tensor:
    return (chosen + 1).to(torch.int32)


def _sign(chosen: Tensor) -> Tensor:
    swaps = (chosen != torch.arange(chosen.shape[-1])).sum(-1)
    return 1 - 2 * (swaps & 1)


def _diagonal(a: Tensor) -> Tensor:
    return torch.diagonal(a, 0, -2, -1).contiguous()


def _substituted(triangle: Tensor, b: Tensor, upper: bool, unit: bool) -> Tensor:
    """Solve a triangular system, one row after the other."""
    size = triangle.shape[-1]
    rows = torch.arange(size).unsqueeze(-1)
    shape = torch.broadcast_shapes(triangle.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    triangle, b = triangle.expand(*shape, size, size), b.expand(*shape, *b.shape[-2:])
    for k in reversed(range(size)) if upper else range(size):
        row = b[..., k : k + 1, :]
        row = row if unit else row / triangle[..., k : k + 1, k : k + 1]
        rest = rows < k if upper else rows > k
        b = torch.where(rows == k, row, torch.where(rest, b - triangle[..., k : k + 1] * row, b))
    return b


def _solved(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the solution of a system, and the factors and rows by which it was found."""
    factors, chosen, order = _factored(a)
    shape = torch.broadcast_shapes(factors.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    b, order = b.to(torch.float64).expand(*shape, *b.shape[-2:]), order.expand(*shape, order.shape[-1])
    b = b.gather(-2, order.unsqueeze(-1).expand(b.shape).contiguous())
    return _substituted(factors, _substituted(factors, b, False, True), True, False), factors, chosen


@rule("_linalg_det.default")
def _det(a: Tensor) -> Any:
    if _large(a):
        return NotImplemented
    factors, chosen, _ = _factored(a)
    found = _diagonal(factors).prod(-1) * _sign(chosen)
    return found.to(a.dtype), factors.to(a.dtype), _pivots(chosen)


@rule("_linalg_slogdet.default")
def _slogdet(a: Tensor) -> Any:
    if _large(a):
        return NotImplemented
    factors, chosen, _ = _factored(a)
    diagonal = _diagonal(factors)
    signs = (diagonal > 0).to(torch.float64) - (diagonal < 0).to(torch.float64)
    sign, logarithm = signs.prod(-1) * _sign(chosen), torch.log(diagonal.abs()).sum(-1)
    return sign.to(a.dtype), logarithm.to(a.dtype), factors.to(a.dtype), _pivots(chosen)


@rule("linalg_lu_factor_ex.default")
def _lu_factor(a: Tensor, *, pivot: bool = True, check_errors: bool = False) -> Any:
    if _large(a) or not pivot:
        return NotImplemented
    factors, chosen, _ = _factored(a)
    return factors.to(a.dtype), _pivots(chosen), _info(_diagonal(factors))


@rule("linalg_lu.default")
def _lu(a: Tensor, *, pivot: bool = True) -> Any:
    if _large(a) or not pivot:
        return NotImplemented
    factors, _, order = _factored(a)
    high, width = a.shape[-2:]
    rows, columns, least = torch.arange(high).unsqueeze(-1), torch.arange(width), min(high, width)
    lower = torch.where(rows > columns, factors, (rows == columns).to(factors.dtype))[..., :least]
    upper = torch.where(rows <= columns, factors, 0.0)[..., :least, :]
    return tuple(each.to(a.dtype) for each in ((order.unsqueeze(-2) == rows), lower, upper))


@rule("linalg_inv_ex.default")
def _inverse(a: Tensor, *, check_errors: bool = False) -> Any:
    if _large(a):
        return NotImplemented
    found, factors, _ = _solved(a, torch.eye(a.shape[-1], dtype=torch.float64))
    return found.to(a.dtype), _info(_diagonal(factors))


@rule("_linalg_solve_ex.default")
def _solve(a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    if _large(a):
        return NotImplemented
    vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    wide = b.unsqueeze(-1) if vector else b
    if left:
        found, factors, chosen = _solved(a, wide)
    else:
        found = _solved(a.mT, wide.mT)[0].mT
        factors, chosen, _ = _factored(a)
    found = found.squeeze(-1) if vector else found
    return found.to(a.dtype), factors.to(a.dtype), _pivots(chosen), _info(_diagonal(factors))


@rule("linalg_solve_triangular.default")
def _solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    if _large(a):
        return NotImplemented
    wide, given = a.to(torch.float64), b.to(torch.float64)
    if left:
        return _substituted(wide, given, upper, unitriangular).to(a.dtype)
    return _substituted(wide.mT, given.mT, not upper, unitriangular).mT.to(a.dtype)


@rule("triangular_solve.default")
def _old_solve_triangular(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    wide = a.mT if transpose else a
    found = _solve_triangular(wide, b, upper=upper != transpose, unitriangular=unitriangular)
    return found if found is NotImplemented else (found, a.expand(*found.shape[:-2], *a.shape[-2:]).clone())


def _lower_root(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower Cholesky factor, and the number of the first column that has none."""
    a = a.to(torch.float64)
    size = a.shape[-1]
    rows, columns, heads = torch.arange(size).unsqueeze(-1), torch.arange(size), []
    found = torch.zeros_like(a)
    for k in range(size):
        head = a[..., k : k + 1, k : k + 1]
        column = torch.where(rows >= k, a[..., k : k + 1] / torch.sqrt(head), 0.0)
        found = torch.where(columns == k, column, found)
        a = a - column * column.mT
        heads.append(head.reshape(*a.shape[:-2], 1))
    return found, _info((torch.cat(heads, -1) > 0).to(torch.int64))


@rule("linalg_cholesky_ex.default")
def _cholesky_ex(a: Tensor, *, upper: bool = False, check_errors: bool = False) -> Any:
    if _large(a):
        return NotImplemented
    found, info = _lower_root(a.mT if upper else a)
    return (found.mT if upper else found).to(a.dtype), info


@rule("cholesky.default")
def _cholesky(a: Tensor, upper: bool = False) -> Any:
    found = _cholesky_ex(a, upper=upper)
    return found if found is NotImplemented else found[0]


@rule("cholesky_solve.default")
def _cholesky_solve(b: Tensor, root: Tensor, upper: bool = False) -> Any:
    if _large(root):
        return NotImplemented
    lower = (root.mT if upper else root).to(torch.float64)
    found = _substituted(lower, b.to(torch.float64), False, False)
    return _substituted(lower.mT, found, True, False).to(b.dtype)


@rule("cholesky_inverse.default")
def _cholesky_inverse(root: Tensor, upper: bool = False) -> Any:
    return _cholesky_solve(torch.eye(root.shape[-1], dtype=root.dtype), root, upper)


@rule("linalg_qr.default")
def _qr(a: Tensor, mode: str = "reduced") -> Any:
    """By reflections, with LAPACK's signs."""
    if _large(a):
        return NotImplemented
    high, width = a.shape[-2:]
    r, rows = a.to(torch.float64), torch.arange(high).unsqueeze(-1)
    q = torch.eye(high, dtype=torch.float64).expand(*a.shape[:-2], high, high)
    for k in range(min(high, width)):
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
    r = torch.where(rows <= torch.arange(width), r, 0.0)[..., :least, :].to(a.dtype)
    return (q[..., :least].to(a.dtype) if mode != "r" else torch.zeros(0, dtype=a.dtype)), r


@rule("lu_unpack.default")
def _lu_unpack(a: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    if _large(a):
        return NotImplemented
    high, width = a.shape[-2:]
    rows, columns, least = torch.arange(high), torch.arange(width), min(high, width)
    order = rows.expand(*pivots.shape[:-1], high)
    for k in range(pivots.shape[-1] if unpack_pivots else 0):
        pivot = pivots[..., k : k + 1].to(torch.int64) - 1
        place = torch.where(rows == k, pivot, torch.where(rows == pivot, k, rows))
        order = order.gather(-1, place)
    nothing = torch.zeros(0, dtype=a.dtype)
    places = (order.unsqueeze(-2) == rows.unsqueeze(-1)).to(a.dtype) if unpack_pivots else nothing
    if not unpack_data:
        return places, nothing, nothing
    down, across = rows.unsqueeze(-1), columns
    lower = torch.where(down > across, a, (down == across).to(a.dtype))[..., :least]
    return places, lower, torch.where(down <= across, a, 0)[..., :least, :]


@rule("linalg_householder_product.default")
def _householder_product(a: Tensor, tau: Tensor) -> Any:
    if _large(a):
        return NotImplemented
    high, width = a.shape[-2:]
    wide, rows, columns = a.to(torch.float64), torch.arange(high).unsqueeze(-1), torch.arange(width)
    found = (rows == columns).to(torch.float64).expand(a.shape)
    for k in reversed(range(tau.shape[-1])):
        vector = torch.where(rows > k, wide[..., k : k + 1], (rows == k).to(torch.float64))
        scaled = tau[..., k : k + 1].unsqueeze(-1).to(torch.float64) * vector
        found = found - scaled * (vector * found).sum(-2, keepdim=True)
    return found.to(a.dtype)
