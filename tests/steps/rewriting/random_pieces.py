"""What random programs with attention are made of: functions of a generator, the module and its four inputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from many_operators import ROWS
from torch.nn import functional as F

Piece = Callable[..., Any]
INF = float("inf")


def bounded(r: random.Random, m: Any, x: Any) -> Any:
    """Return values that are bounded in a way that can be proven, or almost."""
    d = x.shape[-1]
    return r.choice(
        [
            lambda: F.layer_norm(x, (d,), m.weight("nw", d), m.weight("nb", d)),
            lambda: F.layer_norm(x, (d,), eps=r.choice([1e-5, 1e-12, 0.0])),
            lambda: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * m.weight("rw", d),
            lambda: F.rms_norm(x, (d,), m.weight("rw", d)),
            lambda: x.tanh(),
            lambda: x.sigmoid() * 10,
            lambda: F.normalize(x, dim=-1),
            lambda: F.normalize(x, dim=-1, eps=0.0),
            lambda: x.clamp(-5, 5),
            lambda: x.clamp(max=5),
            lambda: F.softmax(x, -1),
            lambda: x.nan_to_num(),
            lambda: x,
            lambda: x / (x.abs().amax(-1, keepdim=True) + 1),
            lambda: F.relu6(x),
            lambda: F.linear(x.tanh(), m.weight("pw", d, d), m.weight("pb", d)),
            lambda: F.linear(F.layer_norm(x, (d,)), m.weight("pw", d, d)),
            lambda: F.max_pool1d(x.tanh(), 2, stride=1, padding=1, dilation=r.choice([1, 2]))[..., :d],
        ]
    )()


def make_mask(r: random.Random, m: Any, mask: Any, bias: Any, x: Any) -> Any:
    """Return a mask for scores of shape [..., length, length], as bools, numbers, or None."""
    n, dtype = mask.shape[-1], x.dtype
    least = torch.finfo(dtype).min
    hidden = r.choice([-INF, -INF, least, least / 2, -1e4, 0.0])
    causal = torch.ones(n, n, dtype=torch.bool).tril(r.choice([0, 0, 0, -1, 1]))
    eye = torch.eye(n, dtype=torch.bool)
    zero, low = torch.zeros((), dtype=dtype), torch.tensor(hidden, dtype=dtype)
    places = torch.arange(n)
    return r.choice(
        [
            lambda: None,
            lambda: mask,
            lambda: bias,
            lambda: causal,
            lambda: mask & causal,
            lambda: mask | eye,
            lambda: mask | causal,
            lambda: ~mask,
            lambda: torch.where(mask, zero, low),
            lambda: torch.where(causal, zero, low),
            lambda: torch.where(mask & causal, bias, low),
            lambda: torch.where(mask, bias.tanh(), low),
            lambda: torch.where(mask, low, zero),
            lambda: torch.full((n, n), hidden, dtype=dtype).triu(r.choice([0, 1, 1, 2])),
            lambda: torch.full((n, n), -INF, dtype=dtype).triu(1) + torch.where(mask, zero, low),
            lambda: (1 - mask.to(dtype)) * hidden,
            lambda: (1 - mask.to(dtype)) * least,
            lambda: torch.zeros(n, n, dtype=dtype).masked_fill(mask, hidden),
            lambda: torch.zeros(n, n, dtype=dtype).masked_fill(causal.logical_not(), hidden),
            lambda: places[None, :] <= places[:, None],
            lambda: places[None, :] < places[:, None],
            lambda: (places[None, :] <= places[:, None]) & (places[None, :] > places[:, None] - 2),
            lambda: mask[:1],
            lambda: mask.any(0, keepdim=True),
            lambda: bias.clamp(min=least),
            lambda: torch.maximum(bias, low),
            lambda: torch.where(mask, zero, low).to(torch.float16).to(dtype),
            lambda: torch.where(mask, zero, low) * 2 + bias.tanh(),
            lambda: (mask & (torch.arange(n) == 0)) | (places[None, :] == 0),
            lambda: torch.cat([mask[:, :1] | True, mask[:, 1:]], -1),
            lambda: F.pad(mask[:, 1:], (1, 0), value=r.random() < 0.5),
            lambda: torch.where(mask[:, :1], zero, low).expand(n, n),
            lambda: torch.where(mask, zero, low).t(),
            lambda: mask.t().logical_not().logical_not(),
            lambda: torch.where(mask.any(-1, keepdim=True), torch.where(mask, zero, low), zero),
        ]
    )()


def split(m: Any, x: Any, heads: int) -> Any:
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def attention(r: random.Random, m: Any, x: Any, mask: Any, bias: Any, position: Any) -> Any:
    """scaled_dot_product_attention with any mask, of queries and keys that are bounded or not."""
    base = bounded(r, m, x) if r.random() < 0.8 else x
    d = x.shape[-1]
    q, k, v = base, base, x
    if r.random() < 0.4:
        q, k = F.linear(base, m.weight("q", d, d), m.weight("qb", d)), F.linear(base, m.weight("k", d, d))
    q, k, v = (split(m, one, m.heads) for one in (q, k, v))
    if m.heads > 1 and r.random() < 0.4:
        k, v = _grouped(r, m, k), _grouped(r, m, v)
    chosen = make_mask(r, m, mask, bias, x)
    if chosen is not None and r.random() < 0.3:
        chosen = chosen[None, None]
    causal = chosen is None and r.random() < 0.5
    scale = r.choice([None, None, 1.0, 0.5])
    layers = [F.scaled_dot_product_attention(q, k, v, chosen, is_causal=causal, scale=scale)]
    if r.random() < 0.3:
        layers.append(F.scaled_dot_product_attention(layers[0] if r.random() < 0.5 else k, k, v, chosen))
    out = layers[-1].transpose(1, 2).reshape(x.shape)
    return [out, *layers[: r.choice([0, 0, 1])]]


def _grouped(r: random.Random, m: Any, k: Any) -> Any:
    """Return keys of half as many heads, repeated."""
    groups, repeats = m.heads // 2, 2
    k = k[:, :groups]
    b, _, n, d = k.shape
    return r.choice(
        [
            lambda: k[:, :, None].expand(b, groups, repeats, n, d).reshape(b, groups * repeats, n, d),
            lambda: k.repeat_interleave(repeats, dim=1),
            lambda: k[:, None].expand(b, repeats, groups, n, d).reshape(b, groups * repeats, n, d),
            lambda: k.repeat(1, repeats, 1, 1),
            lambda: (k[:, :, None] * 2.0).expand(b, groups, repeats, n, d).reshape(b, groups * repeats, n, d) * 0.5,
            lambda: k[:, :, None].expand(b, groups, repeats, n, d).flatten(1, 2).clone() / 2,
        ]
    )()


def gqa(r: random.Random, m: Any, x: Any, mask: Any, bias: Any, position: Any) -> Any:
    """Products of matrices some of which are repeated, by hand."""
    q = split(m, bounded(r, m, x), m.heads)
    k = _grouped(r, m, split(m, x, m.heads)) if m.heads > 1 else q.expand(q.shape[0], 2, *q.shape[2:])[:, :1]
    if r.random() < 0.3:
        k = k * torch.full((1,) * r.choice([1, 4, 4]), 0.5, dtype=x.dtype)
    scores = q @ k.transpose(-1, -2)
    if r.random() < 0.5:
        return scores
    return [F.softmax(scores, -1) @ k, scores]


def safe_softmax(r: random.Random, m: Any, x: Any, mask: Any, bias: Any, position: Any) -> Any:
    """A safe softmax, or what looks like one."""
    base = bounded(r, m, x)
    scores = base @ base.transpose(-1, -2)
    chosen = make_mask(r, m, mask, bias, x)
    if chosen is not None:
        chosen = (
            torch.where(chosen, 0.0, r.choice([-INF, -INF, -1e4])).to(x.dtype) if chosen.dtype is torch.bool else chosen
        )
        scores = r.choice(
            [lambda: scores + chosen, lambda: chosen + scores, lambda: torch.add(scores, chosen, alpha=2)]
        )()
    dim = r.choice([-1, -1, -1, 2, 1, 0, -2])
    other = r.choice([dim, dim, dim, dim, -1, 1])
    number = r.choice([-INF, -INF, -INF, -INF, INF, float(torch.finfo(x.dtype).min), 0.0])
    found = scores.eq(number) if r.random() < 0.9 else scores.ne(number)
    empty = r.choice(
        [
            lambda: torch.logical_not(torch.any(torch.logical_not(found), dim=other, keepdim=True)),
            lambda: torch.logical_not(torch.any(torch.logical_not(found), dim=other, keepdim=True)),
            lambda: torch.logical_not(torch.any(torch.logical_not(found), dim=other, keepdim=True)),
            lambda: torch.all(found, dim=other, keepdim=True),
            lambda: torch.any(found, dim=other, keepdim=True),
            lambda: torch.logical_not(torch.any(torch.logical_not(found), dim=other)).unsqueeze(other),
            lambda: torch.any(torch.logical_not(found), dim=other, keepdim=True),
        ]
    )()
    soft = F.softmax(scores + 0 if r.random() < 0.1 else scores, dim)
    fill = r.choice([0.0, 0.0, 0.0, 0.0, -0.0, 1.0])
    filled = torch.full_like(scores, fill) if r.random() < 0.7 else torch.tensor(fill, dtype=x.dtype)
    result = torch.where(empty, filled, soft) if r.random() < 0.9 else torch.where(empty, soft, filled)
    return [result, result @ x if r.random() < 0.5 else empty]


def norm(r: random.Random, m: Any, x: Any, mask: Any, bias: Any, position: Any) -> Any:
    """Normalisations as functions and by hand, over several dimensions."""
    d, n = x.shape[-1], x.shape[-2]
    eps = r.choice([1e-5, 1e-5, 1e-12, 1e-2])
    return r.choice(
        [
            lambda: F.layer_norm(x, (d,), m.weight("nw", d), m.weight("nb", d), eps),
            lambda: F.layer_norm(x, (d,), None, m.weight("nb", d), eps),
            lambda: F.layer_norm(x, (d,), m.weight("nw", d), None, eps),
            lambda: F.layer_norm(x, (n, d) if type(n) is int else (d,), eps=eps),
            lambda: F.layer_norm(x.transpose(1, 2).contiguous().transpose(1, 2), (d,), eps=eps),
            lambda: torch.native_layer_norm(x, (d,), None, None, eps)[: r.choice([1, 2, 3])],
            lambda: F.group_norm(x.transpose(1, 2), m.heads).transpose(1, 2),
            lambda: F.rms_norm(x, (d,), None, eps),
            lambda: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + eps),
            lambda: F.batch_norm(x.transpose(1, 2), m.weight("bm", d), m.weight("bv", d).abs(), eps=eps),
            lambda: x / x.norm(dim=-1, keepdim=True).clamp(min=eps),
        ]
    )()


def linear(r: random.Random, m: Any, x: Any, mask: Any, bias: Any, position: Any) -> Any:
    """Linear layers with views around them, as functions and as products."""
    d = x.shape[-1]
    w, b = m.weight("lw", d, d), m.weight("lb", d)
    rows = x.reshape(-1, d)
    return r.choice(
        [
            lambda: F.linear(x, w, b),
            lambda: F.linear(rows, w, b).view(x.shape),
            lambda: torch.addmm(b, rows, w.t()).view(x.shape),
            lambda: torch.addmm(b, rows.view(x.shape).view(-1, d), w).view(x.shape).view(rows.shape),
            lambda: F.linear(x.view(x.shape[0], -1, m.heads, d // m.heads).flatten(2), w),
            lambda: F.linear(x, w, b).view(rows.shape).view(x.shape) + F.linear(x, w, b),
            lambda: F.linear(x.permute(1, 0, 2).permute(1, 0, 2), w, b).permute(0, 2, 1).permute(0, 2, 1),
            lambda: F.linear(x.unsqueeze(0).squeeze(0), w.t().t(), b),
            lambda: F.linear(x.transpose(0, 1), w, b).transpose(0, 1).reshape(x.shape),
            lambda: x @ w.t() + b,
            lambda: F.linear(x.view(1, *x.shape), w, b).view(x.shape),
        ]
    )()


def many(r: random.Random, m: Any, x: Any, mask: Any, bias: Any, position: Any) -> Any:
    """Return functions of rows that are not Core ATen operators, or that are computed in another way."""
    value = x[0]
    for _ in range(r.randint(1, 3)):
        value = r.choice(ROWS)(value)
    return [value, value[..., :1] + x]


ALL: Sequence[Piece] = (
    *(attention,) * 8,
    *(safe_softmax,) * 4,
    *(gqa,) * 2,
    *(norm,) * 2,
    *(linear, many) * 2,
)
