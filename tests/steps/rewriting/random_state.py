"""Random ways to keep keys and values from call to call."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.nn import functional as F


def cache(r: random.Random, m: Any, x: Any, mask: Any, bias: Any, position: Any) -> Any:
    """Write a row into the state, and attend to what it holds."""
    old = [m.keys.clone(), m.keys.reshape(m.batch, -1), m.keys[:, :2].clone(), m.keys * 1, m.keys.permute(1, 0, 2) + 0]
    before = r.choice(old)
    row = x[:, :1]
    write = r.choice(_WRITES)
    write(m.keys, position, row)
    again = r.choice([lambda: write(m.values, position, row * 2), lambda: write(m.keys, position, row + 1), lambda: 0])
    middle = m.keys.clone() if r.random() < 0.3 else m.values + 0
    again()
    seen = m.table <= (position if r.random() < 0.7 else m.step)
    hidden = r.choice([float("-inf"), torch.finfo(x.dtype).min])
    scores = x @ m.keys.transpose(-1, -2) / m.width**0.5
    if r.random() < 0.3:
        m.step.add_(1)
    attended = r.choice(
        [
            lambda: F.softmax(scores.masked_fill(~seen, hidden), -1) @ m.values,
            lambda: F.scaled_dot_product_attention(
                x, m.keys, m.values, attn_mask=seen[None, None].expand(m.batch, x.shape[1], 8)
            ),
            lambda: F.scaled_dot_product_attention(
                x.tanh(), m.keys, m.values, attn_mask=torch.where(seen, 0.0, hidden).to(x.dtype)
            ),
            lambda: scores.sum(-1),
        ]
    )()
    return r.choice(
        [[attended], [attended, before], [attended, before, middle, m.step + 0], [m.keys.clone(), before, before]]
    )


def _slice(state: Any, position: Any, row: Any) -> None:
    state[:, 1:2] = row


_WRITES = (
    lambda state, position, row: state.index_put_((torch.tensor([0]), position), row[0]),
    lambda state, position, row: state.__setitem__((slice(None), position), row),
    lambda state, position, row: state.index_copy_(1, position, row),
    lambda state, position, row: state[:, 2:3].copy_(row),
    lambda state, position, row: state.copy_(torch.cat([state[:, 1:], row], 1)),
    lambda state, position, row: state.select(1, 3).add_(row[:, 0]),
    _slice,
)
STATE = (cache,)
