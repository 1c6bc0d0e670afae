"""What random programs draw besides Core ATen operators: what `lower` makes of others, or computes in another way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

ROWS: Sequence[Callable[[Any], Any]] = (
    lambda v: v.sort(-1)[0],
    lambda v: v.sort(stable=True, dim=-1, descending=True)[0] * 0.5,
    lambda v: v.cumsum(-1) * 0.3,
    lambda v: torch.tanh(v).cumprod(-1),
    lambda v: torch.tanh(v).prod(-1, keepdim=True) + v,
    lambda v: v.cummax(-1)[0],
    lambda v: v.logcumsumexp(-1) * 0.5,
    lambda v: torch.logaddexp(v, v.flip(-1)),
    lambda v: v - v.logsumexp(-1, keepdim=True),
    lambda v: v - v.std(-1, keepdim=True),
    lambda v: v + v.var(-1, keepdim=True, unbiased=False).clamp(max=4),
    lambda v: v.median(-1, keepdim=True)[0] - v,
    lambda v: v.abs().sqrt(),
    lambda v: F.layer_norm(v + 3, v.shape[-1:]),
    lambda v: F.group_norm(v.reshape(1, -1, 4).transpose(1, 2), 2).transpose(1, 2).reshape(v.shape),
    lambda v: F.normalize(v, dim=-1),
    lambda v: F.log_softmax(v, -1),
    lambda v: F.pad(v, (-1, 1)),
    lambda v: v.roll(1, -1),
    lambda v: v.diff(dim=-1, prepend=v[..., :1]),
    lambda v: v.reshape(-1, 4).tril().reshape(v.shape),
    lambda v: v.diag_embed().sum(-1),
    lambda v: v.gather(-1, torch.arange(v.shape[-1] - 1, -1, -1).expand(v.shape)),
    lambda v: v.scatter_reduce(-1, torch.zeros(v.shape, dtype=torch.int64), v, "amax"),
    lambda v: v.index_add(-1, torch.tensor([0, 0]), v[..., :2] * 0.5),
    lambda v: v.masked_fill(v > 1, 1.0),
    lambda v: torch.einsum("...i,...j->...i", v, torch.softmax(v, -1)),
    lambda v: F.avg_pool1d(v.unsqueeze(0), 3, 1, 1).squeeze(0) if v.dim() == 2 else v,
    lambda v: F.interpolate(v.unsqueeze(0), scale_factor=2.0)[..., ::2].squeeze(0) if v.dim() == 2 else v,
    lambda v: torch.hypot(v, torch.ones_like(v)),
    lambda v: torch.atan2(v, v.abs() + 1),
    lambda v: torch.lerp(v, torch.sin(v), 0.25),
    lambda v: torch.special.entr(v.sigmoid()),
    lambda v: torch.expm1(v.clamp(max=1)) - torch.log1p(v.abs()),
    lambda v: F.softplus(v) - F.mish(v),
    lambda v: F.celu(v) + F.hardshrink(v, 0.0),
    lambda v: F.logsigmoid(v),
    lambda v: v.nan_to_num(),
)
"""Continuous functions of rows of numbers, of any type of floats, that return as many, and none that are large."""

WHOLE: Sequence[str] = (
    "torch.remainder({0}, 3)",
    "torch.div({0}, 2, rounding_mode='floor')",
    "torch.fmod({0}, 3)",
    "{0}.clamp(-3, 5)",
    "{0}.abs()",
    "{0}.sign()",
    "torch.minimum({0}, {1})",
    "{0}.square().clamp(max=9)",
    "({0} - {1}).relu()",
)
"""Exact on small integers, of any type that has them; {0} and {1} are values of one shape."""

WHOLE_ROWS: Sequence[str] = (
    "{0}.cumsum(0, dtype={0}.dtype).clamp(-9, 9)",
    "{0}.sort(0)[0]",
    "{0}.amax(0, keepdim=True).expand({0}.shape)",
    "torch.cat([{0}[:1], {0}.diff(dim=0)])",
    "{0}.index_select(0, {0}.reshape({0}.shape[0], -1)[:, 0].argsort(stable=True))",
)
"""The same, of values with rows."""
