"""Recurrent and state space models over sequences of any length: torch's `scan`, equal to eager PyTorch's modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.export import Dim, export
from torch.nn import functional
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

import exir_lowering

LONGEST = 24


class OverTime(nn.Module):
    """Steps over the sequences `[batch, time, ...]` that `prepare` makes of an input; `finish` takes their results."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, start = self.prepare(x)
        steps = scan(self.step, start, [one.transpose(0, 1) for one in given])[1]
        return self.finish(steps.transpose(0, 1), given)

    def finish(self, y: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
        return y


class Lstm(OverTime):
    """`torch.nn.LSTM` of a layer."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.eager = nn.LSTM(size, 5, batch_first=True)

    def prepare(self, x):
        zero = x.new_zeros(x.shape[0], 5)
        bias = self.eager.bias_ih_l0 + self.eager.bias_hh_l0
        return [functional.linear(x, self.eager.weight_ih_l0, bias)], [zero, zero.clone()]

    def step(self, state, given):
        i, f, g, o = (given[0] + torch.mm(state[0], self.eager.weight_hh_l0.t())).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return [h, c], h.clone()

    def expected(self, x):
        return self.eager(x)[0]


class Gru(OverTime):
    """`torch.nn.GRU` of a layer."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.eager, self.cell = nn.GRU(size, 5, batch_first=True), nn.GRUCell(size, 5)
        self.cell.load_state_dict({key.removesuffix("_l0"): one for key, one in self.eager.state_dict().items()})

    def prepare(self, x):
        return [x], [x.new_zeros(x.shape[0], 5)]

    def step(self, state, given):
        h = self.cell(given[0], state[0])
        return [h], h.clone()

    def expected(self, x):
        return self.eager(x)[0]


class Mamba(OverTime):
    """The mixer of transformers' Mamba."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.eager = MambaMixer(MambaConfig(hidden_size=size, state_size=4, num_hidden_layers=1), 0)

    def prepare(self, x):
        one = self.eager
        u, gate = one.in_proj(x).chunk(2, -1)
        u = functional.silu(one.conv1d(u.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        delta, b, c = one.x_proj(u).split([one.time_step_rank, one.ssm_state_size, one.ssm_state_size], -1)
        start = x.new_zeros(x.shape[0], one.intermediate_size, one.ssm_state_size)
        return [u, functional.softplus(one.dt_proj(delta)), b, c, gate], [start]

    def step(self, state, given):
        u, delta, b, c, _ = given
        decay = torch.exp(delta[..., None] * -torch.exp(self.eager.A_log))
        state = decay * state[0] + (delta * u)[..., None] * b[:, None]
        return [state], (state * c[:, None]).sum(-1)

    def finish(self, y, given):
        return self.eager.out_proj((y + given[0] * self.eager.D) * functional.silu(given[4]))

    def expected(self, x):
        return self.eager(x)


class Rwkv(OverTime):
    """The time mixing of RWKV, version 4: a weighted mean of all values so far, whose weights decay."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.r, self.k, self.v = (nn.Linear(size, size) for _ in range(3))
        self.decay, self.first = nn.Parameter(torch.rand(size)), nn.Parameter(torch.rand(size))

    def prepare(self, x):
        zero = x.new_zeros(x.shape[0], x.shape[2])
        return [self.k(x), self.v(x), self.r(x)], [zero, zero.clone()]

    def step(self, state, given):
        (above, below), (k, v, _) = state, given
        now, kept, left = torch.exp(self.first + k), torch.exp(k), torch.exp(-self.decay)
        return [left * above + kept * v, left * below + kept], (above + now * v) / (below + now)

    def finish(self, y, given):
        return given[2].sigmoid() * y

    def expected(self, x):
        k, v, rows = self.k(x), self.v(x), []
        for t in range(x.shape[1]):
            age = torch.arange(t - 1, -1, -1)[:, None]
            weights = torch.cat([torch.exp(k[:, :t] - self.decay * age), torch.exp(self.first + k[:, t : t + 1])], 1)
            rows.append((weights * v[:, : t + 1]).sum(1) / weights.sum(1))
        return self.r(x).sigmoid() * torch.stack(rows, 1)


@pytest.mark.parametrize("kind", [Lstm, Gru, Mamba, Rwkv])
def test_any_length_is_equal_to_eager(kind: type[OverTime]) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = kind().eval().requires_grad_(False)
    program = export(model, (torch.randn(2, 7, 6),), dynamic_shapes=({1: Dim("time", max=LONGEST)},))
    loaded = exir_lowering.load(exir_lowering.lower(program, "xnnpack").emit().buffer)
    for length in (3, LONGEST, 1, 7, LONGEST):
        x = torch.randn(2, length, 6)
        torch.testing.assert_close(loaded.run("forward", x)[0], model.expected(x), atol=1e-5, rtol=1e-5)
    with pytest.raises(exir_lowering.InputError, match=f"at most \\[2, {LONGEST}, 6\\]"):
        loaded.run("forward", torch.randn(2, LONGEST + 1, 6))


class Streamed(nn.Module):
    """A recurrent model whose state stays in the file, for sequences in pieces."""

    def __init__(self, model: Lstm) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("h", torch.zeros(1, 5))
        self.register_buffer("c", torch.zeros(1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (gates,), _ = self.model.prepare(x)
        (h, c), y = scan(self.model.step, [self.h.clone(), self.c.clone()], [gates.transpose(0, 1)])
        self.h.copy_(h)
        self.c.copy_(c)
        return y.transpose(0, 1)


def test_a_sequence_in_pieces_of_any_length() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Lstm().eval().requires_grad_(False)
    dims = ({1: Dim("time", max=LONGEST)},)
    program = export(Streamed(model), (torch.randn(1, 7, 6),), dynamic_shapes=dims)
    loaded = exir_lowering.load(exir_lowering.lower(program, "xnnpack").emit().buffer)
    for lengths in ((5, 1, LONGEST, 2), (3, 3)):
        pieces = [torch.randn(1, length, 6) for length in lengths]
        found = torch.cat([loaded.run("forward", one)[0] for one in pieces], 1)
        torch.testing.assert_close(found, model.expected(torch.cat(pieces, 1)), atol=1e-5, rtol=1e-5)
        loaded.reset()
