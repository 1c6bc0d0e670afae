"""Examples that are expanded, transposed or parts of others: files take contiguous inputs, and compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executorch.exir import to_edge
from torch.export import Dim, export
from torch.nn import functional as F

from exir_lowering import InputError, load, lower, to_backend


class Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        chosen = torch.cond(x.sum() > 0, lambda v: v * 2, lambda v: v - 1, (x,))
        return self.layer(x) + x.sum(0), x.reshape(-1), x.t() * 2, x[:, 1:], chosen


class Images(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x), x.flip(1), x.mean((2, 3)), x.transpose(1, 3) + 1


MEMORY = torch.linspace(-1, 2, 200)
EXAMPLES = {
    "rows expanded": MEMORY[:4].expand(3, 4),
    "columns expanded": MEMORY[:3, None].expand(3, 4),
    "one number": MEMORY[7].expand(3, 4),
    "overlapping": MEMORY.as_strided((3, 4), (2, 1)),
    "transposed": MEMORY[:12].view(4, 3).t(),
    "with gaps": MEMORY[:24].view(3, 8)[:, ::2],
    "a row with an odd stride": MEMORY.as_strided((1, 4), (77, 1)),
    "no row": MEMORY[:0].view(4, 0).t(),
    "images expanded": MEMORY[:6].view(2, 3, 1, 1).expand(2, 3, 4, 5),
    "channels last, expanded": MEMORY[:60].view(1, 3, 4, 5).to(memory_format=torch.channels_last).expand(2, 3, 4, 5),
    "channels last": MEMORY[:120].view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "reversed": MEMORY[:120].view(5, 4, 3, 2).permute(3, 2, 1, 0),
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_they_run(example: str) -> None:
    x = EXAMPLES[example]
    torch.manual_seed(0)
    model = (Rows() if x.dim() == 2 else Images()).eval()
    for number, partitioner in enumerate((None, "xnnpack")):
        rows = {0: Dim("rows", min=1, max=9)} if number and len(x) > 1 else {}
        program = export(model, (x,), dynamic_shapes=(rows,))
        before = program.graph.find_nodes(op="placeholder")[-1].meta["val"].stride()
        file = load(lower(program, partitioner).emit().buffer)
        assert program.graph.find_nodes(op="placeholder")[-1].meta["val"].stride() == before
        for given in (x, x.contiguous(), torch.rand(x.shape), -torch.rand(7, *x.shape[1:]) if rows else x):
            for got, expected in zip(file.run("forward", given), model(given), strict=True):
                torch.testing.assert_close(got, expected)


def test_what_was_converted_before_is_refused() -> None:
    for example in ("rows expanded", "transposed"):
        edge = to_edge(export(torch.nn.Linear(4, 4), (EXAMPLES[example],))).exported_program()
        with pytest.raises(InputError, match="contiguous"):
            to_backend(edge, None).emit()


def test_a_view_of_what_attention_returns() -> None:
    """`torch.export` takes it for contiguous; decomposed, and in eager mode, it is not."""

    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return F.scaled_dot_product_attention(x, x, x).view(-1, 4)

    x = torch.randn(2, 2, 3, 4)
    program = export(Attention(), (x,))
    with pytest.raises(ValueError, match="Cannot view a tensor"):  # if it is gone, so may be the copies
        to_edge(program)
    got = load(lower(program, "xnnpack").emit().buffer).run("forward", x)[0]
    torch.testing.assert_close(got, F.scaled_dot_product_attention(x, x, x).reshape(-1, 4))
