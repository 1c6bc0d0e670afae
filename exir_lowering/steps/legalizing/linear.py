"""Rules for linear algebra of small matrices, eliminated one column after the other, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.nn import functional as F

from exir_lowering import graphs
from exir_lowering.steps.legalizing.registry import Rule, require, rule

UNROLLED = 32
"""How many rows or columns may be eliminated one after the other."""


def _of_small(*names: str, place: int = 0) -> Callable[[Rule], Rule]:
    """Make a function the rule of operators whose matrix at a place among the arguments is small."""

    def add(function: Rule) -> Rule:
        def compute(*args: Any, **kwargs: Any) -> Any:
            require(all(isinstance(size, int) and size <= UNROLLED for size in args[place].shape[-2:]))
            return function(*args, **kwargs)

        rule(*names, wide=torch.float64)(compute)
        return function

    return add


def drop_checks(program: ExportedProgram) -> None:
    """Remove what raises an error for singular matrices in eager mode: a file has their infinities and NaN instead."""
    graph, signature = program.graph, program.graph_signature
    for node in list(graph.nodes):
        if graphs.operator_name(node) != "with_effects" or str(node.args[1]) != "aten._linalg_check_errors.default":
            continue
        for token in list(node.users):
            token.replace_all_uses_with(cast(Node, node.args[0]))
            graph.erase_node(token)
        graph.erase_node(node)
    output = graph.output_node()
    for token in [node for node in graph.nodes if node.op == "placeholder" and [*node.users] == [output]]:
        if any(spec.kind is InputKind.TOKEN and spec.arg.name == token.name for spec in signature.input_specs):
            kept = [number for number, value in enumerate(output.args[0]) if value is not token]
            output.args = (tuple(output.args[0][number] for number in kept),)
            signature.output_specs = [signature.output_specs[number] for number in kept]
            signature.input_specs = [spec for spec in signature.input_specs if spec.arg.name != token.name]
            graph.erase_node(token)


def _factored(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return both factors in one matrix, and with which row each was exchanged, from 1."""
    high, width = a.shape[-2:]
    rows, columns = torch.arange(high), torch.arange(width)
    chosen = [torch.zeros(*a.shape[:-2], 0, dtype=torch.int64)]
    for k in range(min(high, width)):
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
    for k in range(pivots.shape[-1]):
        order = order.gather(-1, _exchanged(rows, k, pivots[..., k : k + 1].to(torch.int64) - 1))
    return order


def _info(diagonal: Tensor) -> Tensor:
    """Return the number of the first column that could not be eliminated, from 1; 0 if there is none."""
    size = diagonal.shape[-1]
    first = F.pad(torch.where(diagonal == 0, torch.arange(size), size), [0, 1], value=size).amin(-1)
    return torch.where(first == size, 0, first + 1).to(torch.int32)


def _sign(pivots: Tensor) -> Tensor:
    return 1 - 2 * ((pivots != torch.arange(1, pivots.shape[-1] + 1)).sum(-1) & 1)


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


@_of_small("_linalg_det")
def _det(a: Tensor) -> Any:
    factors, pivots = _factored(a)
    return _diagonal(factors).prod(-1) * _sign(pivots), factors, pivots


@_of_small("_linalg_slogdet")
def _slogdet(a: Tensor) -> Any:
    factors, pivots = _factored(a)
    diagonal = _diagonal(factors)
    signs = (diagonal > 0).to(torch.float64) - (diagonal < 0).to(torch.float64)
    return signs.prod(-1) * _sign(pivots), torch.log(diagonal.abs()).sum(-1), factors, pivots


@_of_small("linalg_lu_factor_ex")
def _lu_factor(a: Tensor, *, pivot: bool = True, check_errors: bool = False) -> Any:
    factors, pivots = _factored(a)
    return (factors, pivots, _info(_diagonal(factors))) if pivot else NotImplemented


@_of_small("lu_unpack")
def _lu_unpack(a: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    high, width = a.shape[-2:]
    rows, columns, least = torch.arange(high).unsqueeze(-1), torch.arange(width), min(high, width)
    nothing = torch.zeros(0, dtype=a.dtype)
    places = (_order(pivots, high).unsqueeze(-2) == rows).to(a.dtype) if unpack_pivots else nothing
    if not unpack_data:
        return places, nothing, nothing
    lower = torch.where(rows > columns, a, (rows == columns).to(a.dtype))[..., :least]
    return places, lower, torch.where(rows <= columns, a, 0.0)[..., :least, :]


@_of_small("linalg_lu")
def _lu(a: Tensor, *, pivot: bool = True) -> Any:
    return _lu_unpack(*_factored(a)) if pivot else NotImplemented


@_of_small("linalg_lu_solve")
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


@_of_small("_linalg_solve_ex")
def _solve(a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    factors, pivots = _factored(a)
    found = _lu_solve(factors, pivots, b.unsqueeze(-1) if vector else b, left=left)
    return found.squeeze(-1) if vector else found, factors, pivots, _info(_diagonal(factors))


@_of_small("linalg_inv_ex")
def _inverse(a: Tensor, *, check_errors: bool = False) -> Any:
    factors, pivots = _factored(a)
    return _lu_solve(factors, pivots, torch.eye(a.shape[-1], dtype=a.dtype)), _info(_diagonal(factors))


@_of_small("linalg_solve_triangular")
def _solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    if left:
        return _substituted(a, b, upper, unitriangular)
    return _substituted(a.mT, b.mT, not upper, unitriangular).mT


@_of_small("triangular_solve", place=1)
def _old_solve_triangular(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    found = _substituted(a.mT if transpose else a, b, upper != transpose, unitriangular)
    return found, a.expand(*found.shape[:-2], *a.shape[-2:]).clone()


@_of_small("linalg_cholesky_ex")
def _cholesky_ex(a: Tensor, *, upper: bool = False, check_errors: bool = False) -> Any:
    """Return the Cholesky factor, and the number of the first column that has none."""
    a, size = a.mT if upper else a, a.shape[-1]
    rows, columns = torch.arange(size).unsqueeze(-1), torch.arange(size)
    found, heads = torch.zeros_like(a), [torch.zeros(*a.shape[:-2], 0, dtype=a.dtype)]
    for k in range(size):
        head = a[..., k : k + 1, k : k + 1]
        column = torch.where(rows >= k, a[..., k : k + 1] / torch.sqrt(head), 0.0)
        found = torch.where(columns == k, column, found)
        a = a - column * column.mT
        heads.append(head.reshape(*a.shape[:-2], 1))
    return found.mT if upper else found, _info((torch.cat(heads, -1) > 0).to(torch.int64))


@_of_small("cholesky")
def _cholesky(a: Tensor, upper: bool = False) -> Any:
    return _cholesky_ex(a, upper=upper)[0]


@_of_small("cholesky_solve", place=1)
def _cholesky_solve(b: Tensor, root: Tensor, upper: bool = False) -> Any:
    lower = root.mT if upper else root
    return _substituted(lower.mT, _substituted(lower, b, False, False), True, False)


@_of_small("cholesky_inverse")
def _cholesky_inverse(root: Tensor, upper: bool = False) -> Any:
    return _cholesky_solve(torch.eye(root.shape[-1], dtype=root.dtype), root, upper)


@_of_small("linalg_qr")
def _qr(a: Tensor, mode: str = "reduced") -> Any:
    """By reflections, with LAPACK's signs."""
    high, width = a.shape[-2:]
    r, rows = a, torch.arange(high).unsqueeze(-1)
    q = torch.eye(high, dtype=a.dtype).expand(*a.shape[:-2], high, high)
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
    r = torch.where(rows <= torch.arange(width), r, 0.0)[..., :least, :]
    return (q[..., :least] if mode != "r" else torch.zeros(0, dtype=a.dtype)), r


@_of_small("linalg_householder_product")
def _householder_product(a: Tensor, tau: Tensor) -> Any:
    rows, columns = torch.arange(a.shape[-2]).unsqueeze(-1), torch.arange(a.shape[-1])
    found = (rows == columns).to(a.dtype).expand(a.shape)
    for k in reversed(range(tau.shape[-1])):
        vector = torch.where(rows > k, a[..., k : k + 1], (rows == k).to(a.dtype))
        found = found - tau[..., k : k + 1].unsqueeze(-1) * vector * (vector * found).sum(-2, keepdim=True)
    return found
